// Where a program says its ranks meet: "env://", "tcp://HOST:PORT" or "file:///PATH", as torch.distributed writes them,
// or "unix://NAME"; and by which transport. Pure functions.
#pragma once

#include "base/result.h"
#include "net/address.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::rendezvous {

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

/// Which transports there are between hosts.
enum class TransportKind : std::uint8_t { Tcp, Mpi };

constexpr std::string_view name_of(TransportKind kind) noexcept { return kind == TransportKind::Mpi ? "mpi" : "tcp"; }

/// Empty: tcp. `from` is named where the text is neither.
Result<TransportKind> parse_transport(std::string_view text, std::string_view from);

}  // namespace cohort::rendezvous
