#include "comm/gpu/chunking.h"

#include "comm/api/work_state.h"
#include "comm/kernels/codecs.h"

#include <cohort/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

namespace cohort::comm::cuda {
namespace {

std::atomic<std::size_t> bytes_of_pieces{std::size_t{4} << 20};

/// Part of a collective's data that a rank's buffer holds.
enum class Share { Nothing, Own, All };

Share input_of(Kind kind, bool is_root) noexcept {
  switch (kind) {
    case Kind::AllGather:
    case Kind::AllGatherV:
    case Kind::Gather:
    case Kind::GatherV: return Share::Own;
    case Kind::Scatter:
    case Kind::ScatterV: return is_root ? Share::All : Share::Nothing;
    default: return Share::All;
  }
}

Share output_of(Kind kind, bool is_root) noexcept {
  switch (kind) {
    case Kind::Reduce:
    case Kind::Gather:
    case Kind::GatherV: return is_root ? Share::All : Share::Nothing;
    case Kind::ReduceScatter:
    case Kind::ReduceScatterV:
    case Kind::Scatter:
    case Kind::ScatterV: return Share::Own;
    default: return Share::All;
  }
}

std::vector<std::int64_t> parts_of(const Request& request, int size) {
  const auto equal = [&](std::int64_t each) { return std::vector<std::int64_t>(static_cast<std::size_t>(size), each); };
  switch (request.kind) {
    case Kind::AllReduce:
    case Kind::Broadcast: return {request.output_count};
    case Kind::Reduce: return {request.input_count};
    case Kind::ReduceScatter:
    case Kind::Scatter: return equal(request.output_count);
    case Kind::AllGather:
    case Kind::Gather: return equal(request.input_count);
    case Kind::AllToAll: return equal(request.input_count / size);
    case Kind::ReduceScatterV:
    case Kind::AllGatherV:
    case Kind::GatherV:
    case Kind::ScatterV: return request.counts->input;
    default: return {};
  }
}

std::size_t in_lines(std::size_t bytes) noexcept { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

}  // namespace

std::size_t piece_bytes() noexcept { return bytes_of_pieces.load(std::memory_order_relaxed); }
void set_piece_bytes(std::size_t bytes) noexcept { bytes_of_pieces.store(bytes, std::memory_order_relaxed); }

Chunking::Chunking(const Request& request, int rank, int size, std::size_t piece_bytes)
    : request_(request),
      kind_(request.kind),
      rank_(rank),
      element_(size_of(request.dtype)),
      unit_(std::max(static_cast<std::int64_t>(kCacheLine / element_),
                     static_cast<std::int64_t>(block_of(request.wire_format)))),
      parts_(parts_of(request, size)) {
  const std::int64_t elements = std::accumulate(parts_.begin(), parts_.end(), std::int64_t{0});
  const std::size_t all = static_cast<std::size_t>(elements) * element_ * sides();
  if (all <= piece_bytes) return;
  // A format with blocks is encoded in blocks from the beginning of the sum. If a part does not begin at a multiple of
  // a block, its pieces would be encoded in other blocks than the whole, and their bits would differ.
  const auto block = static_cast<std::int64_t>(block_of(request.wire_format));
  const bool reduces = kind_ == Kind::ReduceScatter || kind_ == Kind::ReduceScatterV;
  if (reduces && block > 1 &&
      std::any_of(parts_.begin(), parts_.end() - 1, [block](auto part) { return part % block != 0; }))
    return;
  const std::size_t rounding = 2 * kCacheLine * parts_.size() * sides();  // bytes for rounding parts to cache lines
  const std::size_t each = piece_bytes > 2 * rounding ? piece_bytes - rounding : std::max(piece_bytes / 2, kCacheLine);
  pieces_ = (all + each - 1) / each;
}

/// Returns where piece `which` begins in a part of `part` elements. The sizes of pieces differ by one unit at most.
std::int64_t Chunking::begin(std::int64_t part, std::size_t which) const noexcept {
  const auto pieces = static_cast<std::int64_t>(pieces_), number = static_cast<std::int64_t>(which);
  const std::int64_t units = (part + unit_ - 1) / unit_;
  return std::min(part, (units / pieces * number + std::min(number, units % pieces)) * unit_);
}

std::size_t Chunking::room() const noexcept {
  std::size_t bytes = 0;
  for (const std::int64_t part : parts_) bytes += in_lines(static_cast<std::size_t>(begin(part, 1)) * element_);
  return bytes * sides();
}

Piece Chunking::piece(std::size_t which, std::byte* room) const {
  const auto bytes_of = [this](std::int64_t count) { return static_cast<std::size_t>(count) * element_; };
  std::vector<ByteRange> all;
  std::vector<std::int64_t> counts;
  ByteRange own;
  std::size_t part_at = 0, in_room = 0;
  for (const std::int64_t part : parts_) {
    const std::int64_t from = begin(part, which), count = begin(part, which + 1) - from;
    if (static_cast<int>(counts.size()) == rank_) own = {bytes_of(from), in_room, bytes_of(count)};
    all.push_back({part_at + bytes_of(from), in_room, bytes_of(count)});
    counts.push_back(count);
    part_at += bytes_of(part);
    in_room += bytes_of(count);
  }
  Piece piece;
  piece.request = request_;
  piece.request.group = 0;
  if (request_.residual != nullptr) piece.request.residual += begin(parts_.front(), which);
  piece.request.finite_check = nullptr;
  const auto share = [&](Share what, std::size_t offset,
                         std::vector<ByteRange>& ranges) -> std::pair<void*, std::int64_t> {
    if (what == Share::Nothing) return {nullptr, 0};
    if (what == Share::Own) {
      ranges = {own};
      return {room + own.in_room, static_cast<std::int64_t>(own.bytes / element_)};
    }
    ranges = all;
    for (ByteRange& range : ranges) range.in_room += offset;
    return {room + offset, static_cast<std::int64_t>(in_room / element_)};
  };
  const bool is_root = rank_ == request_.root;
  // Input and output share the piece's memory, except in an all_to_all, which cannot be in place.
  std::tie(piece.request.input, piece.request.input_count) = share(input_of(kind_, is_root), 0, piece.input);
  std::tie(piece.request.output, piece.request.output_count) =
      share(output_of(kind_, is_root), kind_ == Kind::AllToAll ? in_lines(in_room) : 0, piece.output);
  for (auto* const ranges : {&piece.input, &piece.output})
    std::erase_if(*ranges, [](const ByteRange& one) { return one.bytes == 0; });
  if (request_.counts) piece.request.counts = std::make_shared<const Counts>(Counts{std::move(counts), {}});
  return piece;
}

Staging::Clock::time_point end_of_patience() noexcept {
  constexpr auto kLastWait = std::chrono::milliseconds(100);  // a stream may hang forever
  return Staging::Clock::now() + kLastWait;
}

bool settled(Gpu& gpu, const MarkPtr& mark, Staging::Clock::time_point limit) noexcept {
  try {
    if (mark) gpu.wait(*mark, limit);
    return true;
  } catch (const Error&) {
    return false;
  }
}

void keep_for_good(std::shared_ptr<const void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<const void>>();
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

Ring::Ring(Gpu& gpu, std::shared_ptr<std::byte> room, std::size_t slot_bytes)
    : gpu_(gpu), room_(std::move(room)), slot_bytes_(slot_bytes) {
  for (std::size_t i = 0; i < kSlots; ++i) slots_[i].data = room_.get() + i * slot_bytes;
}

Ring::~Ring() {
  if (settle()) {
    for (const auto& [mapping, peer] : peers_) {
      if (peer.pinned) gpu_.unpin(mapping->data());
    }
    return;
  }
  keep_for_good(std::move(room_));
  for (auto& [mapping, peer] : peers_) keep_for_good(std::move(peer.memory));
}

bool Ring::pin(const std::shared_ptr<const sys::Mapping>& memory) {
  if (const auto found = peers_.find(memory.get()); found != peers_.end()) return found->second.pinned;
  // If no other owner is left, the peer has freed the memory.
  std::erase_if(peers_, [this](const auto& entry) {
    const bool freed = entry.second.memory.use_count() == 1;
    if (freed && entry.second.pinned) gpu_.unpin(entry.first->data());
    return freed;
  });
  const bool pinned = gpu_.pin(memory->data(), memory->bytes());
  peers_.emplace(memory.get(), Pinned{memory, pinned});
  return pinned;
}

bool Ring::settle() noexcept {
  const auto limit = end_of_patience();
  bool all = true;
  for (Slot& slot : slots_) {
    for (MarkPtr* const mark : {&slot.arrived, &slot.departed}) {
      if (settled(gpu_, *mark, limit)) {
        *mark = nullptr;
      } else {
        all = false;
      }
    }
  }
  return all;
}

namespace {

class InPieces final : public Pieces {
 public:
  InPieces(Gpu& gpu, const Request& request, StreamMarks marks, Chunking cut, std::shared_ptr<Ring> ring, int rank)
      : gpu_(gpu),
        request_(request),
        marks_(std::move(marks)),
        chunking_(std::move(cut)),
        ring_(std::move(ring)),
        rank_(rank) {}

  void run(const Round& agreed, Clock::time_point deadline, Turn& turn, CollectiveEvent* event) override {
    std::size_t number = 0;
    try {
      go_through(agreed, deadline, turn, event, number);
    } catch (const Error& error) {
      ring_->settle();  // waits until the caller's memory is not used any more, if possible
      throw Error(error.code(),
                  fmt::format("{} -- it is piece {} of {} of {}", error.what(),
                              std::min(number + 1, chunking_.pieces()), chunking_.pieces(), text_of(request_)),
                  error.context());
    } catch (...) {
      ring_->settle();
      throw;
    }
  }
  void abandon(Clock::time_point) noexcept override {}  // no copy has begun

 private:
  struct InSlot {
    Ring::Slot* slot;
    Piece piece;
  };

  /// Runs all pieces; `number` is the current piece.
  void go_through(const Round& agreed, Clock::time_point deadline, Turn& turn, CollectiveEvent* event,
                  std::size_t& number) {
    // In a broadcast, ranks other than the root contribute only if the root has joined.
    const bool brings = request_.kind != Kind::Broadcast || rank_ == request_.root || !agreed.everyone;
    const auto wait = [&](MarkPtr& mark) {
      if (mark) gpu_.wait(*mark, deadline, [&] { turn.attend(); });
      mark = nullptr;
    };
    const std::size_t pieces = chunking_.pieces();
    bool finite = true;
    // Without a reduction, the GPU reads data directly from the slot of the rank that provides it. That rank reuses the
    // slot of piece n for piece n + 4, when all ranks have reached piece n + 2; and no rank reaches that piece before
    // it has read piece n.
    const bool borrows = !is_reduction(request_.kind) && agreed.everyone;
    MarkPtr last, before_last;
    InSlot coming = begin(0, brings);
    for (; number < pieces; ++number) {
      InSlot own = std::move(coming);
      if (number + 1 < pieces) coming = begin(number + 1, brings);
      Piece& piece = own.piece;
      wait(own.slot->departed);  // output of an earlier piece, if no later wait covered it
      wait(own.slot->arrived);
      wait(before_last);  // output of the piece before the previous one
      borrowed_.clear();
      if (borrows) piece.request.borrowed = &borrowed_;
      if (request_.finite_check) {
        piece.request.finite_check = std::make_shared<FiniteCheck>(
            ConstBuffer(piece.request.output, piece.request.output_count, request_.dtype));
      }
      turn.carry_out(piece.request, event);
      if (request_.finite_check) finite = finite && piece.request.finite_check->finite();
      before_last = std::exchange(last, depart(own, borrows && brings));
      own.slot->departed = last;
    }
    wait(before_last);
    wait(last);
    if (request_.finite_check) request_.finite_check->note(finite);
  }

  InSlot begin(std::size_t number, bool brings) {
    Ring::Slot& slot = ring_->next();
    InSlot turn{&slot, chunking_.piece(number, slot.data)};
    if (!brings || turn.piece.input.empty()) return turn;
    std::vector<Transfer> copies;
    for (const ByteRange& one : turn.piece.input)
      copies.push_back({slot.data + one.in_room, static_cast<const std::byte*>(request_.input) + one.at, one.bytes});
    const MarkPtr after[] = {marks_.input, slot.departed};
    slot.arrived = gpu_.copy_to_host(copies, after);
    return turn;
  }
  /// Begins to copy a piece's output to the GPU. Returns null if there is nothing to copy. `stays`: input and output
  /// are the same memory, so this rank's own part is in place already.
  MarkPtr depart(const InSlot& turn, bool stays) {
    std::vector<Transfer> copies;
    const auto* const result = static_cast<const std::byte*>(turn.piece.request.output);
    for (const ByteRange& one : turn.piece.output) {
      std::byte* const to = static_cast<std::byte*>(request_.output) + one.at;
      const auto brought = [&](const ByteRange& own) {
        return to == static_cast<const std::byte*>(request_.input) + own.at;
      };
      if (stays && std::any_of(turn.piece.input.begin(), turn.piece.input.end(), brought)) continue;
      const std::byte* from = turn.slot->data + one.in_room;
      const auto at = static_cast<std::size_t>(from - result);
      const auto borrowed =
          std::find_if(borrowed_.begin(), borrowed_.end(), [at](const Borrowed& block) { return block.at == at; });
      if (borrowed != borrowed_.end()) from = taken(*borrowed, turn.slot->data + one.in_room);
      copies.push_back({to, from, one.bytes});
    }
    return copies.empty() ? nullptr : gpu_.copy_to_device(copies, {&marks_.output, 1});
  }

  /// Returns the address at which the GPU reads the block. Copies the block to `room` if the GPU could read the block
  /// only slowly.
  const std::byte* taken(const Borrowed& block, std::byte* room) {
    if (!block.memory || ring_->pin(block.memory)) return block.data;
    std::memcpy(room, block.data, block.bytes);
    return room;
  }

  Gpu& gpu_;
  const Request request_;
  const StreamMarks marks_;
  const Chunking chunking_;
  const std::shared_ptr<Ring> ring_;
  const int rank_;
  std::vector<Borrowed> borrowed_;  // the current piece's
};

class Alone final : public Pieces {
 public:
  Alone(Gpu& gpu, const Request& request, StreamMarks marks) : gpu_(gpu), marks_(std::move(marks)) {
    if (request.output == request.input || request.output_count == 0) return;
    const MarkPtr after[] = {marks_.input, marks_.output};
    copied_ = gpu.copy_on_gpu({request.output, request.input, request.output_bytes()}, after);
  }
  ~Alone() override { abandon(end_of_patience()); }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

  void run(const Round&, Clock::time_point deadline, Turn& turn, CollectiveEvent* event) override {
    turn.carry_out(Request(), event);  // the operation is counted
    for (const MarkPtr& mark : {marks_.input, marks_.output, copied_}) {
      if (mark) gpu_.wait(*mark, deadline, [&] { turn.attend(); });
    }
    copied_ = nullptr;
  }
  void abandon(Clock::time_point limit) noexcept override {
    settled(gpu_, copied_, limit);
    copied_ = nullptr;
  }

 private:
  Gpu& gpu_;
  const StreamMarks marks_;
  MarkPtr copied_;
};

}  // namespace

std::shared_ptr<Pieces> in_pieces(Gpu& gpu, const Request& request, StreamMarks marks, Chunking cut,
                                  std::shared_ptr<Ring> ring, int rank) {
  return std::make_shared<InPieces>(gpu, request, std::move(marks), std::move(cut), std::move(ring), rank);
}

bool is_copy(const Request& request) noexcept {
  const bool scaled = is_reduction(request.kind) && (request.prescale != 1 || request.postscale != 1);
  return request.kind < Kind::Barrier && !scaled && !(request.weighted && request.weight == 0) && !request.finite_check;
}

std::shared_ptr<Pieces> copy_alone(Gpu& gpu, const Request& request, StreamMarks marks) {
  return std::make_shared<Alone>(gpu, request, std::move(marks));
}

}  // namespace cohort::comm::cuda
