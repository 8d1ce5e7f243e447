// cohort._core.named_calls: engines by number, for callers other than Python. A dedicated thread reports finished
// operations, since callbacks may compute or start operations, which the engine's thread must not do. Outcomes are kept
// for Horovod's timeline while one is being written, and its thread fetches them. Any thread may call.
#include "horovod/bindings/named_calls.h"

#include "errors.h"
#include "horovod/bindings/named.h"

#include "horovod/named/request.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cohort::python {
namespace {

/// Kind, name, times of call, agreement and end (seconds of time.monotonic()), and the error's text or "".
using Record = std::tuple<std::string, std::string, double, double, double, std::string>;

std::atomic<bool> keeping{false};

struct Kept {
  std::mutex mutex;
  std::vector<Record> records;
};

Kept& all_kept() {
  static auto* const all = new Kept();
  return *all;
}

double seconds(Clock::time_point at) { return std::chrono::duration<double>(at.time_since_epoch()).count(); }

const char* word_of(named::Kind kind) noexcept {
  constexpr const char* kNames[] = {"ALLREDUCE", "ALLGATHER", "BROADCAST", "REDUCESCATTER", "ALLTOALL", "BARRIER"};
  const auto number = static_cast<std::size_t>(kind);
  return number < std::size(kNames) ? kNames[number] : "OTHER";
}

void keep_records(bool on) {
  Kept& all = all_kept();
  const std::lock_guard lock(all.mutex);
  all.records.clear();
  keeping.store(on, std::memory_order_relaxed);
}

std::vector<Record> take() {
  Kept& all = all_kept();
  const std::lock_guard lock(all.mutex);
  return std::exchange(all.records, {});
}

/// Operations of one call, by kind and name; empty if no records are kept.
class CallRecord {
 public:
  bool kept() const noexcept { return !asked_.empty(); }
  void add(named::Kind kind, std::string name) { asked_.emplace_back(kind, std::move(name)); }
  /// Records the operations when all are done. Without handles, they were done immediately.
  void end(const std::vector<named::Handle>& handles) const {
    const Clock::time_point now = Clock::now();
    Kept& all = all_kept();
    const std::lock_guard lock(all.mutex);
    if (!keeping.load(std::memory_order_relaxed)) return;
    for (std::size_t i = 0; i < asked_.size(); ++i) {
      Clock::time_point agreed = now;
      Clock::time_point ended = now;
      std::string failure;
      if (i < handles.size()) {
        ended = handles[i].ended_at();
        agreed = handles[i].agreed_at() == Clock::time_point() ? ended : handles[i].agreed_at();
        if (const Error* const error = handles[i].failure()) failure = error->what();
      }
      all.records.emplace_back(word_of(asked_[i].first), asked_[i].second, seconds(began_), seconds(agreed),
                               seconds(ended), std::move(failure));
    }
  }

 private:
  Clock::time_point began_ = Clock::now();
  std::vector<std::pair<named::Kind, std::string>> asked_;
};

static_assert(static_cast<int>(NamedKind::AllReduce) == static_cast<int>(named::Kind::AllReduce));
static_assert(static_cast<int>(NamedKind::AllGather) == static_cast<int>(named::Kind::AllGather));
static_assert(static_cast<int>(NamedKind::Broadcast) == static_cast<int>(named::Kind::Broadcast));
static_assert(static_cast<int>(NamedKind::ReduceScatter) == static_cast<int>(named::Kind::ReduceScatter));
static_assert(static_cast<int>(NamedKind::AllToAll) == static_cast<int>(named::Kind::AllToAll));
static_assert(static_cast<int>(NamedKind::Barrier) == static_cast<int>(named::Kind::Barrier));

/// A group under way.
struct Running {
  decltype(NamedGroup::allocate) allocate;
  decltype(NamedGroup::done) done;
  void* context;
  std::vector<named::Handle> handles;
  CallRecord record;
  std::atomic<std::size_t> left{0};

  explicit Running(const NamedGroup& group) : allocate(group.allocate), done(group.done), context(group.context) {
    if (!keeping.load(std::memory_order_relaxed)) return;
    for (const NamedCall& call : std::span(group.calls, group.count)) {
      record.add(static_cast<named::Kind>(call.kind), std::string(call.name, call.name_bytes));
    }
  }

  void fail(const Error& error) const { done(context, {error.what(), static_cast<int>(error.code()), nullptr}); }

  void tell() {
    // Fetches each operation's error, because an error that nobody has fetched is logged.
    const Error* failed = nullptr;
    for (const named::Handle& handle : handles) {
      const Error* const one = handle.failure();
      if (failed == nullptr) failed = one;
    }
    if (record.kept()) record.end(handles);
    if (failed != nullptr) {
      fail(*failed);
      return;
    }
    std::vector<NamedMade> made;
    made.reserve(handles.size());
    for (named::Handle& handle : handles) {
      const named::Outcome& outcome = handle.outcome();
      made.push_back(
          {outcome.shape.data(), outcome.shape.size(), outcome.received_splits.data(), outcome.received_splits.size()});
    }
    done(context, {nullptr, 0, made.data()});
  }
};

void tell(const std::deque<std::shared_ptr<Running>>& done) {
  for (const auto& one : done) one->tell();
}
using Completions = CompletionThread<std::shared_ptr<Running>>;

/// Engines by their numbers.
struct Published {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, std::pair<std::weak_ptr<named::Engine>, std::uint64_t>> engines;
};

Published& published() {
  static auto* const all = new Published();
  return *all;
}

std::shared_ptr<named::Engine> engine_of(std::uint64_t number) {
  constexpr auto* kNone =
      "an operation of a compiled program -- its process set has no engine here -- the world has ended, this rank is "
      "not in the set, or the set was removed -- call init(), and compile for the sets that there are";
  constexpr auto* kForked =
      "an operation of a compiled program -- its engine belongs to the process that this one is a forked child of";
  Published& all = published();
  const std::lock_guard lock(all.mutex);
  const auto found = all.engines.find(number);
  if (found == all.engines.end()) throw Error(ErrorCode::Unavailable, kNone);
  if (found->second.second != fork_generation()) throw Error(ErrorCode::InvalidArgument, kForked);
  auto engine = found->second.first.lock();
  if (!engine) throw Error(ErrorCode::Unavailable, kNone);
  return engine;
}

named::Request request_of(const NamedCall& call) {
  named::Request request;
  request.name.assign(call.name, call.name_bytes);
  request.kind = static_cast<named::Kind>(call.kind);
  request.shape.assign(call.shape, call.shape + call.dimensions);
  std::int64_t count = 1;
  for (const std::int64_t length : request.shape) count *= length;
  request.input = {call.input, count, call.dtype};
  request.output = {call.output, count, call.dtype};
  request.op = call.op;
  request.root = call.root;
  request.prescale = call.prescale;
  request.postscale = call.postscale;
  request.splits.assign(call.splits, call.splits + call.split_count);
  request.needs_all_ranks = call.needs_all_ranks;
  return request;
}

/// Returns true when all are done, and false if they are not after `patience_ns`.
bool wait_for(std::vector<named::Handle>& handles, std::int64_t patience_ns) {
  const auto until = Clock::now() + std::chrono::nanoseconds(patience_ns);
  for (named::Handle& handle : handles) {
    if (handle.done()) continue;
    const std::chrono::nanoseconds left = until - Clock::now();
    if (left.count() <= 0 || !handle.block(left)) return false;
  }
  return true;
}

void begin(const NamedGroup& group, const std::shared_ptr<Running>& running) {
  std::vector<named::Request> requests;
  requests.reserve(group.count);
  for (std::size_t i = 0; i < group.count; ++i) {
    requests.push_back(request_of(group.calls[i]));
    if (group.allocate == nullptr) continue;
    requests.back().allocate = [running, i](std::span<const std::int64_t> shape) {
      void* const memory = running->allocate(running->context, i, shape.data(), shape.size());
      if (memory == nullptr) throw std::bad_alloc();
      return memory;
    };
  }
  running->handles = engine_of(group.engine)->submit(std::move(requests));
}

/// Returns true if, in a world of one rank, the calls' inputs are their results, so that no thread has to be woken.
bool is_alone(const NamedGroup& group) {
  const auto keeps = [](const NamedCall& call) {
    return (call.kind == NamedKind::AllReduce && call.prescale == 1 && call.postscale == 1) ||
           (call.kind == NamedKind::Broadcast && call.root == 0);
  };
  const std::shared_ptr<named::Engine> engine = engine_of(group.engine);
  return engine->size() == 1 && !engine->ended() && std::all_of(group.calls, group.calls + group.count, keeps);
}

void give_back(const NamedGroup& group) noexcept {
  for (const NamedCall& call : std::span(group.calls, group.count)) {
    if (call.input == call.output || call.input == nullptr) continue;
    const std::int64_t* const end = call.shape + call.dimensions;
    const auto count = std::accumulate(call.shape, end, std::int64_t{1}, std::multiplies<>());
    if (count > 0) std::memcpy(call.output, call.input, static_cast<std::size_t>(count) * size_of(call.dtype));
  }
  const std::vector<NamedMade> made(group.count);
  group.done(group.context, {nullptr, 0, made.data()});
}

void submit(const NamedGroup& group) noexcept {
  const auto running = std::make_shared<Running>(group);
  Completions* completions = nullptr;
  try {
    if (is_alone(group)) {
      if (running->record.kept()) running->record.end({});
      return give_back(group);
    }
    completions = &Completions::get();
    begin(group, running);
  } catch (const Error& error) {
    running->fail(error);
    return;
  } catch (const std::exception& error) {
    running->fail(Error(ErrorCode::Internal, error.what()));
    return;
  }
  if (group.patience_ns > 0 && wait_for(running->handles, group.patience_ns)) {
    running->tell();
    return;
  }
  // One more than the number of handles, so that the group is not reported while this loop runs.
  running->left = running->handles.size() + 1;
  for (named::Handle& handle : running->handles) {
    handle.on_done([running, completions] {
      if (running->left.fetch_sub(1) == 1) completions->push(running);
    });
  }
  if (running->left.fetch_sub(1) == 1) running->tell();
}

constexpr NamedCalls kCalls{.submit = &submit};

}  // namespace

void publish(std::uint64_t number, const std::shared_ptr<named::Engine>& engine) {
  Published& all = published();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.engines, [](const auto& entry) { return entry.second.first.expired(); });
  all.engines[number] = {engine, fork_generation()};
}

void stop_completions() { Completions::stop(); }

void bind_named_calls(py::module_& module) {
  module.def("named_records_keep", &keep_records, py::arg("on"),
             "Whether what becomes of operations of compiled programs is kept from now on; drops what was.");
  module.def("named_records_take", &take,
             "Operations of compiled programs that are done, and drops them: tuples of the kind, the name, when it was "
             "asked for, agreed on and done in seconds of time.monotonic(), and the error's text or ''.");
  module.def(
      "named_calls", [] { return py::capsule(&kCalls, kNamedCallsCapsule); },
      "A capsule with functions that op libraries of frameworks call: extensions/horovod/bindings/named_calls.h.");
}

}  // namespace cohort::python
