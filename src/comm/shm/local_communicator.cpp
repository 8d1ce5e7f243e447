#include "comm/shm/local_communicator.h"

#include "base/log.h"
#include "base/result.h"
#include "base/thread.h"
#include "comm/engine/queue.h"
#include "comm/engine/queue_communicator.h"
#include "comm/shm/algorithms.h"
#include "net/store.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::comm::local {
namespace {

// Time for which the caller of a small operation waits for late peers before it returns and leaves the operation to the
// queue.
constexpr auto kPatience = std::chrono::microseconds(100);

// A thread that starts an operation usually waits for it next, and then runs it itself; waking the queue's thread would
// cost tens of microseconds on virtual machines, and a core. So, for the time kAwake after an operation, the queue's
// thread polls at this interval for operations that no other thread runs, and a single queued operation does not wake
// the queue's thread.
constexpr auto kDoze = std::chrono::milliseconds(1);
constexpr auto kDozeInCrowd = std::chrono::milliseconds(4);
constexpr auto kAwake = std::chrono::milliseconds(20);

}  // namespace

Core::Core(const FormOptions& options, std::unique_ptr<Rendezvous> point)
    : Queue(times::wanted() && !options.label),  // with a label, the larger world measures its operations
      world_(options, std::move(point)),
      context_(world_, waiters_, options) {
  if (options.label || world_.size() == 1) return;
  std::vector<int> all(static_cast<std::size_t>(world_.size()));
  std::iota(all.begin(), all.end(), 0);
  channels_.emplace(world_, std::move(all));
  matcher_.emplace(
      messages::Matcher::Owner{world_, {&*channels_}, *guard_, observer_, [this] { return shared_from_this(); }});
}

Work Core::submit(const Request& request) {
  if (request.kind == Kind::Send || request.kind == Kind::Recv) return matcher_->submit(request);
  if (pending_.load(std::memory_order_acquire) != 0 || !is_quick(request)) {
    return enqueue(request, Clock::now(), false);
  }
  std::atomic<bool>& in_caller = waiters_.in_caller;
  if (in_caller.load(std::memory_order_relaxed)) {
    raise(ErrorCode::InvalidArgument,
          "{}: two threads call one communicator at the same time -- give each thread one of its own (split)",
          name_of(request.kind));
  }
  in_caller.store(true, std::memory_order_relaxed);
  waiters_.deadline.limit(Clock::time_point::max());
  waiters_.deadline.begin({}, request.timeout);
  bool late = false;
  std::optional<times::Exposed> exposed;
  if (timed_) exposed.emplace();
  const auto& waited_ns = world_.collectives().waited_ns;  // avoids reading the clock twice, which would take too long
  const std::uint64_t waited_before = waited_ns.load(std::memory_order_relaxed);
  std::optional<Error> failed = guarded(request, {}, [&](CollectiveEvent* event) {
    announce(context_, request);
    late = !await_peers(context_, kPatience);
    if (!late) complete(context_, request, event);
    return !late;
  });
  in_caller.store(false, std::memory_order_relaxed);
  exposed.reset();
  if (!timed_) times::add_exposed(waited_ns.load(std::memory_order_relaxed) - waited_before);
  if (failed) return Work(std::make_shared<FailedWork>(*std::move(failed)));
  return late ? enqueue(request, Clock::now() - kPatience, true) : Work();
}

bool Core::run_one(const Request& request, Clock::time_point called, bool& announced, Clock::time_point limit,
                   CollectiveEvent* event) {
  waiters_.deadline.begin(called, request.timeout);
  if (!announced) announce(context_, request);
  announced = true;
  if (limit != Clock::time_point::max() && !await_peers(context_, limit)) return false;
  complete(context_, request, event);
  return true;
}

std::byte* Core::fusing() {
  if (!fusing_) {
    std::uint32_t id = 0;
    fusing_ = value_or_throw(world_.mesh()->create_segment(kFusedTotal, id));
  }
  return static_cast<std::byte*>(fusing_->data());
}

void Core::tell_over(std::uint64_t number) noexcept { world_.state(world_.rank()).over.store(number); }

bool Core::are_over(std::uint64_t number) const noexcept { return world_.are_over(number); }

void Core::stop() {
  if (matcher_) matcher_->stop();
  Queue::stop();
}

// --- the thread ---

bool Core::wants_rousing() {
  const bool rousing = !dozing_ || running_ || !queue_.empty();
  if (thread_.joinable()) return rousing;
  try {
    thread_ =
        sys::start_without_signals([self = std::static_pointer_cast<Core>(shared_from_this())] { self->progress(); });
  } catch (const std::system_error& error) {  // without the thread, operations run when they are waited for
    log::warn("comm", "no progress thread, operations run when they are waited for -- {}", error.what());
  }
  return rousing;
}

void Core::progress() {
  ::pthread_setname_np(::pthread_self(), "cohort-comm");
  times::leave_out_this_thread();
  std::unique_lock lock(mutex_);
  while (true) {
    if (!queue_.empty() && !running_) {
      run_front(lock);
    } else if (is_finished()) {
      return;
    } else if (Clock::now() - active_ < kAwake) {
      dozing_ = true;
      work_to_do_.wait_for(lock, world_.crowded() ? kDozeInCrowd : kDoze);
      dozing_ = false;
    } else {
      work_to_do_.wait(lock);
    }
  }
}

namespace {

class LocalBlock final : public MemoryBlock {
 public:
  LocalBlock(std::shared_ptr<sys::Mapping> segment, std::size_t asked, std::uint32_t id,
             const std::shared_ptr<Mesh>& mesh, std::shared_ptr<ForkGuard> guard)
      : segment_(std::move(segment)), id_(id), mesh_(mesh), guard_(std::move(guard)) {
    data = segment_->data();
    bytes = asked;
  }
  ~LocalBlock() override {
    if (guard_->in_child()) {
      // In a forked child the mesh belongs to the parent, and the mapping is kept until the child ends.
      static_cast<void>(new std::shared_ptr<sys::Mapping>(std::move(segment_)));
      return;
    }
    if (const auto mesh = mesh_.lock()) mesh->free_segment(id_);
  }
  std::uint32_t id() const noexcept { return id_; }

 private:
  std::shared_ptr<sys::Mapping> segment_;
  const std::uint32_t id_;
  const std::weak_ptr<Mesh> mesh_;
  const std::shared_ptr<ForkGuard> guard_;
};

}  // namespace

LocalCommunicator::LocalCommunicator(const FormOptions& options, std::unique_ptr<Rendezvous> point)
    : QueueCommunicator(options.placement, options.timeout, std::make_shared<Core>(options, std::move(point))) {}

std::shared_ptr<MemoryBlock> LocalCommunicator::allocate(std::size_t bytes) {
  check_home();
  std::uint32_t id = 0;
  auto segment = core().world().mesh()->create_segment(std::max<std::size_t>(bytes, 1), id);
  if (!segment) {
    ErrorContext context;
    const int own = core().world().name(placement_.rank);
    context.rank = own;
    context.host = placement_.host;
    throw Error(
        segment.error().code(),
        fmt::format("allocate({}) failed -- rank {} ({}) -- {}", bytes, own, placement_.host, segment.error().what()),
        std::move(context));
  }
  return std::make_shared<LocalBlock>(*std::move(segment), bytes, id, core().world().mesh(), core().guard());
}

namespace {

/// Memory of rank 0, mapped in this process.
struct SharedBlock final : MemoryBlock {
  std::shared_ptr<const sys::Mapping> mapping;
};

// Shares a segment in a turn of the queue, since the thread that runs operations maps peers' segments. Rank 0 announces
// its segment, the others map it, and all learn whether every rank could.
class Sharing final : public Composite {
 public:
  struct Row {
    std::uint64_t bytes = 0;
    std::uint64_t announcements = 0;
    std::uint32_t segment = 0;
    std::int32_t failure = 0;  // ErrorCode + 1; 0: none
    char why[232] = {};
    void fail(const Error& error) noexcept {
      failure = static_cast<std::int32_t>(error.code()) + 1;
      std::strncpy(why, error.what(), sizeof why - 1);
    }
  };

  Sharing(Core& core, Row own) : core_(core), own_(own), rows_(static_cast<std::size_t>(core.world().size())) {}

  std::optional<Error> run(Turn& turn, bool& finished) noexcept override {
    finished = true;
    try {
      exchange(turn);
      if (core_.world().rank() != 0 && !first_failure()) map(turn);
      exchange(turn);
    } catch (const Error& error) {
      return error;
    }
    const int failed = first_failure().value_or(-1);
    if (failed < 0) return std::nullopt;
    const Row& row = rows_[static_cast<std::size_t>(failed)];
    return Error(static_cast<ErrorCode>(row.failure - 1), fmt::format("allocate_shared({}) failed -- rank {} -- {}",
                                                                      own_.bytes, core_.world().name(failed), row.why));
  }
  bool is_quick() const noexcept override { return false; }
  const std::shared_ptr<const sys::Mapping>& mapping() const noexcept { return mapping_; }

 private:
  void exchange(Turn& turn) { turn.exchange(&own_, rows_.data(), sizeof own_); }
  std::optional<int> first_failure() {
    for (std::size_t rank = 0; rank < rows_.size(); ++rank) {
      if (rows_[rank].failure != 0) return static_cast<int>(rank);
      if (rows_[rank].bytes == rows_[0].bytes) continue;
      rows_[rank].fail(Error(ErrorCode::Mismatch, fmt::format("it asks for {} bytes, rank {} for {}", rows_[rank].bytes,
                                                              core_.world().name(0), rows_[0].bytes)));
      return static_cast<int>(rank);
    }
    return std::nullopt;
  }
  void map(Turn& turn) {
    Mesh& mesh = *core_.world().mesh();
    const Row& source = rows_.front();
    try {
      while (true) {
        value_or_throw(mesh.receive(0, source.announcements));
        if (value_or_throw(mesh.address(0, {source.segment, 0}, source.bytes))) break;
        turn.attend();
        std::this_thread::yield();
      }
      mapping_ = mesh.mapping(0, source.segment);
    } catch (const Error& error) {
      own_.fail(error);
    }
  }

  Core& core_;
  Row own_;
  std::vector<Row> rows_;
  std::shared_ptr<const sys::Mapping> mapping_;
};

}  // namespace

std::shared_ptr<MemoryBlock> LocalCommunicator::allocate_shared(std::size_t bytes) {
  check_home();
  Sharing::Row own{.bytes = bytes};
  std::shared_ptr<MemoryBlock> mine;
  if (placement_.rank == 0) {
    try {
      mine = allocate(bytes);
      own.segment = static_cast<const LocalBlock&>(*mine).id();
      own.announcements = core().world().mesh()->announcements();
    } catch (const Error& error) {
      own.fail(error);
    }
  }
  const auto sharing = std::make_shared<Sharing>(core(), own);
  Request whole;
  whole.kind = Kind::AllGather;
  queue_->submit(sharing, timed(whole), /*now=*/false).wait();
  if (mine) return mine;
  auto block = std::make_shared<SharedBlock>();
  block->mapping = sharing->mapping();
  block->data = block->mapping->data();
  block->bytes = bytes;
  return block;
}

std::shared_ptr<CommunicatorImpl> LocalCommunicator::form_group(int color, int key, std::span<const int> listed,
                                                                std::chrono::milliseconds timeout, bool background) {
  std::unique_ptr<Rendezvous> point;
  GroupInfoHead own;
  own.color = color;
  own.key = key;
  prepare(own, [&] {
    if (color == kNoColor) return;
    point = std::make_unique<Rendezvous>(placement_.size);
    own.set_entry(point->entry());
  });
  std::vector<GroupInfoHead> infos(static_cast<std::size_t>(placement_.size));
  queue_->submit(exchange_of(own, infos, listed, timeout)).wait();
  check_prepared(infos, [&](int rank) { return core().world().name(rank); });
  if (color == kNoColor) return nullptr;

  const std::vector<int> members = members_of(infos, color);
  FormOptions form;
  form.placement = placement_;
  form.placement.size = form.placement.local_size = static_cast<int>(members.size());
  form.init_timeout = timeout;
  form.timeout = timeout_;
  form.background = background;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i] == placement_.rank) form.placement.rank = form.placement.local_rank = static_cast<int>(i);
    form.entries.emplace_back(infos[static_cast<std::size_t>(members[i])].entry_text());
  }
  form.lost = core().world().losses_of(members);
  return form_for_all([&] { return std::make_shared<LocalCommunicator>(form, std::move(point)); });
}

}  // namespace cohort::comm::local
