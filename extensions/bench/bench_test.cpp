#include "bench/collective.h"
#include "bench/machine.h"
#include "bench/measure.h"
#include "bench/operation.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace cohort::app::bench {
namespace {

std::string why(const Words& words) {
  const auto plan = plan_of(words);
  return plan ? "" : plan.error().what();
}

TEST(BenchOptions, SizesGrowByTheFactorToTheEnd) {
  Words words;
  words.least = "8";
  words.most = "1K";
  words.factor = "4";
  EXPECT_EQ(plan_of(words)->sizes, (std::vector<std::size_t>{8, 32, 128, 512}));
  words.factor = "1.5";
  words.least = "1";
  words.most = "5";
  EXPECT_EQ(plan_of(words)->sizes, (std::vector<std::size_t>{1, 2, 3, 5}));
  words.sizes = "3,1M";
  EXPECT_EQ(plan_of(words)->sizes, (std::vector<std::size_t>{3, 1 << 20}));
}

TEST(BenchOptions, WhatHasNoMeaningIsNamed) {
  for (const char* bad : {"", "x", "-1", "0", "1T", "4KK", "K", "99999999999999999999", "65G"}) {
    EXPECT_FALSE(parse_size(bad)) << bad;
  }
  EXPECT_EQ(*parse_size("64g"), std::size_t{64} << 30);
  Words words;
  words.collectives = {"all_reduce,al_gather"};
  EXPECT_NE(why(words).find("'al_gather': choose from all_reduce, reduce"), std::string::npos) << why(words);
  words = {};
  words.dtypes = "float";
  EXPECT_NE(why(words).find("-d 'float'"), std::string::npos);
  words = {};
  words.dtypes = "float32";
  words.ops = "bit_and";
  EXPECT_NE(why(words).find("no such reduction"), std::string::npos);
  words = {};
  words.most = "4";
  EXPECT_NE(why(words).find("-e 4 is less than -b 8"), std::string::npos);
  for (const char* factor : {"1", "0", "-2", "nan", "", "2x", "1.0000001"}) {
    words = {};
    words.least = "1M";
    words.factor = factor;
    EXPECT_NE(why(words).find("-f "), std::string::npos) << factor;
  }
  words = {};
  words.state = "warm";
  EXPECT_NE(why(words).find("--state 'warm'"), std::string::npos);
  for (const char* ranks : {"0", "2,", "two", "5000", "2;4"}) EXPECT_FALSE(parse_ranks(ranks)) << ranks;
  EXPECT_EQ(*parse_ranks("2,4,8"), (std::vector<int>{2, 4, 8}));
}

TEST(BenchShape, PartsMakeUpTheWhole) {
  for (const Traits& traits : all_traits()) {
    for (const int ranks : {1, 2, 3, 7}) {
      for (const std::size_t bytes : {0UL, 4UL, 1000UL, 100'003UL}) {
        for (int rank = 0; rank < ranks; ++rank) {
          const Shape shape = shape_of(traits.collective, bytes, DType::Float32, rank, ranks);
          EXPECT_LE(shape.bytes, bytes);
          EXPECT_LE(bytes - shape.bytes, traits.collective == Collective::Barrier ? bytes : 4UL * 7);
          if (shape.input_parts.empty()) continue;
          const std::int64_t all = std::accumulate(shape.input_parts.begin(), shape.input_parts.end(), std::int64_t{0});
          EXPECT_EQ(all * 4, static_cast<std::int64_t>(shape.bytes)) << traits.name;
          EXPECT_EQ(std::max(shape.input, shape.output), all);
        }
      }
    }
  }
}

TEST(BenchShape, WhatOneSendsAnotherExpects) {
  constexpr int kRanks = 5;
  for (int a = 0; a < kRanks; ++a) {
    for (int b = 0; b < kRanks; ++b) {
      const auto sent = shape_of(Collective::AllToAllV, 1000, DType::Float32, a, kRanks).input_parts;
      const auto expected = shape_of(Collective::AllToAllV, 1000, DType::Float32, b, kRanks).output_parts;
      EXPECT_EQ(sent[static_cast<std::size_t>(b)], expected[static_cast<std::size_t>(a)]);
    }
  }
}

// The expected factors are from nccl-tests' doc/PERFORMANCE.md.
TEST(BenchFactors, AreThoseOfNcclTests) {
  EXPECT_DOUBLE_EQ(bus_factor(Collective::AllReduce, 4), 1.5);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::AllGather, 4), 0.75);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::ReduceScatter, 2), 0.5);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::AllToAll, 4), 0.75);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::Broadcast, 4), 1);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::Reduce, 4), 1);
  EXPECT_DOUBLE_EQ(touched_bytes(Collective::AllReduce, 100, 4, true), 200);
  EXPECT_DOUBLE_EQ(touched_bytes(Collective::AllGather, 100, 4, true), 100);
  EXPECT_DOUBLE_EQ(touched_bytes(Collective::AllGather, 100, 4, false), 125);
}

TEST(BenchValues, EveryWrongElementIsCounted) {
  for (int number = 0; number < kDTypeCount; ++number) {
    const auto dtype = static_cast<DType>(number);
    const std::size_t element = size_of(dtype);
    for (const std::int64_t first : {0, 17, 250, 600}) {
      const Tile tile = input_tile(dtype, ReduceOp::Sum, 3);
      std::vector<std::byte> data(1000 * element);
      fill(data.data(), 1000, dtype, tile, first);
      EXPECT_EQ(count_wrong(data.data(), 1000, dtype, tile, first), 0);
      data[0] ^= std::byte{1};
      data[999 * element] ^= std::byte{1};
      EXPECT_EQ(count_wrong(data.data(), 1000, dtype, tile, first), 2);
    }
    // Another rank's values differ, and so do the same values at another position.
    std::vector<std::byte> data(1000 * element);
    fill(data.data(), 1000, dtype, input_tile(dtype, ReduceOp::Sum, 0));
    EXPECT_GT(count_wrong(data.data(), 1000, dtype, input_tile(dtype, ReduceOp::Sum, 1)), 200);
    EXPECT_GT(count_wrong(data.data(), 1000, dtype, input_tile(dtype, ReduceOp::Sum, 0), 1), 200);
  }
}

TEST(BenchValues, ReductionsAreWhatTheySay) {
  const auto at = [](const Tile& tile, std::size_t i) {
    float value = 0;
    std::memcpy(&value, tile.data() + i * sizeof value, sizeof value);
    return value;
  };
  std::vector<Tile> inputs;
  for (int rank = 0; rank < 3; ++rank) inputs.push_back(input_tile(DType::Float32, ReduceOp::Max, rank));
  const Tile sum = reduced_tile(DType::Float32, ReduceOp::Sum, 3);
  const Tile average = reduced_tile(DType::Float32, ReduceOp::Average, 3);
  const Tile max = reduced_tile(DType::Float32, ReduceOp::Max, 3);
  const Tile half = reduced_tile(DType::BFloat16, ReduceOp::Sum, 3);
  for (std::size_t i = 0; i < static_cast<std::size_t>(kPeriod); ++i) {
    const float total = at(inputs[0], i) + at(inputs[1], i) + at(inputs[2], i);
    EXPECT_EQ(at(sum, i), total);
    EXPECT_EQ(at(average, i), total / 3);
    EXPECT_EQ(at(max, i), std::max({at(inputs[0], i), at(inputs[1], i), at(inputs[2], i)}));
    std::uint16_t upper = 0;
    std::memcpy(&upper, half.data() + 2 * i, 2);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &total, 4);
    EXPECT_EQ(upper, bits >> 16);
  }
}

TEST(BenchMemory, EveryWayChangesEachElementOnce) {
  for (const std::size_t streams : kStreams) {
    std::vector<float> data(4096, 1.0F);
    read_and_write(data.data(), data.size() * sizeof(float), streams);
    EXPECT_EQ(data, std::vector<float>(4096, 2.0F)) << streams;
    std::vector<float> few(3, 1.0F);
    read_and_write(few.data(), few.size() * sizeof(float), streams);
    for (const float value : few) EXPECT_TRUE(value == 1.0F || value == 2.0F);
  }
}

TEST(BenchRow, PercentilesAreThoseOfTheNearestRank) {
  std::vector<double> values(1000);
  std::iota(values.begin(), values.end(), 1.0);
  EXPECT_EQ(percentile(values, 0.5), 500);
  EXPECT_EQ(percentile(values, 0.99), 990);
  EXPECT_EQ(percentile(values, 0.999), 999);
  EXPECT_EQ(percentile({7}, 0.999), 7);
  EXPECT_EQ(percentile({7, 8}, 0.5), 7);
}

Row some_row(std::size_t bytes, double time) {
  Row row;
  row.collective = "all_reduce";
  row.ranks = 2;
  row.memory = "arena";
  row.state = "hot";
  row.bytes = bytes;
  row.type = "float32";
  row.op = "sum";
  row.in_place = Side{};
  row.in_place->time = time;
  row.in_place->busbw = static_cast<double>(bytes) / time;
  row.in_place->wrong = 3;
  return row;
}

TEST(BenchRow, SurvivesItsJourney) {
  const Row row = some_row(4096, 2.5);
  const Row back = row_from(nlohmann::json::parse(to_json(row).dump()));
  EXPECT_EQ(back.bytes, 4096U);
  EXPECT_FALSE(back.out_of_place);
  ASSERT_TRUE(back.in_place);
  EXPECT_EQ(back.in_place->time, 2.5);
  EXPECT_EQ(back.in_place->wrong, 3);
  EXPECT_EQ(to_json(back), to_json(row));
}

TEST(BenchPicture, HasACurveForEachWorld) {
  std::vector<Row> rows;
  for (const std::size_t bytes : {64UL, 65536UL, 1UL << 24}) {
    rows.push_back(some_row(bytes, static_cast<double>(bytes) / 1000));
    rows.push_back(some_row(bytes, static_cast<double>(bytes) / 500));
    rows.back().ranks = 4;
  }
  const nlohmann::json machine = {{"host", "h<1>"}, {"processor", "p"}, {"cores", 2}, {"time", "t"}};
  const std::string svg = draw(rows, machine);
  EXPECT_TRUE(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
  for (const char* text :
       {"2 ranks, arena memory", "4 ranks, arena memory", ">64<", ">64K<", ">16M<", "h&lt;1&gt;", "bus bandwidth"}) {
    EXPECT_NE(svg.find(text), std::string::npos) << text;
  }
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_TRUE(draw({}, machine).ends_with("</svg>\n"));
}

// All ranks get the same figures, and these are at least those of a very old machine.
TEST(BenchBound, IsMeasuredByAllRanksTogether) {
  std::vector<double> rates(3), trips(3);
  cohort::run_on_threads(3, [&](Communicator comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    std::vector<std::byte> data(1 << 20);
    MemoryRoof roof;
    rates[rank] = roof.rate(comm, data.data(), data.size(), MemoryKind::Heap, State::Hot);
    EXPECT_EQ(roof.rate(comm, data.data(), data.size(), MemoryKind::Heap, State::Touched), rates[rank]);
    EXPECT_GT(roof.rate(comm, data.data(), data.size(), MemoryKind::Heap, State::Cold), 1e6);
    EXPECT_EQ(roof.rate(comm, data.data(), 100, MemoryKind::Heap, State::Hot), 0);
    const auto found = flag_round_trips(comm);
    ASSERT_EQ(found.size(), 2U);
    trips[rank] = found[1];
  });
  EXPECT_EQ(rates[0], rates[1]);
  EXPECT_EQ(rates[0], rates[2]);
  EXPECT_GT(rates[0], 1e7);
  EXPECT_GT(trips[0], 1);
  EXPECT_EQ(trips[0], trips[2]);
}

}  // namespace
}  // namespace cohort::app::bench
