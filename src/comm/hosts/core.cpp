#include "comm/hosts/core.h"

#include "base/log.h"
#include "base/result.h"
#include "comm/control/fusion.h"
#include "comm/times.h"
#include "sys/thread.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::comm::hosts {
namespace {

using namespace std::chrono_literals;

// Who starts an operation mostly waits for it next, and then runs it itself: the thread looks by itself this often
// whether one has been left to it, for a while after the last; then it sleeps until it is woken.
constexpr auto kDoze = 1ms;
constexpr auto kAwake = 20ms;
constexpr auto kLeft = 200us;   // an operation that nobody has taken on for this long is the thread's
constexpr auto kAsleep = 50ms;  // between looks at how the world is
constexpr auto kLeaving = 15s;  // for what was sent to be taken
constexpr auto kTelling = 1s;   // for others to be told why the world ended

}  // namespace

Core::Core(const FormOptions& options, std::unique_ptr<Place> place)
    : Queue(times::wanted()),
      world_(options, std::move(place)),
      wire_(world_),
      matcher_({world_, kinds(), *world_.local().core().guard(), observer_, [this] { return shared_from_this(); }}),
      engine_(world_, waiters_, [this] { matcher_.attend(); }) {}

/// Those that need no driving first.
std::vector<messages::Channels*> Core::kinds() {
  if (world_.layout().locals == 1) return {&wire_};
  lanes_.emplace(world_.local_world(), world_.layout().here());
  return {&*lanes_, &wire_};
}

void Core::begin() {
  thread_ = sys::start_without_signals([self = std::static_pointer_cast<Core>(shared_from_this())] { self->serve(); });
}

// --- calls ---

Work Core::submit(const Request& request) {
  if (request.kind == Kind::Send || request.kind == Kind::Recv) return matcher_.submit(request);
  return enqueue({request}, Clock::now(), false);
}

bool Core::run_one(const Request& request, Clock::time_point called, bool&, Clock::time_point, CollectiveEvent* event) {
  engine_.run(request, called, event);
  return true;
}

std::byte* Core::fusing() {
  fusing_.resize(kFusedTotal);
  return fusing_.data();
}

void Core::abort(std::string_view reason) {
  const Layout& layout = world_.layout();
  world_.end(ErrorCode::Aborted, -1, world_.label().number(),
             fmt::format("aborted by rank {} on {} -- {}", layout.rank, world_.options().placement.host, reason));
  world_.transport().wake();
}

void Core::stop() {
  const bool here = thread_.get_id() == std::this_thread::get_id();
  Queue::stop();         // its thread ends once no message is under way either
  matcher_.stop(!here);  // in a callback, that thread has to go on for them
}

bool Core::ended() noexcept {
  try {
    world_.transport().progress();   // others may have said so
  } catch (const std::exception&) {  // whoever drives it tells
    return true;
  }
  return world_.ended();
}

void Core::tell_over(std::uint64_t number) noexcept {
  local::World& here = world_.local_world();
  here.state(here.rank()).over.store(number);
}

bool Core::are_over(std::uint64_t number) const noexcept { return world_.local_world().are_over(number); }

void Core::leave_to_thread() noexcept {
  work_to_do_.notify_one();
  if (asleep_) world_.transport().wake();
}

/// The communicator's thread.
void Core::serve() {
  ::pthread_setname_np(::pthread_self(), "cohort-hosts");
  times::leave_out_this_thread();
  transport::Transport& transport = world_.transport();
  std::unique_lock lock(mutex_);
  while (true) {
    const auto now = Clock::now();
    if (!running_ && !queue_.empty() && (stopping_ || now - front_called() >= kLeft)) {
      run_front(lock);
      continue;
    }
    if (is_finished() && !running_ && matcher_.idle()) break;
    const bool driven = running_ || wire_.attended.load(std::memory_order_relaxed) > 0;
    const bool awake = driven || !queue_.empty() || now - active_ < kAwake;
    if (awake) {
      work_to_do_.wait_for(lock, kDoze);
    } else {
      asleep_ = true;
    }
    const bool drives = !running_ && wire_.attended.load(std::memory_order_relaxed) == 0;
    lock.unlock();
    if (!awake) {
      transport.sleep(kAsleep);
    } else if (drives) {
      transport.progress();
    }
    world_.tell_if_ended();
    matcher_.attend();
    lock.lock();
    asleep_ = false;
  }
  lock.unlock();
  const auto limit = Clock::now() + (world_.ended() ? kTelling : kLeaving);
  while (!transport.flushed() && Clock::now() < limit) transport.sleep(10ms);
  transport.leave();
}

}  // namespace cohort::comm::hosts
