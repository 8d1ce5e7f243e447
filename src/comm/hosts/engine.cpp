#include "comm/hosts/engine.h"

#include "base/result.h"
#include "comm/hosts/moves.h"

#include <utility>

namespace cohort::comm::hosts {

using namespace std::chrono_literals;

void Engine::run(const Request& request, Clock::time_point called, CollectiveEvent* event) {
  context_.world.throw_if_ended();
  context_.wire_bytes = 0;
  const Descriptor own = describe(request);
  context_.begin(own, called, request.timeout);
  if (event != nullptr) {
    event->sequence = context_.sequence;
    event->group = context_.world.status().id.load(std::memory_order_relaxed);
  }
  try {
    meet_all(context_, round_, &request, own);
    if (event != nullptr) event->waited = round_.waited;
    context_.blocked = 0ns;
    refuse_if(context_, disagreement(context_));
    if (request.kind == Kind::AllToAllV) refuse_if(context_, compare_counts(context_, request));
    if (request.round != nullptr) {
      *request.round = round_of(context_.agreement);
    } else if (!round_.delivered) {
      execute(context_, request, false);
    }
    if (event != nullptr) {
      event->wire = context_.blocked;
      event->wire_bytes = context_.wire_bytes;
    }
    // A rank that comes late can complete what others have given up, from what they sent before. What they said then
    // lies behind that on the same connection; whoever reads it holds the mutex until all of it is read.
    const std::lock_guard lock(context_.transport.mutex());
    context_.world.throw_if_ended();
    context_.end();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::Mismatch) throw;
    context_.world.tell_if_ended();
    if (!context_.world.ended()) context_.world.end(error.code(), -1, context_.sequence, error.what());
    throw;
  }
}

int Engine::join(std::chrono::milliseconds patience) {
  context_.world.throw_if_ended();
  // Who came in a later round came later; within one, clocks have to tell.
  const auto ticket = static_cast<std::int64_t>(context_.sequence + 1);
  const auto clock = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  while (true) {
    context_.end();
    Descriptor own;
    own.kind = Kind::Joined;
    own.count = ticket;
    own.detail = clock;
    context_.begin(own, Clock::now(), patience);
    meet_all(context_, round_, nullptr, own);
    if (context_.agreement.active.empty()) break;
    if (disagreement(context_)) continue;  // the active ranks are told; this one brought nothing that could be wrong
    if (context_.agreement.agreed.round != 0) continue;
    Request served = request_to_serve(context_.agreement.agreed);
    served.timeout = patience;
    execute(context_, served, true);
  }
  context_.end();
  return context_.agreement.last_joined();
}

}  // namespace cohort::comm::hosts
