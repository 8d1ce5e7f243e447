// Which way an operation goes once all agree, and how other ranks' memory is reached.
#include "comm/local/engine.h"

#include "base/result.h"
#include "comm/local/plan.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace cohort::comm::local {
namespace {

// Between pieces the engine looks whether the world has ended.
constexpr std::size_t kPieceBytes = std::size_t{8} << 20;
// Two ranks stage all they bring up to here, which saves a wait; beyond it the fewer bytes of half of it count for
// more.
constexpr std::size_t kMostExchanged = std::size_t{1} << 20;
// Of a longer buffer little is left in the core's caches when a peer comes to read it.
constexpr std::size_t kBeyondCaches = std::size_t{1} << 20;
// How often the distance of the cores is measured again, in operations that could use it.
constexpr std::uint64_t kMeasureEvery = 1024;

}  // namespace

Engine::Path Engine::choose(const Request& request) const {
  const Kind kind = round_.agreed.kind;
  // Where a broadcast's data is small but comes from another rank than announced, it is not beside the announcement.
  if (small_) return kind != Kind::Broadcast || round_.root == round_.agreed.root ? Path::Beside : Path::Staged;
  bool in_place = plan_.zero_copy != 0;
  switch (kind) {
    case Kind::AllReduce: in_place = in_place && inputs_mapped() && outputs_mapped(); break;
    case Kind::Reduce:
      in_place =
          in_place && inputs_mapped() && round_.brought[static_cast<std::size_t>(round_.root)].output_segment != 0;
      break;
    case Kind::Broadcast:
    case Kind::Scatter:
    case Kind::ScatterV: in_place = in_place && mapped(round_.root); break;
    default: in_place = in_place && inputs_mapped(); break;
  }
  if (in_place) return Path::ZeroCopy;
  if (kind == Kind::AllReduce && plan_.zero_copy != 0 && outputs_mapped()) return Path::ByOutput;
  if (static_cast<int>(round_.active.size()) < size_) return Path::Staged;
  // What one rank reads of another at a time decides whether a system call for it pays.
  const auto ranks = static_cast<std::size_t>(size_);
  const std::size_t agreed = static_cast<std::size_t>(round_.agreed.count) * size_of(request.dtype);
  std::size_t block = agreed;
  if (kind == Kind::AllReduce || kind == Kind::Reduce || kind == Kind::ReduceScatterV || kind == Kind::AllToAll) {
    block = agreed / ranks;
  } else if (kind == Kind::AllGatherV || kind == Kind::GatherV) {
    block = bytes_beside(request, size_);
  } else if (kind == Kind::AllToAllV || kind == Kind::ScatterV) {
    block = largest_block(request);
  }
  const std::uint64_t least = is_reduction(kind) ? plan_.cross_reduce_bytes : plan_.cross_copy_bytes;
  return block >= least ? Path::Cross : Path::Staged;
}

void Engine::execute(const Request& request, CollectiveEvent* event) {
  const Path path = choose(request);
  non_finite_ = false;
  if (event != nullptr) event->zero_copy = path == Path::ZeroCopy;
  if (path == Path::Staged) measure_again();
  switch (round_.agreed.kind) {
    case Kind::AllReduce:
      set_members(request);
      if (path == Path::Beside) return all_reduce_beside(request);
      if (path == Path::ZeroCopy) return all_reduce_zero_copy(request);
      if (path == Path::ByOutput) return all_reduce_by_output(request);
      if (path == Path::Cross) return all_reduce_cross(request);
      return exchanges(request) ? reduce_exchanged(request) : reduce_staged(request, path);
    case Kind::Reduce:
      set_members(request);
      if (path == Path::Beside) return rank_ == round_.root ? all_reduce_beside(request) : void();
      if (path == Path::ZeroCopy) return all_reduce_zero_copy(request);
      return path == Path::Staged && exchanges(request) ? reduce_exchanged(request) : reduce_staged(request, path);
    case Kind::ReduceScatter:
    case Kind::ReduceScatterV:
      set_members(request);
      if (path == Path::Beside) return reduce_scatter_beside(request);
      if (path == Path::Staged) return reduce_scatter_staged(request);
      reduce_scatter_direct(request);
      return finish_round();
    case Kind::None:
    case Kind::Barrier:
    case Kind::Joined:
    case Kind::Send:
    case Kind::Recv: return;  // a barrier is done when all have come
    case Kind::Broadcast:
    case Kind::AllGather:
    case Kind::AllGatherV:
    case Kind::Gather:
    case Kind::GatherV:
    case Kind::Scatter:
    case Kind::ScatterV:
    case Kind::AllToAll:
    case Kind::AllToAllV:
    case Kind::Split:
      if (path == Path::Beside) return move_beside(request);
      if (path == Path::Staged) return move_staged(request);
      return move_direct(request);
  }
}

void Engine::measure_again() {
  if (sequence_ % kMeasureEvery != 0 || measured_at_ == sequence_) return;
  measured_at_ = sequence_;
  distance_.measure(std::chrono::microseconds(0));
}

bool Engine::exchanges(const Request& request) const noexcept {
  return size_ == 2 && round_.active.size() == 2 && request.input_bytes() <= kMostExchanged;
}

void Engine::run_alone(const Request& request) {
  if (request.output == nullptr || request.output_count == 0) return;
  if (request.weighted && request.weight == 0) {
    std::memset(request.output, 0, request.output_bytes());
  } else if (is_reduction(request.kind) && (request.prescale != 1 || request.postscale != 1)) {
    round_.active = round_.everyone;
    round_.agreed = describe(request);
    round_.agreed.weighted = 0;
    set_members(request);
    fold_inputs_.assign(1, request.input);
    fold_outputs_.assign(1, request.output);
    fold_pieces(request, request.output_count);
  } else if (request.input != request.output) {
    std::memmove(request.output, request.input, request.output_bytes());
  }
}

bool Engine::inputs_mapped() const noexcept {
  return std::all_of(round_.active.begin(), round_.active.end(), [&](int rank) { return mapped(rank); });
}

bool Engine::outputs_mapped() const noexcept {
  return std::all_of(round_.active.begin(), round_.active.end(),
                     [&](int rank) { return round_.brought[static_cast<std::size_t>(rank)].output_segment != 0; });
}

const std::byte* Engine::payload_of(int rank) const noexcept {
  return tiny_ ? state(rank).slots[sequence_ % 2].tiny : layout().payload(world_.control(), rank, sequence_);
}

const std::byte* Engine::input_of(int rank, const Request& request) {
  if (rank == rank_) return static_cast<const std::byte*>(request.input);
  return remote(rank, round_.brought[static_cast<std::size_t>(rank)].input(), request.input_bytes());
}

std::byte* Engine::output_of(int rank, const Request& request) {
  if (rank == rank_) return static_cast<std::byte*>(request.output);
  return remote(rank, round_.brought[static_cast<std::size_t>(rank)].output(), request.input_bytes());
}

// A peer's registered memory. Its announcement may still be in the peer's queue, which it empties while it waits.
std::byte* Engine::remote(int rank, const Location& location, std::size_t bytes) {
  Mesh& mesh = *world_.mesh();
  std::byte* found = nullptr;
  std::optional<Error> failed;
  const auto try_once = [&] {
    auto address = mesh.address(rank, location, bytes);
    if (address && !*address) {
      const auto got = mesh.receive(rank, round_.brought[static_cast<std::size_t>(rank)].announcements);
      if (!got) {
        failed = got.error();
        return true;
      }
      address = mesh.address(rank, location, bytes);
    }
    if (!address) {
      failed = address.error();
    } else if (*address) {
      found = static_cast<std::byte*>(**address);
    }
    return failed.has_value() || found != nullptr;
  };
  if (!try_once()) {
    wait_until([&] { return found != nullptr || failed.has_value() || try_once(); },
               [&] { return std::vector<int>{rank}; });
  }
  if (failed) end_world(failed->code(), rank, failed->what());
  return found;
}

// Where [offset, offset + bytes) of a peer's memory can be read: in place, or in `scratch`.
const std::byte* Engine::fetch(int rank, const Location& location, std::size_t offset, std::size_t bytes,
                               std::byte* scratch) {
  if (location.segment != 0) return remote(rank, {location.segment, location.offset + offset}, bytes);
  read_peer(rank, scratch, location.offset + offset, bytes);
  return scratch;
}

// The same, copied to `to`.
void Engine::pull(int rank, const Location& location, std::size_t offset, std::size_t bytes, std::byte* to) {
  if (bytes == 0) return;
  if (location.segment != 0) {
    return copy_pieces(to, remote(rank, {location.segment, location.offset + offset}, bytes), bytes);
  }
  for (std::size_t done = 0; done < bytes; done += kPieceBytes) {
    if (done > 0) throw_if_ended();
    read_peer(rank, to + done, location.offset + offset + done, std::min(kPieceBytes, bytes - done));
  }
}

void Engine::read_peer(int rank, void* to, std::uint64_t address, std::size_t bytes) {
  const auto read = world_.read_peer(rank, to, address, bytes);
  if (read) return;
  // A process that dies loses its memory a little before it shows as dying.
  for (int i = 0; i < 100; ++i) {
    throw_if_ended();
    if (const auto how = world_.lost(rank)) end_lost(rank, *how);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  end_world(read.error().code(), rank,
            fmt::format("{} failed -- rank {} ({}), operation {} -- {} -- COHORT_PLAN=cross=off does without it",
                        doing(), rank_, world_.host(), sequence_, read.error().what()));
}

void Engine::copy_pieces(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes && to != from; done += kPieceBytes) {
    if (done > 0) throw_if_ended();
    std::memmove(to + done, from + done, std::min(kPieceBytes, bytes - done));
  }
}

void Engine::fold_pieces(const Request& request, std::int64_t count, Stores stores) {
  const std::size_t element = size_of(request.dtype);
  const auto piece = static_cast<std::int64_t>(kPieceBytes / element);
  while (count > 0) {
    const std::int64_t now = std::min(count, piece);
    FoldJob piece_job = job(request, now);
    piece_job.stores = stores;
    fold(piece_job);
    count -= now;
    if (count == 0) break;
    throw_if_ended();
    const std::size_t step = static_cast<std::size_t>(now) * element;
    for (const void*& input : fold_inputs_) input = static_cast<const std::byte*>(input) + step;
    for (void*& output : fold_outputs_) output = static_cast<std::byte*>(output) + step;
  }
}

void Engine::post(CounterOf counter, std::uint64_t value) noexcept {
  if (non_finite_) state(rank_).non_finite[sequence_ % 2].store(sequence_, std::memory_order_relaxed);
  local::publish((state(rank_).*counter).value, value);
  posted();
}

void Engine::wait_for_counters(CounterOf counter, std::uint64_t target) {
  wait_for_all([&](int rank) { return reached((state(rank).*counter).value, target); });
}

// Of an all_reduce in which this rank has seen what all others have posted. What it has folded itself it knows.
void Engine::report_finite(FiniteCheck& finite_check) const noexcept {
  bool finite = !non_finite_;
  for (int rank = 0; rank < size_ && finite; ++rank) {
    finite = state(rank).non_finite[sequence_ % 2].load(std::memory_order_relaxed) != sequence_;
  }
  finite_check.note(finite);
}

// Nobody leaves before all have read and written what they need.
void Engine::finish_round() {
  post(&RankState::finished, sequence_);
  wait_for_counters(&RankState::finished, sequence_);
}

Stores Engine::stores_for(std::size_t bytes) const noexcept {
  const auto policy = static_cast<StorePolicy>(plan_.stores);
  if (policy == StorePolicy::Cached || bytes < kLeastNonTemporal) return Stores::Cached;
  if (policy == StorePolicy::NonTemporal || bytes >= kBeyondCaches) return Stores::NonTemporal;
  return distance_.better();
}

}  // namespace cohort::comm::local
