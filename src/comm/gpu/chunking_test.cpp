// Division of collectives into pieces: every element once, and the same pieces on all ranks.
#include "comm/gpu/chunking.h"
#include "comm/testing/calls.h"
#include "comm/testing/gpus.h"
#include "comm/testing/naive.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>
#include <cohort/observer.h>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <string>
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
  // A broadcast's buffer is on all ranks, not only on the root.
  request.input_count = kind == Kind::Broadcast ? call.count : brings ? elements_in(call, size, rank) : 0;
  request.output_count = gets ? elements_out(call, size, rank) : 0;
  if (!call.counts.empty()) request.counts = std::make_shared<const Counts>(Counts{call.counts, {}});
  return request;
}

/// Checks where the pieces' bytes lie in one buffer: none may be missing, or there twice.
void expect_all(std::vector<ByteRange> ranges, std::int64_t count, DType dtype, const std::string& what) {
  std::sort(ranges.begin(), ranges.end(), [](const ByteRange& a, const ByteRange& b) { return a.at < b.at; });
  std::size_t next = 0;
  for (const ByteRange& one : ranges) {
    ASSERT_EQ(one.at, next) << what;
    next += one.bytes;
  }
  EXPECT_EQ(next, static_cast<std::size_t>(count) * size_of(dtype)) << what;
}

/// A format's blocks begin at multiples of their size in the sum, and pieces may not move them.
TEST(Chunking, PartsThatBeginWithinABlockAreLeftWhole) {
  for (const std::int64_t part : {std::int64_t{64 * 1024}, std::int64_t{64 * 1024 + 64}}) {
    for (const WireFormat format : {WireFormat::None, WireFormat::Int8}) {
      Request request = request_of({.kind = Kind::ReduceScatter, .dtype = DType::Float32, .count = part}, 2, 0);
      request.wire_format = format;
      const bool whole = format == WireFormat::Int8 && part % 256 != 0;
      EXPECT_EQ(Chunking(request, 0, 2, kPiece).pieces() == 1, whole) << part;
    }
  }
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

// Collectives on GPU memory in pieces through host memory: copies and sums overlap, the host memory is
// bounded, observers see one operation, and failures between pieces are handled. Runs with COHORT_NCCL=off
// over the fake driver, which reports each copy as it begins. comm_tests.trials_in_pieces checks the bits of
// all operations.

using namespace std::chrono_literals;

constexpr std::size_t kPieceBytes = 16384;
constexpr std::size_t kFloats = kPieceBytes / sizeof(float);
enum Way { kToHost, kToDevice, kWithin };

/// The driver's copies: a test may hold one up until another has begun.
class Copies {
 public:
  static Copies& all() {
    static Copies copies;
    return copies;
  }
  void reset() {
    const std::lock_guard lock(mutex_);
    begun_.clear();
    held_.clear();
    then_.clear();
    late_ = false;
    if (auto* const watch = of_driver<void(void (*)(int, unsigned long long, std::size_t))>("fake_cuda_watch"))
      watch([](int way, unsigned long long device, std::size_t) { all().came(way, device); });
  }
  /// Holds the copy at address `at` until the copy at `until_at` has begun.
  void hold(Way way, const void* at, Way until_way, const void* until_at) {
    const std::lock_guard lock(mutex_);
    held_[key(way, at)] = key(until_way, until_at);
  }
  void when(Way way, const void* at, std::function<void()> then) {
    const std::lock_guard lock(mutex_);
    then_[key(way, at)] = std::move(then);
  }
  int count(Way way) {
    const std::lock_guard lock(mutex_);
    int count = 0;
    for (const auto& [which, times] : begun_) count += which.first == way ? times : 0;
    return count;
  }
  /// Returns true if some held copy waited in vain, because the two copies do not overlap.
  bool late() {
    const std::lock_guard lock(mutex_);
    return late_;
  }

 private:
  using Key = std::pair<int, unsigned long long>;
  static Key key(int way, const void* at) { return {way, reinterpret_cast<unsigned long long>(at)}; }

  void came(int way, unsigned long long device) {
    std::function<void()> then;
    std::unique_lock lock(mutex_);
    ++begun_[{way, device}];
    changed_.notify_all();
    if (const auto found = then_.find({way, device}); found != then_.end()) then = found->second;
    if (const auto found = held_.find({way, device}); found != held_.end()) {
      const Key other = found->second;
      if (!changed_.wait_for(lock, 10s, [&] { return begun_.count(other) > 0; })) late_ = true;
    }
    lock.unlock();
    if (then) then();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, int> begun_;
  std::map<Key, Key> held_;
  std::map<Key, std::function<void()>> then_;
  bool late_ = false;
};

class InPieces : public ::testing::Test {
 protected:
  void SetUp() override {
    cuda::set_piece_bytes(kPieceBytes);
    (void)cuda::Gpu::at(0);
    Copies::all().reset();
  }
  void TearDown() override {
    cuda::set_piece_bytes(before_);
    Copies::all().reset();
    of_driver<void(int)>("fake_cuda_fail")(0);
  }

 private:
  const std::size_t before_ = cuda::piece_bytes();
};

std::vector<float> counted(std::size_t count, float factor) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = factor * static_cast<float>(i % 1000);
  return values;
}
/// Address of the n-th piece of a buffer of `count` floats.
const void* piece_at(const Floats& floats, std::size_t count, std::size_t number) {
  Request request;
  request.kind = Kind::AllReduce;
  request.input_count = request.output_count = static_cast<std::int64_t>(count);
  const cuda::Chunking cut(request, 0, 2, kPieceBytes);
  std::vector<std::byte> room(cut.room());
  return static_cast<const std::byte*>(floats.data()) + cut.piece(number, room.data()).input.front().at;
}

TEST_F(InPieces, CopiesAndSumsGoOnAtOnce) {
  std::array<std::atomic<const void*>, 2> second{};
  run_world(2, [&](Communicator comm) {
    const std::size_t count = 7 * kFloats + 3;
    const Floats values = floats(comm, counted(count, 1));
    const auto at = [&](std::size_t number) { return piece_at(values, count, number); };
    second[static_cast<std::size_t>(comm.rank())] = at(1);
    comm.barrier().wait();
    // Rank 0's second piece sets out while its first still waits for rank 1's first.
    if (comm.rank() == 1) Copies::all().hold(kToHost, at(0), kToHost, second[0].load());
    // The third is on its way to the host until the second, whose sum is ready by then, is on its way back.
    Copies::all().hold(kToHost, at(2), kToDevice, at(1));
    // The fourth is on its way back until the sixth has set out.
    Copies::all().hold(kToDevice, at(3), kToHost, at(5));
    comm.barrier().wait();
    comm.all_reduce(values.buffer(), {.timeout = 40s}).wait();
    EXPECT_EQ(values.values(), counted(count, 2));
  });
  EXPECT_FALSE(Copies::all().late());
}

TEST_F(InPieces, TheHostsMemoryIsThatOfAFewPieces) {
  auto* const pinned = of_driver<std::size_t()>("fake_cuda_pinned");
  const std::size_t at_first = pinned();
  run_world(2, [&](Communicator comm) {
    comm.all_reduce(floats(comm, {1}).buffer()).wait();  // all know from it that there is no NCCL
    comm.barrier().wait();
    const std::size_t before = pinned();
    comm.barrier().wait();
    const std::size_t count = 60 * kFloats;
    const Floats values = floats(comm, counted(count, 1)), half = floats(comm, std::vector<float>(count / 2));
    std::vector<Work> works;
    for (int turn = 0; turn < 3; ++turn) {
      works.push_back(comm.all_reduce(values.buffer(), {.op = ReduceOp::Max}));
      works.push_back(comm.reduce_scatter(values.buffer(), half.buffer(), {.op = ReduceOp::Max}));
      works.push_back(comm.reduce(values.buffer(), {.op = ReduceOp::Max}));
    }
    for (Work& work : works) work.wait();
    comm.barrier().wait();
    EXPECT_EQ(pinned() - before, 2 * 4 * kPieceBytes);
    comm.barrier().wait();
    // Larger pieces have memory of their own from now on, and that of the others is freed, though their Works are kept.
    cuda::set_piece_bytes(2 * kPieceBytes);
    comm.all_reduce(values.buffer(), {.op = ReduceOp::Max}).wait();
    comm.barrier().wait();
    EXPECT_EQ(pinned() - before, 2 * 8 * kPieceBytes);
    comm.barrier().wait();
    EXPECT_EQ(values.values(), counted(count, 1));
  });
  EXPECT_EQ(pinned(), at_first);
}

struct Events final : Observer {
  void on_collective(const CollectiveEvent& event) override { events.push_back(event); }
  std::vector<CollectiveEvent> events;
};

TEST_F(InPieces, TheyAreOneOperationToAllWhoLook) {
  run_world(2, [](Communicator comm) {
    Events observer;
    comm.set_observer(&observer);
    const std::size_t count = 5 * kFloats;
    const Floats values = floats(comm, counted(count, 1)), one = floats(comm, {1});
    comm.all_reduce(values.buffer()).wait();
    comm.all_reduce(one.buffer()).wait();
    comm.set_observer(nullptr);
    ASSERT_EQ(observer.events.size(), 2U);
    EXPECT_EQ(observer.events[0].operation, "all_reduce");
    EXPECT_EQ(observer.events[0].bytes, count * sizeof(float));
    EXPECT_LT(observer.events[0].sequence, observer.events[1].sequence);
    EXPECT_FALSE(observer.events[0].failed);
    EXPECT_GE(observer.events[0].waited.count(), 0);
  });
}

TEST_F(InPieces, RanksThatBringOtherThingsAreRefusedAndGoOn) {
  run_world(2, [](Communicator comm) {
    const Floats large = floats(comm, counted(5 * kFloats, 1)), larger = floats(comm, counted(6 * kFloats, 1)),
                 small = floats(comm, {1, 2});
    const bool first = comm.rank() == 0;
    const auto refuse = [&](const Floats& other, const std::string& named) {
      const std::string why =
          refused([&] { comm.all_reduce((first ? large : other).buffer()).wait(); }, ErrorCode::Mismatch);
      EXPECT_TRUE(has(why, "rank 0 brought all_reduce(float32[20480], sum) of a GPU's memory")) << why;
      EXPECT_TRUE(has(why, "rank 1 brought all_reduce(float32[" + named + "], sum) of a GPU's memory")) << why;
    };
    refuse(larger, "24576");
    refuse(small, "2");
    // A group that differs between ranks only in an operation that is not large.
    const Buffer group[] = {large.buffer(), (first ? small : larger).buffer()};
    refused([&] { comm.all_reduce(group).wait(); }, ErrorCode::Mismatch);
    comm.all_reduce(large.buffer()).wait();
    EXPECT_EQ(large.values(), counted(5 * kFloats, 2));
  });
}

TEST_F(InPieces, GroupsMayHaveLargeMembers) {
  run_world(4, [](Communicator comm) {
    std::vector<Floats> all;
    std::vector<Buffer> buffers;
    const std::size_t counts[] = {3, 9 * kFloats, 100, 7, 4 * kFloats + 1, kFloats, kFloats + 1, 0};
    for (const std::size_t count : counts) all.push_back(floats(comm, counted(count, 1)));
    for (const Floats& one : all) buffers.push_back(one.buffer());
    comm.all_reduce(buffers).wait();
    for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i].values(), counted(counts[i], 4)) << i;
  });
}

TEST_F(InPieces, RanksThatHaveJoinedServe) {
  run_world(3, [](Communicator comm) {
    const std::size_t count = 3 * kFloats + 5;
    if (comm.rank() == 0) {  // the root of a broadcast, too
      comm.join();
      return;
    }
    const Floats values = floats(comm, counted(count, static_cast<float>(comm.rank())));
    comm.all_reduce(values.buffer(), {.op = ReduceOp::Average}).wait();
    EXPECT_EQ(values.values(), counted(count, 1.5));
    const Floats more = floats(comm, counted(count, static_cast<float>(comm.rank())));
    comm.broadcast(more.buffer()).wait();
    EXPECT_EQ(more.values(), counted(count, 1));
    const std::string why = refused([&] { comm.reduce(more.buffer(), {.root = 1}).wait(); }, ErrorCode::Mismatch);
    EXPECT_TRUE(has(why, "has joined")) << why;
    comm.join();
  });
}

TEST_F(InPieces, AllOfTheResultIsLookedAt) {
  run_world(2, [](Communicator comm) {
    std::vector<float> bad = counted(4 * kFloats, 1);
    if (comm.rank() == 1) bad[3 * kFloats] = std::numeric_limits<float>::quiet_NaN();
    const Floats fine = floats(comm, counted(4 * kFloats, 1)), not_fine = floats(comm, bad);
    Work works[] = {comm.all_reduce(fine.buffer(), {.check_finite = true}),
                    comm.all_reduce(not_fine.buffer(), {.check_finite = true})};
    for (Work& work : works) work.wait();
    EXPECT_EQ(works[0].finite(), true);
    EXPECT_EQ(works[1].finite(), false);
  });
}

TEST_F(InPieces, NothingIsCopiedThatIsInItsPlace) {
  run_world(2, [](Communicator comm) {
    const std::size_t count = 4 * kFloats;
    const Floats values = floats(comm, counted(count, static_cast<float>(comm.rank() + 1)));
    Floats all = floats(comm, counted(2 * count, static_cast<float>(comm.rank() + 1)));
    const auto copied = [&](const std::function<void()>& body) {
      comm.barrier().wait();
      if (comm.rank() == 0) Copies::all().reset();
      comm.barrier().wait();
      body();
      comm.barrier().wait();
      const std::pair counts(Copies::all().count(kToHost), Copies::all().count(kToDevice));
      comm.barrier().wait();
      return counts;
    };
    // Copies are only from the root's GPU and to the other rank's.
    EXPECT_EQ(copied([&] { comm.broadcast(values.buffer(), {.root = 1}).wait(); }), std::pair(5, 5));
    EXPECT_EQ(values.values(), counted(count, 2));
    // A rank's own part is in place.
    const auto own = static_cast<std::size_t>(comm.rank()) * count;
    const Device device = all.buffer().device;
    const Buffer part(static_cast<float*>(all.data()) + own, static_cast<std::int64_t>(count), DType::Float32, device);
    const auto both = copied([&] { comm.all_gather(part, all.buffer()).wait(); });
    EXPECT_EQ(both.first, both.second);
    const std::vector<float> gathered = all.values();
    for (const std::size_t i : {std::size_t{1}, count - 1}) {
      const std::vector<float> first = counted(2 * count, 1), second = counted(2 * count, 2);
      EXPECT_EQ(gathered[i], first[i]);
      EXPECT_EQ(gathered[count + i], second[count + i]);
    }
    comm.barrier().wait();
  });
}

TEST_F(InPieces, WhatOnlyMovesIsReadWhereItIs) {
  auto* const pinned = of_driver<std::size_t()>("fake_cuda_pinned");
  const ForcedPlan forced("inline=0");  // pieces are small here
  if (Worlds::chosen().backend(2).several_hosts) GTEST_SKIP() << "between hosts it is sent";
  run_world(3, [&](Communicator comm) {
    comm.all_reduce(floats(comm, {1}).buffer()).wait();
    comm.barrier().wait();
    const std::size_t before = pinned();
    comm.barrier().wait();
    const std::size_t count = 30 * kFloats;
    const auto own = static_cast<float>(comm.rank() + 1);
    const Floats part = floats(comm, counted(count, own)), all = floats(comm, std::vector<float>(3 * count));
    // The reader is late, and nobody may overwrite what it has not read.
    if (comm.rank() != 1) {
      for (const std::size_t number : {std::size_t{1}, std::size_t{2}, std::size_t{7}}) {
        Copies::all().when(kToDevice, piece_at(part, count, number), [] { std::this_thread::sleep_for(50ms); });
      }
    }
    comm.barrier().wait();
    comm.broadcast(part.buffer(), {.root = 1}).wait();
    EXPECT_EQ(part.values(), counted(count, 2));
    comm.barrier().wait();
    EXPECT_EQ(pinned() - before, (3 + 2) * 4 * kPieceBytes);  // all have rings, and two have the root's
    comm.barrier().wait();
    const Floats again = floats(comm, counted(count, own));
    comm.all_gather(again.buffer(), all.buffer()).wait();
    comm.barrier().wait();
    EXPECT_EQ(pinned() - before, (3 + 6) * 4 * kPieceBytes);
    comm.barrier().wait();
    std::vector<float> expected;
    for (const float factor : {1.F, 2.F, 3.F}) {
      for (const float value : counted(count, factor)) expected.push_back(value);
    }
    EXPECT_EQ(all.values(), expected);
    // Every piece is copied there and back.
    const Floats exchanged = floats(comm, std::vector<float>(3 * count));
    comm.all_to_all(all.buffer(), exchanged.buffer()).wait();
    comm.all_to_all(exchanged.buffer(), all.buffer()).wait();
    EXPECT_EQ(all.values(), expected);
    comm.scatter(all.buffer(), again.buffer(), {.root = 2}).wait();
    EXPECT_EQ(again.values(), counted(count, own));
    comm.gather(again.buffer(), exchanged.buffer(), {.root = 0}).wait();
    if (comm.rank() == 0) {
      EXPECT_EQ(exchanged.values(), expected);
    }
  });
}

TEST_F(InPieces, WhatCannotBePinnedIsCopied) {
  const ForcedPlan forced("inline=0");
  of_driver<void(bool)>("fake_cuda_pins")(false);
  run_world(2, [&](Communicator comm) {
    const std::size_t count = 9 * kFloats;
    const Floats part = floats(comm, counted(count, static_cast<float>(comm.rank() + 1))),
                 all = floats(comm, std::vector<float>(2 * count));
    comm.all_gather(part.buffer(), all.buffer()).wait();
    std::vector<float> expected = counted(count, 1);
    for (const float value : counted(count, 2)) expected.push_back(value);
    EXPECT_EQ(all.values(), expected);
  });
  of_driver<void(bool)>("fake_cuda_pins")(true);
}

TEST_F(InPieces, AWorldOfOneCopiesOnTheGpu) {
  run_world(1, [](Communicator comm) {
    const Floats in = floats(comm, counted(5 * kFloats, 1)), out = floats(comm, std::vector<float>(5 * kFloats));
    Copies::all().reset();
    void* const stream = new_stream();
    std::atomic<bool> go{false};
    launch(stream, wait_for_flag, &go);
    Work work = comm.all_gather(in.buffer(stream), out.buffer());
    EXPECT_FALSE(work.wait_for(20ms));  // it comes after what its stream has
    go = true;
    work.wait();
    comm.all_reduce(in.buffer()).wait();
    comm.reduce_scatter(in.buffer(), out.buffer()).wait();
    EXPECT_EQ(Copies::all().count(kWithin), 2);
    EXPECT_EQ(Copies::all().count(kToHost) + Copies::all().count(kToDevice), 0);
    EXPECT_EQ(out.values(), counted(5 * kFloats, 1));
    // These operations are more than a copy.
    comm.all_reduce(in.buffer(), out.buffer(), {.prescale = 2}).wait();
    EXPECT_EQ(out.values(), counted(5 * kFloats, 2));
    comm.all_reduce(in.buffer(), out.buffer(), {.op = ReduceOp::Average, .weight = 0}).wait();
    EXPECT_EQ(out.values(), counted(5 * kFloats, 0));
    Work looked_at = comm.all_reduce(in.buffer(), {.check_finite = true});
    looked_at.wait();
    EXPECT_EQ(looked_at.finite(), true);
  });
}

TEST_F(InPieces, AGpuThatFailsInTheMidstEndsTheWorld) {
  run_world(2, [](Communicator comm) {
    const std::size_t count = 8 * kFloats;
    const Floats values = floats(comm, counted(count, 1));
    if (comm.rank() == 0) {
      Copies::all().when(kToDevice, piece_at(values, count, 3), [] { of_driver<void(int)>("fake_cuda_fail")(700); });
    }
    comm.barrier().wait();
    try {
      comm.all_reduce(values.buffer(), {.timeout = 20s}).wait();
      ADD_FAILURE() << "it has not failed";
    } catch (const Error& error) {  // all fake GPUs fail, so any rank may see it first
      EXPECT_TRUE(error.code() == ErrorCode::Internal || error.code() == ErrorCode::Aborted) << error.what();
      EXPECT_TRUE(has(error.what(), "fake failure (error 700)")) << error.what();
    }
  });
}

TEST_F(InPieces, AStreamThatHangsIsATimeoutThatSaysSo) {
  std::atomic<bool> go{false};
  run_world(2, [&](Communicator comm) {
    const Floats values = floats(comm, counted(8 * kFloats, 1));
    if (comm.rank() == 0) {
      void* const stream = new_stream();
      launch(stream, wait_for_flag, &go);
      const std::string why =
          refused([&] { comm.all_reduce(values.buffer(stream), {.timeout = 200ms}).wait(); }, ErrorCode::Timeout);
      EXPECT_TRUE(has(why, "its stream has not come to the operation by the deadline")) << why;
      go = true;
    } else {
      const std::string why =
          refused([&] { comm.all_reduce(values.buffer(), {.timeout = 5s}).wait(); }, ErrorCode::Aborted);
      EXPECT_TRUE(has(why, "its stream has not come to the operation")) << why;
      EXPECT_TRUE(has(why, "of all_reduce(float32[32768]) of a GPU's memory")) << why;
    }
  });
}

}  // namespace

}  // namespace cohort::comm::testing
