#include "train/named/engine.h"

#include "base/env.h"
#include "base/thread.h"
#include "comm/api/work_state.h"
#include "train/named/engine_core.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

namespace cohort::named {

Engine::Engine(Communicator comm, EngineOptions options) {
  if (!comm) raise(ErrorCode::InvalidArgument, "named::Engine: this Communicator belongs to no world");
  core_ = std::make_unique<EngineCore>(std::move(comm), std::move(options));
}

Engine::~Engine() {
  // A forked child has no engine thread: the core is left to the parent.
  if (core_->in_child()) static_cast<void>(core_.release());
}

int Engine::rank() const noexcept { return core_->rank(); }
int Engine::size() const noexcept { return core_->size(); }

Handle Engine::submit(Request request) { return core_->submit(std::move(request)); }
std::vector<Handle> Engine::submit(std::vector<Request> requests) { return core_->submit(std::move(requests)); }

Handle Engine::join_async() { return core_->join(); }
int Engine::join() { return join_async().outcome().last_joined; }

Communicator Engine::form_group(std::span<const int> ranks) { return form_group_async(ranks).outcome().group; }

Handle Engine::form_group_async(std::span<const int> ranks) {
  Request request;
  request.kind = Kind::Group;
  request.name = fmt::format("form_group [{}]", fmt::join(ranks, ", "));
  if (request.name.size() > kLongestName) request.name.resize(kLongestName);  // the list itself is compared
  request.splits.assign(ranks.begin(), ranks.end());
  return submit(std::move(request));
}

void Engine::shutdown() { core_->shutdown(); }
void Engine::begin_shutdown() { core_->begin_shutdown(); }
bool Engine::ended() const noexcept { return core_->ended(); }
Engine::Statistics Engine::statistics() const { return core_->statistics(); }

namespace {

// Time for which requests without waiters are gathered. A round costs about 10 us on this and all other ranks.
constexpr auto kLinger = std::chrono::microseconds(100);

}  // namespace

EngineCore::EngineCore(Communicator comm, EngineOptions options)
    : comm_(std::move(comm)),
      options_(std::move(options)),
      rank_(comm_.rank()),
      size_(comm_.size()),
      process_(::getpid()),
      timeout_(options_.timeout.value_or(comm_.timeout())),
      cache_(options_.cache_capacity),
      table_(size_),
      joined_(static_cast<std::size_t>(size_), false) {
  const sys::SignalsBlocked blocked;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    raise(ErrorCode::Unavailable, "named::Engine: no thread -- rank {} -- {} -- raise the limit of threads", rank_,
          error.what());
  }
}

EngineCore::~EngineCore() { shutdown(); }

bool EngineCore::in_child() const noexcept { return process_ != ::getpid(); }

// --- users' calls ---

void EngineCore::check_open() const {
  if (ended_) throw *ended_;
  if (join_) {
    raise(ErrorCode::InvalidArgument,
          "this rank has joined: it has said that it has no more data -- wait for the join before the next operation");
  }
}

// NCCL uses one GPU per communicator. A second GPU is refused here, since a later failure would fail the other ranks.
void EngineCore::check_gpu(const Pending& asked) {
  if (asked.device.type == DeviceType::CPU) return;
  if (gpu_ < 0) gpu_ = asked.device.index;
  if (gpu_ == asked.device.index || env::text(env::kNccl) == "off") return;
  raise(ErrorCode::InvalidArgument,
        "{} '{}': its memory is on cuda:{}, and that of operations before it was on cuda:{} -- rank {} -- keep to one "
        "GPU in each process, or set COHORT_NCCL=off on all ranks",
        name_of(asked.request.kind), asked.request.name, asked.device.index, gpu_, rank_);
}

EngineCore::PendingPtr EngineCore::pending_of(Request request, Clock::time_point now) const {
  auto signature = signature_of(request, size_);
  if (!signature) throw signature.error();
  auto pending = std::make_shared<Pending>();
  pending->signature = *std::move(signature);
  pending->request = std::move(request);
  pending->device = device_of(pending->request);
  if (!in_child()) pending->marks = marks_of(pending->request, rank_);
  pending->state = std::make_shared<State>(wakeup_, pending->request.name);
  pending->since = now;
  pending->report_at = now + std::min(options_.stall_after, timeout_);
  return pending;
}

/// Accepts all requests or none.
void EngineCore::enqueue(std::span<const PendingPtr> made) {
  if (in_child()) {
    raise(ErrorCode::InvalidArgument,
          "this engine belongs to the process that made it -- this is a forked child of it (pid {})", ::getpid());
  }
  bool rouse = false;
  {
    const std::lock_guard lock(mutex_);
    check_open();
    for (const PendingPtr& pending : made) check_gpu(*pending);
    std::size_t accepted = 0;
    while (accepted < made.size() && pending_.emplace(made[accepted]->request.name, made[accepted]).second) ++accepted;
    if (accepted < made.size()) {
      for (std::size_t i = 0; i < accepted; ++i) pending_.erase(made[i]->request.name);
      raise(ErrorCode::InvalidArgument,
            "{} '{}': an operation of this name is still under way -- rank {} -- wait for it, or use another name",
            name_of(made[accepted]->request.kind), made[accepted]->request.name, rank_);
    }
    for (const PendingPtr& pending : made) {
      if (const auto slot = cache_.find(pending->request.name, pending->signature)) {
        set_slot(pending, *slot);
      } else {
        news_.push_back(pending);
      }
      look_at_ = std::min(look_at_, pending->report_at);
    }
    // If the flag was already set, the thread checks for requests before it sleeps.
    rouse = !made.empty() && !stirred_.exchange(true);
  }
  if (rouse) wakeup_->request();
}

Handle EngineCore::submit(Request request) {
  const PendingPtr made = pending_of(std::move(request), Clock::now());
  enqueue(std::span(&made, 1));
  return Handle(made->state);
}

std::vector<Handle> EngineCore::submit(std::vector<Request> requests) {
  const auto now = Clock::now();
  std::vector<PendingPtr> made;
  made.reserve(requests.size());
  for (Request& request : requests) made.push_back(pending_of(std::move(request), now));
  enqueue(made);
  std::vector<Handle> handles;
  handles.reserve(made.size());
  for (const PendingPtr& pending : made) handles.emplace_back(pending->state);
  return handles;
}

Handle EngineCore::join() {
  if (in_child()) raise(ErrorCode::InvalidArgument, "join: this engine belongs to the parent process");
  auto state = std::make_shared<State>(wakeup_, "join");
  {
    const std::lock_guard lock(mutex_);
    check_open();
    join_ = state;
  }
  if (!stirred_.exchange(true)) wakeup_->notify();
  return Handle(std::move(state));
}

void EngineCore::shutdown() {
  const std::lock_guard lock(shutdown_mutex_);
  begin_shutdown();
  if (thread_.joinable()) thread_.join();
}

void EngineCore::begin_shutdown() {
  stopping_ = true;
  wakeup_->notify();
}

Engine::Statistics EngineCore::statistics() const {
  Engine::Statistics now;
  now.rounds = rounds_;
  now.exchanges = exchanges_;
  now.batches = batches_;
  now.rings = rings_;
  return now;
}

// --- the thread ---

void EngineCore::run() noexcept {
  ::pthread_setname_np(::pthread_self(), "cohort-named");
  comm::times::leave_out_this_thread();
  try {
    agree_on_options();
    announcer_ = std::make_unique<MessageRoundAnnouncer>(comm_, wakeup_);
    serve();
    announcer_->close(options_.shutdown_timeout);
  } catch (const Error& error) {
    end(error);
    if (error.code() != ErrorCode::Mismatch) comm_.abort(error.what());
  } catch (const std::exception& error) {
    end(Error(ErrorCode::Internal, fmt::format("unexpected in the engine of named operations -- {}", error.what())));
    comm_.abort(error.what());
  }
  announcer_.reset();
  over_ = true;
}

// Compares the options from which all ranks plan. Ranks also wait here for each other, however late they start.
void EngineCore::agree_on_options() {
  std::array<std::uint64_t, 3> own{options_.fusion_threshold, options_.cache_capacity,
                                   static_cast<std::uint64_t>(options_.joined_average)};
  std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(size_));
  Work meeting = comm_.all_gather(std::span(own), std::span(all));
  constexpr auto kSlice = std::chrono::milliseconds(50);
  auto patience = options_.shutdown_timeout;
  while (!meeting.wait_for(kSlice)) {
    if (!stopping_) continue;
    patience -= kSlice;
    if (patience.count() <= 0) comm_.abort("a rank ended its engine of named operations before all had made one");
  }
  for (int rank = 1; rank < size_; ++rank) {
    const auto theirs = all.begin() + static_cast<std::ptrdiff_t>(own.size()) * rank;
    if (std::equal(all.begin(), all.begin() + own.size(), theirs)) continue;
    raise(ErrorCode::Mismatch,
          "named::Engine: options differ -- rank 0 has fusion_threshold {}, cache_capacity {}, joined_average {}, rank "
          "{} has {}, {}, {} -- give all ranks the same",
          all[0], all[1], all[2], rank, theirs[0], theirs[1], theirs[2]);
  }
}

void EngineCore::serve() {
  while (true) {
    const bool rung = announcer_->heard() >= round_;
    const bool stalls = due();
    if (rung || stalls || stirred_ || stopping_) {
      if (!round()) return;
      wakeup_->linger(kLinger);
      continue;
    }
    Clock::time_point limit;
    {
      const std::lock_guard lock(mutex_);
      limit = look_at_;
    }
    // Some clocks overflow on time_point::max().
    wakeup_->wait_until(std::min(limit, Clock::now() + std::chrono::hours(1)));
  }
}

/// Returns whether names have waited for so long that the ranks should exchange which of them lack these names.
bool EngineCore::due() {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (now < look_at_) return false;
  look_at_ = Clock::time_point::max();
  for (const auto& [name, pending] : pending_) {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - pending->since);
    const bool waits = pending->stage == Pending::Stage::Described || pending->stage == Pending::Stage::Slot;
    if (now >= pending->report_at) {
      if (waits) stalled_.push_back({std::string(name), waited.count(), waited >= timeout_});
      const auto expires = pending->since + timeout_;
      pending->report_at = now + options_.stall_after;
      if (expires > now) pending->report_at = std::min(pending->report_at, expires);
    }
    look_at_ = std::min(look_at_, pending->report_at);
  }
  return !stalled_.empty();
}

std::chrono::milliseconds EngineCore::operation_timeout() const {
  return stopping_ ? std::min(options_.shutdown_timeout, comm_.timeout()) : comm_.timeout();
}

// --- endings ---

void EngineCore::finish(std::span<const PendingPtr> done, const std::optional<Error>& error) {
  {
    const std::lock_guard lock(mutex_);
    for (const PendingPtr& one : done) {
      if (one) pending_.erase(one->request.name);
    }
  }
  for (const PendingPtr& one : done) {
    if (one) one->state->end(error);
  }
}

void EngineCore::end(const Error& why) {
  std::vector<PendingPtr> outstanding;
  std::shared_ptr<State> joining;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_) ended_ = why;
    for (const auto& [name, pending] : pending_) outstanding.push_back(pending);
    pending_.clear();
    news_.clear();
    by_slot_.clear();
    joining = std::exchange(join_, nullptr);
  }
  for (const PendingPtr& one : outstanding) {
    if (one != outstanding.front()) one->state->reported = true;  // one warning is enough if nobody waits
    one->state->end(why);
  }
  if (joining) joining->end(why);
}

}  // namespace cohort::named
