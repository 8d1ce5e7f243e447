// Where a program says its ranks meet: "env://", "tcp://HOST:PORT" or "file:///PATH", as torch.distributed writes them,
// or "unix://NAME". Pure functions.
#pragma once

#include "base/result.h"
#include "net/address.h"

#include <optional>
#include <string>
#include <string_view>

namespace cohort::cluster {

struct InitMethod {
  enum class Kind { Env, Tcp, File, Unix };
  Kind kind = Kind::Env;
  net::Address address;  ///< with Tcp; the port is not 0
  std::string path;      ///< with File; absolute
  std::string name;      ///< with Unix; 1 to 200 bytes
  std::optional<int> rank;
  std::optional<int> world_size;
};

/// Accepts "?rank=R&world_size=N" behind each of them. Fails with InvalidArgument, naming the text and what is wrong.
Result<InitMethod> parse_init_method(std::string_view text);

}  // namespace cohort::cluster
