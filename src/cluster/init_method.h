// Where a program says its ranks meet: "env://", "tcp://HOST:PORT" or "file:///PATH", as torch.distributed writes them.
// Pure functions.
#pragma once

#include "base/result.h"
#include "net/address.h"

#include <optional>
#include <string>
#include <string_view>

namespace cohort::cluster {

struct InitMethod {
  enum class Kind { Env, Tcp, File };
  Kind kind = Kind::Env;
  net::Address address;  ///< with Tcp; the port is not 0
  std::string path;      ///< with File; absolute
  std::optional<int> rank;
  std::optional<int> world_size;
};

/// Accepts "?rank=R&world_size=N" behind each of them. Fails with InvalidArgument, naming the text and what is wrong.
Result<InitMethod> parse_init_method(std::string_view text);

}  // namespace cohort::cluster
