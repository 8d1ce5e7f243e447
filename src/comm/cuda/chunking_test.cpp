// How collectives are cut: all elements once, nothing twice, and the same on all ranks.
#include "comm/cuda/chunking.h"

#include "comm/testing/naive.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace cohort::comm::testing {
namespace {

using cuda::ByteRange;
using cuda::Chunking;
using cuda::Piece;

constexpr std::size_t kPiece = 4096;

Request request_of(const Call& call, int size, int rank) {
  Request request;
  request.kind = call.kind;
  request.dtype = call.dtype;
  request.root = call.root;
  const bool is_root = rank == call.root;
  const auto kind = call.kind;
  const bool gets = (kind != Kind::Reduce && kind != Kind::Gather && kind != Kind::GatherV) || is_root;
  const bool brings = (kind != Kind::Scatter && kind != Kind::ScatterV) || is_root;
  // What is not the root's in a broadcast is there all the same.
  request.input_count = kind == Kind::Broadcast ? call.count : brings ? elements_in(call, size, rank) : 0;
  request.output_count = gets ? elements_out(call, size, rank) : 0;
  if (!call.counts.empty()) request.counts = std::make_shared<const Counts>(Counts{call.counts, {}});
  return request;
}

/// Where the pieces' bytes lie in one buffer; none may be missing, or there twice.
void expect_all(std::vector<ByteRange> ranges, std::int64_t count, DType dtype, const std::string& what) {
  std::sort(ranges.begin(), ranges.end(), [](const ByteRange& a, const ByteRange& b) { return a.at < b.at; });
  std::size_t next = 0;
  for (const ByteRange& one : ranges) {
    ASSERT_EQ(one.at, next) << what;
    next += one.bytes;
  }
  EXPECT_EQ(next, static_cast<std::size_t>(count) * size_of(dtype)) << what;
}

TEST(Chunking, HasEveryElementOnceAndIsTheSameOnAllRanks) {
  std::vector<std::byte> room(3 * kPiece);
  for (const Kind kind :
       {Kind::AllReduce, Kind::Reduce, Kind::ReduceScatter, Kind::ReduceScatterV, Kind::Broadcast, Kind::AllGather,
        Kind::AllGatherV, Kind::Gather, Kind::GatherV, Kind::Scatter, Kind::ScatterV, Kind::AllToAll}) {
    for (const DType dtype : {DType::Int8, DType::BFloat16, DType::Float32, DType::Complex128}) {
      for (const int size : {1, 2, 5}) {
        const auto element = static_cast<std::int64_t>(size_of(dtype));
        for (const std::int64_t count : {4096 / element, 4096 / element + 1, 12289 / element, 100003 / element}) {
          Call call{.kind = kind, .dtype = dtype, .count = count, .root = size - 1};
          if (has_counts_by_rank(kind)) {
            for (int rank = 0; rank < size; ++rank) call.counts.push_back(rank == 1 ? 0 : count / (rank + 1));
          }
          std::size_t pieces = 0;
          for (int rank = 0; rank < size; ++rank) {
            const Request request = request_of(call, size, rank);
            const Chunking cut(request, rank, size, kPiece);
            const std::string what =
                fmt::format("{}, rank {} of {}, {} pieces", describe(call), rank, size, cut.pieces());
            if (rank == 0) pieces = cut.pieces();
            ASSERT_EQ(cut.pieces(), pieces) << what;
            if (pieces == 1) continue;
            EXPECT_LE(cut.room(), kPiece) << what;
            std::vector<ByteRange> input, output;
            for (std::size_t i = 0; i < pieces; ++i) {
              const Piece piece = cut.piece(i, room.data());
              const auto within = [&](const void* data, std::size_t bytes) {
                const auto* const begin = static_cast<const std::byte*>(data);
                return bytes == 0 || (begin >= room.data() && begin + bytes <= room.data() + cut.room());
              };
              EXPECT_TRUE(within(piece.request.input, piece.request.input_bytes())) << what;
              EXPECT_TRUE(within(piece.request.output, piece.request.output_bytes())) << what;
              input.insert(input.end(), piece.input.begin(), piece.input.end());
              output.insert(output.end(), piece.output.begin(), piece.output.end());
            }
            expect_all(input, request.input_count, dtype, what + ": input");
            expect_all(output, request.output_count, dtype, what + ": output");
          }
          const std::int64_t bytes = element * (call.counts.empty() ? count : sum_of(call.counts));
          if (bytes <= 4096 && size == 1 && kind != Kind::AllToAll) {
            EXPECT_EQ(pieces, 1U);
          }
          if (bytes > 4096) {
            EXPECT_GT(pieces, 1U);
          }
        }
      }
    }
  }
}

TEST(Chunking, LeavesWholeWhatRanksKnowAFewCountsOf) {
  Request request;
  request.kind = Kind::AllToAllV;
  request.input_count = request.output_count = 1 << 20;
  request.counts = std::make_shared<const Counts>(Counts{{1 << 20}, {1 << 20}});
  EXPECT_EQ(Chunking(request, 0, 1, kPiece).pieces(), 1U);
  request.kind = Kind::Recv;
  EXPECT_EQ(Chunking(request, 0, 2, kPiece).pieces(), 1U);
}

}  // namespace
}  // namespace cohort::comm::testing
