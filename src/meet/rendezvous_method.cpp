#include "meet/rendezvous_method.h"

#include "base/env.h"
#include "cluster/launchers.h"
#include "meet/exchange.h"
#include "meet/plan.h"
#include "net/mac.h"

#include <cohort/join_options.h>

#include <mutex>

namespace cohort::meet {
namespace {

std::mutex kept_mutex;
std::optional<net::Secret> kept;

}  // namespace

// Not the meeting's own secret: what one meeting was shown is no use for another.
void keep_launchers_secret(const net::Secret& of_the_meeting) {
  const net::Mac derived = net::hmac_sha256(of_the_meeting.bytes(), "worlds that are formed later");
  const std::lock_guard lock(kept_mutex);
  kept = net::Secret::from_bytes(derived);
}

std::optional<net::Secret> launchers_secret() {
  const std::lock_guard lock(kept_mutex);
  return kept;
}

}  // namespace cohort::meet

namespace cohort {

RendezvousMethod rendezvous_method(int rank, int size) {
  const cluster::Environment given = cluster::current_environment();
  if (cluster::find(given, env::kInit) != nullptr) return RendezvousMethod::None;
  const auto environment = meet::with_pmix_keys(given);
  if (!environment) return RendezvousMethod::None;
  const auto said = cluster::detect(*environment);
  const bool torchrun = said && said->launcher == "torchrun";
  if (size < 0 && torchrun && said->size > 1 && said->local_size != said->size) return RendezvousMethod::TorchsStore;
  if (const auto secret = meet::find_secret({}, *environment, meet::JoinPlan::Place::Shared); secret && *secret) {
    return RendezvousMethod::Secret;
  }
  const bool is_launchers = said && said->meeting == cluster::Meeting::Launcher && said->local_size != said->size &&
                            (size < 0 || (said->rank == rank && said->size == size));
  if (!is_launchers) return RendezvousMethod::None;
  const auto exchange = meet::find_exchange(*said, *environment);
  return exchange && (*exchange)->rank() == said->rank && (*exchange)->size() == said->size ? RendezvousMethod::Launcher
                                                                                            : RendezvousMethod::None;
}

}  // namespace cohort
