// plan_init: plans an `init` from its options and the environment: rank, size and meeting place. Uses only the secret
// (its file or descriptor), the name service, /proc and the launcher's meeting place.
// keep_launchers_secret: keeps a secret that the ranks of a world share after they have met through their launcher. Any
// thread. (`rendezvous_method` is in cohort/init_options.h.)
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/secret.h"
#include "rendezvous/detect.h"
#include "rendezvous/exchange.h"

#include <cohort/init_options.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::rendezvous {

// Meeting place that a program gives: "env://", "tcp://HOST:PORT" or "file:///PATH", written like torch.distributed's,
// or "unix://NAME"; and the transport. Pure functions.
struct InitMethod {
  enum class Kind { Env, Tcp, File, Unix };
  Kind kind = Kind::Env;
  net::Address address;  ///< with Tcp; the port is not 0
  std::string path;      ///< with File; absolute
  std::string name;      ///< with Unix; 1 to 200 bytes
  std::optional<int> rank;
  std::optional<int> world_size;
};

/// Accepts "?rank=R&world_size=N" at the end of each form. Fails with InvalidArgument, naming the text and the fault.
Result<InitMethod> parse_init_method(std::string_view text);

/// Transports between hosts.
enum class TransportKind : std::uint8_t { Tcp, Mpi };

constexpr std::string_view name_of(TransportKind kind) noexcept { return kind == TransportKind::Mpi ? "mpi" : "tcp"; }

struct InitPlan {
  enum class Place {
    None,      ///< a world of one
    Job,       ///< meets in the store of `cohort run`, at `endpoint`
    Rank0,     ///< rank 0 listens at `endpoint`
    File,      ///< `path`
    Exchange,  ///< rank 0 listens, and shares its address through `exchange`
    Shared,    ///< like Exchange, but `exchange` is the program's own channel
  };
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;  ///< from the launcher
  std::optional<int> local_size;
  std::string source;   ///< the source of rank and size
  std::string program;  ///< from InitOptions or COHORT_PROGRAM; empty if not given
  std::string note;     ///< a possible mistake, for a warning
  bool trusts_network = false;
  std::optional<int> worker;           ///< number in an elastic job; the job's membership overrides rank and size
  std::optional<int> kept_local_rank;  ///< set for a member of an elastic job, which keeps it, since it selects the GPU
  Place place = Place::None;
  net::Endpoint endpoint;
  std::optional<net::Secret> secret;
  std::string path;
  std::shared_ptr<Exchange> exchange;
  std::string who_may_come;  ///< why only ranks of this host can come; empty: all can
  std::string place_name;    ///< for messages; the same for all worlds that meet at this place
  TransportKind transport = TransportKind::Tcp;
  std::chrono::milliseconds init_timeout{0};
  std::chrono::milliseconds timeout{0};
};

/// Returns the secret for forming a world at such a place; nullopt if this process has none.
Result<std::optional<net::Secret>> find_secret(const InitOptions& options, const rendezvous::Environment& environment,
                                               InitPlan::Place place);

/// Returns the secret for COHORT_TRUST_NETWORK=1. Everybody can compute it.
net::Secret secret_of_trusted_network();

/// Fails with the errors of `cohort::init` about its arguments, the environment and the secret.
Result<InitPlan> plan_init(const InitOptions& options, const rendezvous::Environment& environment);

/// Derives a secret from the meeting's. The ranks share it from now on, for worlds formed later.
void keep_launchers_secret(const net::Secret& of_the_meeting);

}  // namespace cohort::rendezvous
