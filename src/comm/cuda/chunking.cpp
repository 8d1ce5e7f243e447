#include "comm/cuda/chunking.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <tuple>
#include <utility>

namespace cohort::comm::cuda {
namespace {

std::atomic<std::size_t> bytes_of_pieces{std::size_t{4} << 20};

/// What of all parts a rank has in a buffer.
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
      unit_(static_cast<std::int64_t>(kCacheLine / element_)),
      parts_(parts_of(request, size)) {
  const std::int64_t elements = std::accumulate(parts_.begin(), parts_.end(), std::int64_t{0});
  const std::size_t all = static_cast<std::size_t>(elements) * element_ * sides();
  if (all <= piece_bytes) return;
  const std::size_t rounding = 2 * kCacheLine * parts_.size() * sides();  // of the parts, to lines
  const std::size_t each = piece_bytes > 2 * rounding ? piece_bytes - rounding : std::max(piece_bytes / 2, kCacheLine);
  pieces_ = (all + each - 1) / each;
}

/// Of a part of so many elements: where its share in a piece begins. Shares differ by one unit at most.
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
  // In place, but where that is not allowed.
  std::tie(piece.request.input, piece.request.input_count) = share(input_of(kind_, is_root), 0, piece.input);
  std::tie(piece.request.output, piece.request.output_count) =
      share(output_of(kind_, is_root), kind_ == Kind::AllToAll ? in_lines(in_room) : 0, piece.output);
  for (auto* const ranges : {&piece.input, &piece.output})
    std::erase_if(*ranges, [](const ByteRange& one) { return one.bytes == 0; });
  if (request_.counts) piece.request.counts = std::make_shared<const Counts>(Counts{std::move(counts), {}});
  return piece;
}

}  // namespace cohort::comm::cuda
