#include "comm/hosts/hosts_communicator.h"

#include "base/log.h"
#include "base/result.h"
#include "base/thread.h"
#include "comm/api/work_state.h"
#include "comm/engine/queue.h"
#include "comm/engine/queue_communicator.h"
#include "comm/hosts/context.h"
#include "comm/hosts/world.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace cohort::comm::hosts {

using namespace std::chrono_literals;

void Engine::run(const Request& request, Clock::time_point called, CollectiveEvent* event) {
  const Descriptor own = describe(request);
  if (context_.world.ended()) context_.world.throw_if_ended_before(to_string(own), context_.sequence + 1);
  context_.wire_bytes = 0;
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
    // A late rank can complete an operation that others have given up, from frames they sent before. Their report then
    // follows those frames on the same connection; the thread that reads it holds the mutex until it has read both.
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
  context_.world.throw_if_ended_before(std::string(name_of(Kind::Joined)), context_.sequence + 1);
  // A join in a later round is later; within one round, clocks decide.
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
    if (disagreement(context_)) continue;  // the active ranks report it; this one contributed nothing
    if (context_.agreement.agreed.round != 0) continue;
    Request served = request_to_serve(context_.agreement.agreed);
    served.timeout = patience;
    execute(context_, served, true);
  }
  context_.end();
  return context_.agreement.last_joined();
}

namespace {

using namespace std::chrono_literals;

// A thread that starts an operation usually waits for it next, and then runs it itself. For a while after the last
// operation, the queue's own thread therefore only polls at this interval; then it sleeps until woken.
constexpr auto kDoze = 1ms;
constexpr auto kAwake = 20ms;
constexpr auto kLeft = 200us;   // age from which the thread also runs an operation that was not left to it
constexpr auto kAsleep = 50ms;  // between checks of the world's state
constexpr auto kLeaving = 15s;  // limit for peers to take what was sent
constexpr auto kTelling = 1s;   // limit for others to learn why the world ended

}  // namespace

Core::Core(const FormOptions& options, std::unique_ptr<Place> place)
    : Queue(times::wanted()),
      world_(options, std::move(place)),
      wire_(world_),
      matcher_({world_, kinds(), *world_.local().core().guard(), observer_, [this] { return shared_from_this(); }}),
      engine_(world_, waiters_, [this] { matcher_.attend(); }) {}

/// Returns the channels; those that no thread has to drive come first.
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
  return enqueue(request, Clock::now(), false);
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
  Queue::stop();         // the queue's thread ends when no message is under way either
  matcher_.stop(!here);  // if called in a callback, this thread still has to serve messages
}

bool Core::ended() noexcept {
  try {
    world_.transport().progress();   // others may have reported the end
  } catch (const std::exception&) {  // the thread that drives the transport reports the error
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
  left_ = true;
  work_to_do_.notify_one();
  if (asleep_) world_.transport().wake();
}

/// Body of the communicator's thread.
void Core::serve() {
  ::pthread_setname_np(::pthread_self(), "cohort-hosts");
  times::leave_out_this_thread();
  transport::Transport& transport = world_.transport();
  std::unique_lock lock(mutex_);
  while (true) {
    const auto now = Clock::now();
    if (!running_ && !queue_.empty() && (stopping_ || left_ || now - front_called() >= kLeft)) {
      left_ = false;
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

namespace {

/// Placement for the given options. The options list all hosts; a rank's placement counts hosts with its local rank.
rendezvous::Placement as_told(const FormOptions& options) {
  const Layout layout(options.hosts, options.placement.rank);
  rendezvous::Placement placement = options.placement;
  placement.cross_rank = layout.hosts_with(layout.local, layout.host);
  placement.cross_size = layout.hosts_with(layout.local, layout.hosts);
  return placement;
}

}  // namespace

HostsCommunicator::HostsCommunicator(const FormOptions& options, std::unique_ptr<Place> place)
    : QueueCommunicator(as_told(options), options.timeout, std::make_shared<Core>(options, std::move(place))) {
  core().begin();
}

std::shared_ptr<MemoryBlock> HostsCommunicator::allocate(std::size_t bytes) {
  check_home();
  return core().world().local().allocate(bytes);
}

std::shared_ptr<MemoryBlock> HostsCommunicator::allocate_shared(std::size_t bytes) {
  raise(ErrorCode::InvalidArgument,
        "allocate_shared({}): the ranks are on several hosts, which share no memory -- call it on split_by_host()",
        bytes);
}

// --- groups ---

namespace {

/// Information that ranks exchange to form groups.
struct GroupInfo : GroupInfoHead {
  std::uint32_t info_length = 0;
  transport::tcp::Bytes32 token{};
  char info[1036] = {};  // how ranks of other hosts reach this rank
};

template <std::size_t N>
std::uint32_t put(char (&to)[N], const std::string& text) {
  const std::size_t length = std::min(text.size(), N);
  std::memcpy(to, text.data(), length);
  return static_cast<std::uint32_t>(length);
}

}  // namespace

std::shared_ptr<CommunicatorImpl> HostsCommunicator::form_group(int color, int key, std::span<const int> listed,
                                                                std::chrono::milliseconds timeout, bool background) {
  World& world = core().world();
  const Layout& layout = world.layout();
  auto place = std::make_unique<Place>();
  GroupInfo own;
  own.color = color;
  own.key = key;
  prepare(own, [&] {
    if (color == kNoColor) return;
    place->point = std::make_unique<local::Rendezvous>(placement_.size);
    place->listeners = std::make_unique<transport::tcp::Listeners>(world.listening());
    own.token = transport::tcp::random_bytes();
    own.set_entry(place->point->entry());
    transport::tcp::PeerInfo wire = place->listeners->info();
    complete_info(wire, world.options());
    while (transport::tcp::encode(wire).size() > sizeof own.info && !wire.addresses.empty()) wire.addresses.pop_back();
    own.info_length = put(own.info, transport::tcp::encode(wire));
  });
  std::vector<GroupInfo> infos(static_cast<std::size_t>(placement_.size));
  queue_->submit(exchange_of(own, infos, listed, timeout)).wait();
  check_prepared(infos, [](int rank) { return rank; });
  if (color == kNoColor) return nullptr;

  const std::vector<int> members = members_of(infos, color);
  FormOptions form;
  form.placement = placement_;
  form.placement.size = static_cast<int>(members.size());
  form.init_timeout = timeout;
  form.timeout = timeout_;
  form.background = background;
  form.one_machine = world.options().one_machine;
  form.secret = world.options().secret;
  form.transport = world.options().transport;
  std::vector<int> here;     // local numbers of this host's members
  std::map<int, int> hosts;  // by the world's host number; renumbered in the order of their lowest rank
  for (std::size_t i = 0; i < members.size(); ++i) {
    const int member = members[i];
    const int host = layout.host_of(member);
    const int number = hosts.emplace(host, static_cast<int>(hosts.size())).first->second;
    form.hosts.push_back(number);
    if (member == placement_.rank) {
      form.placement.rank = static_cast<int>(i);
      form.placement.local_rank = static_cast<int>(place->entries.size());
      form.placement.cross_rank = number;
    }
    if (host == layout.host) {
      place->entries.emplace_back(infos[static_cast<std::size_t>(member)].entry_text());
      here.push_back(layout.local_of(member));
    }
    const GroupInfo& info = infos[static_cast<std::size_t>(member)];
    place->infos.push_back(value_or_throw(transport::tcp::decode_peer_info(
        std::string_view(info.info, std::min<std::size_t>(info.info_length, sizeof info.info)))));
  }
  form.placement.local_size = static_cast<int>(place->entries.size());
  form.placement.cross_size = static_cast<int>(hosts.size());
  const GroupInfo& first = infos[static_cast<std::size_t>(members.front())];
  place->token.assign(reinterpret_cast<const char*>(first.token.data()), first.token.size());
  form.lost = world.local_world().losses_of(std::move(here));
  if (hosts.size() > 1)
    return form_for_all([&] { return std::make_shared<HostsCommunicator>(form, std::move(place)); });

  form.hosts.clear();
  form.entries = std::move(place->entries);
  return form_for_all([&] { return std::make_shared<local::LocalCommunicator>(form, std::move(place->point)); });
}

}  // namespace cohort::comm::hosts
