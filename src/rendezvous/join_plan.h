// Plan of a `join`, from its options and the environment: which rank of how many, and where to meet. Touches nothing
// but the secret (its file or descriptor), the name service, /proc and the launcher's meeting place.
// Properties that the ranks of a world share since they met through their launcher. Any thread. (`rendezvous_method` is
// in cohort/join_options.h.)
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/secret.h"
#include "rendezvous/detect.h"
#include "rendezvous/exchange.h"

#include <cohort/join_options.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::rendezvous {

// Meeting place that a program gives: "env://", "tcp://HOST:PORT" or "file:///PATH", as torch.distributed writes them,
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

/// Accepts "?rank=R&world_size=N" behind each of them. Fails with InvalidArgument, naming the text and what is wrong.
Result<InitMethod> parse_init_method(std::string_view text);

/// Transports between hosts.
enum class TransportKind : std::uint8_t { Tcp, Mpi };

constexpr std::string_view name_of(TransportKind kind) noexcept { return kind == TransportKind::Mpi ? "mpi" : "tcp"; }

struct JoinPlan {
  enum class Place {
    None,      ///< a world of one
    Job,       ///< the store of `cohort run`, at `endpoint`
    Rank0,     ///< rank 0 listens at `endpoint`
    File,      ///< `path`
    Exchange,  ///< rank 0 listens, and gives its address through `exchange`
    Shared,    ///< the same, and `exchange` is the program's own
  };
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;  ///< as the launcher says
  std::optional<int> local_size;
  std::string source;   ///< source that said which rank this is
  std::string program;  ///< as it was given; empty: it was not
  std::string note;     ///< worth a warning
  bool trusts_network = false;
  std::optional<int> worker;  ///< of an elastic job: what its membership says counts, not the rank and size above
  std::optional<int> kept_local_rank;  ///< of a member of an elastic job, as long as it lives: by it GPUs are chosen
  Place place = Place::None;
  net::Endpoint endpoint;
  std::optional<net::Secret> secret;
  std::string path;
  std::shared_ptr<Exchange> exchange;
  std::string who_may_come;  ///< empty, or why only ranks of this host can
  std::string place_name;    ///< for messages, and equal for all joins at this place
  TransportKind transport = TransportKind::Tcp;
  std::chrono::milliseconds join_timeout{0};
  std::chrono::milliseconds timeout{0};
};

/// The secret with which a world is to be formed at such a place; nullopt if this process has none.
Result<std::optional<net::Secret>> find_secret(const JoinOptions& options, const rendezvous::Environment& environment,
                                               JoinPlan::Place place);

/// Replaces the secret if COHORT_TRUST_NETWORK=1: everybody can work it out.
net::Secret secret_of_trusted_network();

/// The errors of `cohort::join` about its arguments, the environment and the secret.
Result<JoinPlan> plan_join(const JoinOptions& options, const rendezvous::Environment& environment);

/// The ranks of a world that has been formed through a launcher's meeting place have a secret in common from then on.
void keep_launchers_secret(const net::Secret& of_the_meeting);

}  // namespace cohort::rendezvous
