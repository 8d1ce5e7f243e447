// The bits of 1,000 random reductions, as digests: the same on every machine, whatever its processor and the kernels
// that are chosen for it. Inputs are integers of a generator that the standard fixes, used half of the time as
// arbitrary bits (NaN, infinities, denormals), else as ordinary numbers.
#include "base/parse.h"
#include "comm/testing/worlds.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm::testing {
namespace {

using Bytes = std::vector<std::byte>;

struct Group {
  const char* world;
  int size;
  std::uint64_t digest;
};
constexpr int kOfAGroup = 125;
constexpr Group kGroups[] = {
    {"local", 1, 0x1bc42717fdcc4923},     {"local", 2, 0x384045149479ea94},   {"local", 3, 0x259a9f93369d5b96},
    {"local", 4, 0xc928abef772baadb},     {"hosts:2", 2, 0x6e199899fa8cdeb4}, {"hosts:2", 4, 0x188a5d537d9c389c},
    {"hosts:2,1", 3, 0xd13c94a4340d7006}, {"hosts:3", 6, 0xbaaf0a899cf4e035},
};

/// A reduction, the same on all ranks.
struct Reduction {
  enum Kind { AllReduce, Reduce, ReduceScatter, ReduceScatterV, kNumber } kind = AllReduce;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  WireFormat wire = WireFormat::None;
  std::int64_t count = 0;
  int root = 0;
  std::vector<double> weights;
  double prescale = 1, postscale = 1;
  bool any_bits = false;
};

class RandomInputs {
 public:
  explicit RandomInputs(std::uint64_t seed) : words_(seed) {}
  std::uint64_t word() { return words_(); }
  std::uint64_t below(std::uint64_t limit) { return words_() % limit; }
  bool chance(std::uint64_t percent) { return below(100) < percent; }

 private:
  std::mt19937_64 words_;  // no distributions, since they differ between standard libraries
};

Reduction any_reduction(RandomInputs& random, int size, bool hosts) {
  Reduction made;
  made.kind = static_cast<Reduction::Kind>(random.below(Reduction::kNumber));
  const bool wired = hosts && made.kind != Reduction::Reduce && random.chance(40);
  do {
    made.dtype = wired ? DType::Float32 : static_cast<DType>(random.below(kDTypeCount));
    made.op = static_cast<ReduceOp>(random.below(wired ? 2 : kReduceOpCount));
  } while (!supports(made.dtype, made.op));
  if (wired) made.wire = static_cast<WireFormat>(random.below(kWireFormatCount));
  made.count = static_cast<std::int64_t>(random.chance(60)   ? random.below(300)
                                         : random.chance(80) ? random.below(5'000)
                                                             : random.below(120'000));
  made.root = static_cast<int>(random.below(static_cast<std::uint64_t>(size)));
  if (made.op == ReduceOp::Average && is_scalable(made.dtype) && random.chance(50)) {
    for (int rank = 0; rank < size; ++rank) made.weights.push_back(static_cast<double>(random.below(9)) / 7);
  }
  if (is_scalable(made.dtype) && random.chance(30)) {
    made.prescale = static_cast<double>(1 + random.below(1'000)) / 300;
    made.postscale = -static_cast<double>(1 + random.below(1'000)) / 700;
  }
  made.any_bits = random.chance(50);
  return made;
}

/// A number with few digits, so that sums are rounded but stay finite.
template <class T>
T number(RandomInputs& random) {
  return static_cast<T>(static_cast<std::int32_t>(random.below(2'000'001)) - 1'000'000) / T{1024};
}

Bytes input_of(const Reduction& reduction, std::int64_t count, std::uint64_t seed) {
  RandomInputs random(seed);
  Bytes bytes(static_cast<std::size_t>(count) * size_of(reduction.dtype));
  const auto fill = [&](auto next) {
    for (std::size_t i = 0; i < bytes.size(); i += sizeof next()) {
      const auto value = next();
      std::memcpy(bytes.data() + i, &value, std::min(sizeof value, bytes.size() - i));
    }
  };
  const bool ordinary = !reduction.any_bits;
  if (ordinary && (reduction.dtype == DType::Float32 || reduction.dtype == DType::Complex64)) {
    fill([&] { return number<float>(random); });
  } else if (ordinary && (reduction.dtype == DType::Float64 || reduction.dtype == DType::Complex128)) {
    fill([&] { return number<double>(random); });
  } else if (ordinary && reduction.dtype == DType::BFloat16) {
    fill([&] {
      const float value = number<float>(random);
      std::uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      return static_cast<std::uint16_t>(bits >> 16);
    });
  } else if (ordinary && reduction.dtype == DType::Float16) {
    fill([&] { return static_cast<std::uint16_t>(random.below(0x6000) | random.below(2) << 15); });
  } else {
    fill([&] { return random.word(); });
  }
  return bytes;
}

std::uint64_t digest_of(const Bytes& bytes) {
  return fnv1a({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

/// The digest of what this rank gets.
std::uint64_t carry_out(Communicator& comm, const Reduction& reduction, std::uint64_t seed) {
  const auto size = static_cast<std::int64_t>(comm.size());
  const auto rank = static_cast<std::uint64_t>(comm.rank());
  std::vector<std::int64_t> counts(static_cast<std::size_t>(size), reduction.count);
  std::int64_t brought = reduction.count;
  if (reduction.kind == Reduction::ReduceScatter) brought *= size;
  if (reduction.kind == Reduction::ReduceScatterV) {
    brought = 0;
    for (std::size_t r = 0; r < counts.size(); ++r)
      brought += counts[r] = reduction.count * static_cast<int>(r + 1) / 2;
  }
  const Bytes input = input_of(reduction, brought, seed * 1'000 + rank);
  const bool scattered = reduction.kind == Reduction::ReduceScatter || reduction.kind == Reduction::ReduceScatterV;
  const std::int64_t got = scattered ? counts[rank] : reduction.count;
  Bytes output(static_cast<std::size_t>(got) * size_of(reduction.dtype));
  const ConstBuffer from{input.data(), brought, reduction.dtype};
  const Buffer to{output.data(), got, reduction.dtype};
  const auto set = [&](auto options) {
    options.op = reduction.op;
    if (!reduction.weights.empty()) options.weight = reduction.weights[rank];
    options.prescale = reduction.prescale;
    options.postscale = reduction.postscale;
    return options;
  };
  const auto wired = [&](auto options) {
    options.wire_format = reduction.wire;
    return set(options);
  };
  switch (reduction.kind) {
    case Reduction::AllReduce: comm.all_reduce(from, to, wired(AllReduceOptions())).wait(); break;
    case Reduction::Reduce: {
      ReduceOptions options = set(ReduceOptions());
      options.root = reduction.root;
      comm.reduce(from, to, options).wait();
      break;
    }
    case Reduction::ReduceScatter: comm.reduce_scatter(from, to, wired(ReduceScatterOptions())).wait(); break;
    default: comm.reduce_scatter_v(from, to, counts, wired(ReduceScatterOptions())).wait();
  }
  return digest_of(output);
}

void PrintTo(const Group& group, std::ostream* to) { *to << group.world << ", " << group.size << " ranks"; }

class Digests : public ::testing::TestWithParam<Group> {};

TEST_P(Digests, OfReductionsAreThoseOfEveryMachine) {
  const Group& group = GetParam();
  const bool hosts = std::string_view(group.world).substr(0, 5) == "hosts";
  std::vector<Reduction> reductions;
  RandomInputs random(fnv1a(group.world) + static_cast<std::uint64_t>(group.size));
  reductions.reserve(kOfAGroup);
  for (int i = 0; i < kOfAGroup; ++i) reductions.push_back(any_reduction(random, group.size, hosts));
  std::vector<std::vector<std::uint64_t>> digests(static_cast<std::size_t>(group.size));
  run_on_threads_of(Worlds(group.world).form(group.size), [&](Communicator comm) {
    auto& own = digests[static_cast<std::size_t>(comm.rank())];
    for (std::size_t i = 0; i < reductions.size(); ++i) own.push_back(carry_out(comm, reductions[i], i));
  });
  std::string all;
  for (std::size_t i = 0; i < reductions.size(); ++i) {
    const Reduction& each = reductions[i];
    all += fmt::format("{} {} {} {} of {}:", static_cast<int>(each.kind), to_string(each.dtype), to_string(each.op),
                       to_string(each.wire), each.count);
    for (const auto& of_rank : digests) all += fmt::format(" {:016x}", of_rank[i]);
    all += "\n";
  }
  if (std::getenv("COHORT_TEST_DIGESTS") != nullptr) fmt::print("{}", all);  // to compare two machines line by line
  EXPECT_EQ(fmt::format("{:#018x}", fnv1a(all)), fmt::format("{:#018x}", group.digest));
}

INSTANTIATE_TEST_SUITE_P(Groups, Digests, ::testing::ValuesIn(kGroups));

}  // namespace
}  // namespace cohort::comm::testing
