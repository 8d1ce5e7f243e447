// The pure parts: requests, matching, table, cache, fusion, neutral elements.
#include "horovod/named/execution.h"
#include "horovod/named/request.h"
#include "horovod/named/rounds.h"
#include "horovod/named/table.h"

#include <cohort/communicator.h>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace cohort::named {
namespace {

Signature signature(Kind kind, std::vector<std::int64_t> shape, DType dtype = DType::Float32) {
  Signature made;
  made.kind = kind;
  made.shape = std::move(shape);
  made.dtype = dtype;
  return made;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// --- requests ---

TEST(NamedRequest, SaysWhatIsCompared) {
  Signature one = signature(Kind::AllReduce, {2, 3});
  one.prescale = 0.5;
  EXPECT_EQ(to_string(one), "all_reduce(float32[2, 3], sum, prescale 0.5)");
  one = signature(Kind::Broadcast, {}, DType::Int64);
  one.root = 3;
  EXPECT_EQ(to_string(one), "broadcast(int64[], from rank 3)");
  EXPECT_EQ(one.count(), 1);
}

TEST(NamedRequest, SurvivesTheWire) {
  Signature one = signature(Kind::AllToAll, {4, 2}, DType::Complex128);
  one.splits = {3, 1};
  one.postscale = -2.25;
  one.op = ReduceOp::BitXor;
  one.device = DeviceType::CUDA;
  const std::string bytes = codec::encode(one);
  EXPECT_EQ(value_or_throw(codec::decode<Signature>(bytes)), one);
  for (std::size_t length = 0; length < bytes.size(); ++length) {  // refused wherever it is cut
    const auto got = codec::decode<Signature>(std::string_view(bytes).substr(0, length));
    ASSERT_FALSE(got) << length;
    EXPECT_EQ(got.error().code(), ErrorCode::Corrupt);
  }
  std::string wrong = bytes;
  wrong[1] = 77;  // no such dtype
  EXPECT_FALSE(codec::decode<Signature>(wrong));
}

TEST(NamedRequest, RefusesWhatHasNoMeaning) {
  std::vector<float> values(6);
  Request good;
  good.name = "x";
  good.shape = {2, 3};
  good.input = good.output = std::span(values);
  ASSERT_TRUE(signature_of(good, 2));
  const auto refused = [&](auto change) {
    Request request = good;
    change(request);
    const auto got = signature_of(request, 2);
    return !got && got.error().code() == ErrorCode::InvalidArgument ? std::string(got.error().what()) : std::string();
  };
  EXPECT_NE(refused([](Request& r) { r.name.clear(); }), "");
  EXPECT_NE(refused([](Request& r) { r.name = std::string(5000, 'x'); }), "");
  EXPECT_TRUE(contains(refused([](Request& r) { r.shape = {7}; }), "float32[6]"));
  EXPECT_NE(refused([](Request& r) { r.shape = {-2, -3}; }), "");
  EXPECT_NE(refused([](Request& r) { r.shape = {1ll << 40, 1ll << 40}; }), "");
  EXPECT_NE(refused([](Request& r) { r.op = ReduceOp::BitAnd; }), "");
  EXPECT_NE(refused([](Request& r) { r.prescale = std::numeric_limits<double>::infinity(); }), "");
  EXPECT_EQ(refused([](Request& r) { r.wire_format = WireFormat::Int8; }), "");
  EXPECT_EQ(refused([](Request& r) { r.wire_format = WireFormat::Int8, r.kind = Kind::ReduceScatter; }), "");
  EXPECT_TRUE(contains(refused([](Request& r) { r.wire_format = WireFormat::Int8, r.op = ReduceOp::Max; }), "as int8"));
  EXPECT_NE(refused([](Request& r) { r.wire_format = WireFormat::Int4, r.kind = Kind::Broadcast; }), "");
  EXPECT_NE(refused([](Request& r) { r.output.dtype = DType::Int32; }), "");
  EXPECT_NE(refused([](Request& r) { r.output.data = nullptr; }), "");
  EXPECT_NE(refused([](Request& r) { r.kind = Kind::Join; }), "");
  EXPECT_NE(refused([](Request& r) { r.kind = Kind::Broadcast, r.root = 2; }), "");
  EXPECT_NE(refused([](Request& r) { r.kind = Kind::AllToAll, r.splits = {1, 2}; }), "");
  EXPECT_NE(refused([](Request& r) { r.kind = Kind::AllToAll, r.splits = {3, -1}; }), "");
  EXPECT_NE(refused([](Request& r) { r.kind = Kind::Group, r.splits = {0, 2}; }), "");
  EXPECT_NE(refused([](Request& r) { r.input.data = static_cast<const char*>(r.input.data) + 1; }), "");
  EXPECT_NE(
      refused([&](Request& r) {
        r.shape = {5}, r.input = {values.data(), 5, DType::Float32}, r.output = {values.data() + 1, 5, DType::Float32};
      }),
      "");
  EXPECT_EQ(refused([](Request& r) { r.kind = Kind::AllToAll, r.splits = {2, 0}; }), "");
  float scalar = 1;
  EXPECT_NE(refused([&](Request& r) {
              r.kind = Kind::AllGather, r.shape = {}, r.input = {&scalar, 1, DType::Float32};
            }),
            "");
}

// --- matching ---

TEST(NamedMatch, SaysWhoBroughtWhat) {
  const Signature a = signature(Kind::AllReduce, {4});
  const Signature b = signature(Kind::AllReduce, {4}, DType::Float64);
  const auto got = match("w", {a, b, a});
  ASSERT_FALSE(got);
  EXPECT_EQ(got.error().code(), ErrorCode::Mismatch);
  const std::string text = got.error().what();
  EXPECT_TRUE(contains(text, "'w'")) << text;
  EXPECT_TRUE(contains(text, "ranks 0 and 2 brought all_reduce(float32[4], sum)")) << text;
  EXPECT_TRUE(contains(text, "rank 1 brought all_reduce(float64[4], sum)")) << text;
}

TEST(NamedMatch, SaysWhoIsOnWhichDevice) {
  Signature gpu = signature(Kind::AllReduce, {4});
  gpu.device = DeviceType::CUDA;
  const auto got = match("w", {gpu, signature(Kind::AllReduce, {4}), gpu});
  ASSERT_FALSE(got);
  EXPECT_EQ(got.error().code(), ErrorCode::Mismatch);
  const std::string text = got.error().what();
  EXPECT_TRUE(contains(text, "ranks 0 and 2 brought all_reduce(float32[4], sum) on a GPU")) << text;
  EXPECT_TRUE(contains(text, "rank 1 brought all_reduce(float32[4], sum) on the CPU")) << text;
}

TEST(NamedMatch, ComparesEverything) {
  Signature base = signature(Kind::AllReduce, {4, 2});
  const auto differs = [&](auto change) {
    Signature other = base;
    change(other);
    return !match("x", {base, other});
  };
  EXPECT_FALSE(differs([](Signature&) {}));
  EXPECT_TRUE(differs([](Signature& s) { s.kind = Kind::ReduceScatter; }));
  EXPECT_TRUE(differs([](Signature& s) { s.op = ReduceOp::Max; }));
  EXPECT_TRUE(differs([](Signature& s) { s.shape = {2, 4}; }));
  EXPECT_TRUE(differs([](Signature& s) { s.shape = {8}; }));
  EXPECT_TRUE(differs([](Signature& s) { s.prescale = 2; }));
  EXPECT_TRUE(differs([](Signature& s) { s.postscale = 2; }));
  EXPECT_TRUE(differs([](Signature& s) { s.needs_all_ranks = true; }));
  base.kind = Kind::Broadcast;
  EXPECT_TRUE(differs([](Signature& s) { s.root = 1; }));
  base.kind = Kind::AllGather;
  EXPECT_FALSE(differs([](Signature& s) { s.shape[0] = 9; }));
  EXPECT_TRUE(differs([](Signature& s) { s.shape[1] = 9; }));
  EXPECT_TRUE(differs([](Signature& s) { s.shape = {4}; }));
}

TEST(NamedMatch, KnowsTheRowsOfAllRanks) {
  const auto gathered =
      match("g", {signature(Kind::AllGather, {3, 5}), std::nullopt, signature(Kind::AllGather, {1, 5})});
  ASSERT_TRUE(gathered);
  EXPECT_EQ((*gathered)->rows, (std::vector<std::int64_t>{3, 0, 1}));
  EXPECT_EQ((*gathered)->row_elements(), 5);
  EXPECT_EQ(scattered_rows(7, 3), (std::vector<std::int64_t>{3, 2, 2}));
  EXPECT_EQ(scattered_rows(1, 3), (std::vector<std::int64_t>{1, 0, 0}));
}

TEST(NamedMatch, RefusesWhatJoinedRanksCannotServe) {
  const auto refused = [](Signature wanted, std::vector<bool> lacking) {
    const Agreed agreed{"x", std::move(wanted)};
    return refused_by_joined(agreed, lacking).has_value();
  };
  const std::vector<bool> second{false, true};
  EXPECT_FALSE(refused(signature(Kind::ReduceScatter, {4}), {false, false}));
  EXPECT_TRUE(refused(signature(Kind::ReduceScatter, {4}), second));
  EXPECT_TRUE(refused(signature(Kind::AllToAll, {4}), second));
  EXPECT_FALSE(refused(signature(Kind::AllReduce, {4}), second));
  EXPECT_FALSE(refused(signature(Kind::AllGather, {4}), second));
  Signature from = signature(Kind::Broadcast, {4});
  EXPECT_FALSE(refused(from, second));
  from.root = 1;
  EXPECT_TRUE(refused(from, second));
  for (const Kind kind : {Kind::AllGather, Kind::Broadcast}) {
    Signature of_all = signature(kind, {4});
    of_all.needs_all_ranks = true;
    EXPECT_TRUE(refused(of_all, second));
    EXPECT_FALSE(refused(of_all, {false, false}));
  }
  Signature product = signature(Kind::AllReduce, {4});
  product.op = ReduceOp::Product;
  EXPECT_FALSE(refused(product, second));
  product.prescale = 2;
  EXPECT_TRUE(refused(product, second));
}

// --- table ---

TEST(NamedTable, GivesOutWhatAllHaveBroughtInOrderOfArrival) {
  Table table(2);
  const std::vector<bool> nobody{false, false};
  table.add(0, "a", signature(Kind::Barrier, {}));
  table.add(0, "b", signature(Kind::Barrier, {}));
  table.add(1, "b", signature(Kind::Barrier, {}));
  EXPECT_TRUE(table.has(0, "a"));
  EXPECT_FALSE(table.has(1, "a"));
  auto complete = table.take_complete(nobody);
  ASSERT_EQ(complete.size(), 1u);
  EXPECT_EQ(complete[0].name, "b");
  table.add(1, "c", signature(Kind::Barrier, {}));
  complete = table.take_complete({false, true});  // rank 1 has no more data
  ASSERT_EQ(complete.size(), 1u);
  EXPECT_EQ(complete[0].name, "a");
  EXPECT_FALSE(complete[0].brought[1]);
  table.add(0, "c", signature(Kind::Barrier, {}));
  table.erase("c");
  EXPECT_EQ(table.size(), 0u);
  EXPECT_TRUE(table.take_complete(nobody).empty());
}

// --- cache ---

AgreedPtr agreed(const std::string& name, std::vector<std::int64_t> shape = {1}) {
  return std::make_shared<const Agreed>(Agreed{name, signature(Kind::AllReduce, std::move(shape))});
}

TEST(NamedCache, FindsOnlyWhatIsTheSame) {
  Cache cache(4);
  cache.insert(agreed("a"), signature(Kind::AllReduce, {1}));
  EXPECT_EQ(cache.find("a", signature(Kind::AllReduce, {1})), 0u);
  EXPECT_FALSE(cache.find("a", signature(Kind::AllReduce, {2})));
  EXPECT_FALSE(cache.find("b", signature(Kind::AllReduce, {1})));
  const auto freed = cache.erase("a");
  ASSERT_TRUE(freed);
  EXPECT_EQ(freed->slot, 0u);
  EXPECT_FALSE(cache.find("a", signature(Kind::AllReduce, {1})));
  EXPECT_FALSE(cache.erase("a"));
  EXPECT_EQ(cache.at(0), nullptr);
}

TEST(NamedCache, ForgetsTheLeastRecentlyUsed) {
  Cache cache(2);
  const Signature own = signature(Kind::AllReduce, {1});
  EXPECT_FALSE(cache.insert(agreed("a"), own));
  EXPECT_FALSE(cache.insert(agreed("b"), own));
  cache.touch(0);
  const auto freed = cache.insert(agreed("c"), own);
  ASSERT_TRUE(freed);
  EXPECT_EQ(freed->name, "b");
  EXPECT_EQ(freed->slot, 1u);
  EXPECT_EQ(cache.find("c", own), 1u);
  EXPECT_EQ(cache.find("a", own), 0u);
  EXPECT_EQ(cache.width(), 2u);
  Cache none(0);
  EXPECT_FALSE(none.insert(agreed("a"), own));
  EXPECT_FALSE(none.find("a", own));
}

// --- fusion ---

TEST(NamedFusion, JoinsWhatIsAlikePastWhatIsNot) {
  auto maximum = std::make_shared<Agreed>(*agreed("m"));
  maximum->common.op = ReduceOp::Max;
  const std::vector<AgreedPtr> ready{agreed("a"), maximum, agreed("b"), agreed("large", {1 << 20}), agreed("c")};
  EXPECT_EQ(plan_fusion(ready, 1 << 20), (std::vector<Batch>{{0, 2, 4}, {1}, {3}}));
}

TEST(NamedFusion, OfGpusJoinsAnySizesAndNotTheHosts) {
  const auto on_gpu = [](const AgreedPtr& one) {
    auto made = std::make_shared<Agreed>(*one);
    made->common.device = DeviceType::CUDA;
    return made;
  };
  const std::vector<AgreedPtr> ready{on_gpu(agreed("a")), agreed("b"), on_gpu(agreed("large", {1 << 20})), agreed("c")};
  EXPECT_EQ(plan_fusion(ready, std::size_t{64} << 20), (std::vector<Batch>{{0, 2}, {1, 3}}));
  EXPECT_EQ(plan_fusion(ready, 1 << 20), (std::vector<Batch>{{0}, {1, 3}, {2}}));
}

TEST(NamedFusion, LeavesWireFormatsAlone) {
  auto narrow = std::make_shared<Agreed>(*agreed("narrow"));
  narrow->common.wire_format = WireFormat::Int8;
  EXPECT_EQ(plan_fusion(std::vector<AgreedPtr>{narrow, agreed("a"), narrow, agreed("b")}, 1 << 20),
            (std::vector<Batch>{{0}, {1, 3}, {2}}));
}

TEST(NamedMatch, RanksAgreeOnWireFormats) {
  Signature narrow = signature(Kind::AllReduce, {4});
  narrow.wire_format = WireFormat::Int4;
  const auto got = match("w", {narrow, signature(Kind::AllReduce, {4})});
  ASSERT_FALSE(got);
  EXPECT_TRUE(contains(got.error().what(), "rank 0 brought all_reduce(float32[4], sum, as int4)"))
      << got.error().what();
  const auto back = codec::decode<Signature>(codec::encode(narrow));
  ASSERT_TRUE(back);
  EXPECT_EQ(*back, narrow);
}

TEST(NamedFusion, KeepsTheThreshold) {
  const std::vector<AgreedPtr> ready(5, agreed("x", {100}));  // 400 bytes each
  EXPECT_EQ(plan_fusion(ready, 800), (std::vector<Batch>{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(plan_fusion(ready, 0).size(), 5u);
  EXPECT_TRUE(plan_fusion({}, 800).empty());
}

// --- rings ---

// A peer reads its announcer only between rounds, and may be in a round that needs this rank before it reads again.
TEST(NamedDoorbell, RingsAPeerThatDoesNotLook) {
  run_on_threads(2, [](Communicator comm) {
    constexpr std::uint64_t kRounds = 400;
    constexpr auto kPatience = std::chrono::seconds(20);
    MessageRoundAnnouncer announcer(comm, std::make_shared<Wakeup>());
    if (comm.rank() == 0) {
      for (std::uint64_t round = 1; round <= kRounds; ++round) announcer.ring(round);
    }
    comm.barrier().wait();
    const auto limit = std::chrono::steady_clock::now() + kPatience;
    while (comm.rank() == 1 && announcer.heard() < kRounds && std::chrono::steady_clock::now() < limit) {
      std::this_thread::yield();
    }
    EXPECT_EQ(announcer.heard(), comm.rank() == 1 ? kRounds : 0);
    announcer.close(kPatience);
  });
}

// --- neutral elements ---

TEST(NamedNeutral, ChangesNoBitOfAnyReduction) {
  run_on_threads(2, [](Communicator comm) {
    for (int type = 0; type < kDTypeCount; ++type) {
      const auto dtype = static_cast<DType>(type);
      for (int number = 0; number < kReduceOpCount; ++number) {
        const auto op = static_cast<ReduceOp>(number);
        if (op == ReduceOp::Average || !supports(dtype, op)) continue;
        if (is_complex(dtype) && op == ReduceOp::Product) continue;  // zeros may change sign
        for (const double prescale : {1.0, -0.5}) {
          if (prescale != 1 && (!is_scalable(dtype) || op == ReduceOp::Product)) continue;
          constexpr std::int64_t kCount = 64;
          const std::size_t bytes = kCount * size_of(dtype);
          std::vector<std::byte> data(bytes);
          for (std::size_t i = 0; i < bytes; ++i) {
            data[i] = dtype == DType::Bool ? std::byte(i % 2) : std::byte(i * 37 % 0x70);  // no NaN of any type
          }
          if (is_scalable(dtype)) std::fill_n(data.begin(), 16, std::byte{0});
          if (is_scalable(dtype)) data[size_of(dtype) - 1] = std::byte{0x80};  // a negative zero
          std::vector<std::byte> brought = data;
          const Buffer buffer(brought.data(), kCount, dtype);
          if (comm.rank() == 1) fill_neutral(buffer, op, prescale);
          AllReduceOptions options;
          options.op = op;
          options.prescale = prescale;
          comm.all_reduce(buffer, options).wait();
          // The same reduction over only this rank's data, in a world of one rank.
          static thread_local std::vector<Communicator> alone = form_thread_world(1);
          std::vector<std::byte> expected = data;
          alone.front().all_reduce(Buffer(expected.data(), kCount, dtype), options).wait();
          ASSERT_EQ(std::memcmp(brought.data(), expected.data(), bytes), 0)
              << to_string(dtype) << " " << to_string(op) << " prescale " << prescale;
        }
      }
    }
  });
}

TEST(NamedIntegers, DividesTowardZero) {
  std::array<std::int32_t, 3> values{7, -7, 1};
  divide(std::span(values), 2);
  EXPECT_EQ(values, (std::array<std::int32_t, 3>{3, -3, 0}));
  std::array<std::uint8_t, 2> small{255, 6};
  divide(std::span(small), 3);
  EXPECT_EQ(small, (std::array<std::uint8_t, 2>{85, 2}));
}

TEST(NamedIntegers, ScalesTowardZeroAndIntoTheRange) {
  std::array<std::int32_t, 4> values{7, -7, 49, 2'000'000'000};
  scale(std::span(values), 0.5);
  EXPECT_EQ(values, (std::array<std::int32_t, 4>{3, -3, 24, 1'000'000'000}));
  scale(std::span(values), -4);
  EXPECT_EQ(values, (std::array<std::int32_t, 4>{-12, 12, -96, std::numeric_limits<std::int32_t>::min()}));
  std::array<std::uint8_t, 3> small{3, 100, 200};
  scale(std::span(small), 1.5, 2);
  EXPECT_EQ(small, (std::array<std::uint8_t, 3>{2, 75, 150}));
  scale(std::span(small), -1);
  EXPECT_EQ(small, (std::array<std::uint8_t, 3>{0, 0, 0}));
  // 49 times the double nearest to 1/49 is less than 1.
  std::array<std::int64_t, 2> wide{49, std::numeric_limits<std::int64_t>::max()};
  scale(std::span(wide), 1, 49);
  EXPECT_EQ(wide, (std::array<std::int64_t, 2>{1, std::numeric_limits<std::int64_t>::max() / 49}));
  wide[1] = std::numeric_limits<std::int64_t>::max();
  scale(std::span(wide), 2);
  EXPECT_EQ(wide, (std::array<std::int64_t, 2>{2, std::numeric_limits<std::int64_t>::max()}));
}

constexpr auto kLong = std::chrono::seconds(20);

/// Returns how long `wakeup` lingers while `disturb` is called again and again.
template <class Disturb>
std::chrono::nanoseconds lingers(Wakeup& wakeup, std::chrono::nanoseconds moment, const Disturb& disturb) {
  std::atomic<bool> over{false};
  std::thread other([&] {
    while (!over) {
      disturb();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  const auto began = std::chrono::steady_clock::now();
  wakeup.linger(moment);
  const auto took = std::chrono::steady_clock::now() - began;
  over = true;
  other.join();
  return took;
}

TEST(NamedWakeup, LingersUntilSomebodyIsInAHurry) {
  Wakeup wakeup;
  constexpr auto kMoment = std::chrono::milliseconds(50);
  EXPECT_GE(lingers(wakeup, kMoment, [&] { wakeup.request(); }), kMoment);
  wakeup.wait_until(std::chrono::steady_clock::now() + kLong);  // the requests are not forgotten
  EXPECT_LT(lingers(wakeup, kLong, [&] { wakeup.notify(); }), kLong);
  wakeup.wait_until(std::chrono::steady_clock::now() + kLong);
  EXPECT_LT(lingers(wakeup, kLong, [&] { wakeup.urge(); }), kLong);
  EXPECT_LT(lingers(wakeup, kLong, [] {}), kLong);  // the urge still counts
}

}  // namespace
}  // namespace cohort::named
