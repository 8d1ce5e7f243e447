// Thousands of generated disagreements: ranks that call different operations, types, counts, roots, scales, weights,
// lists or groups. Every rank refuses each of them and names both sides; nothing is delivered, and the world goes
// on.
#include "comm/testing/calls.h"
#include "comm/testing/worlds.h"

#include <cohort/error.h>

#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace cohort::comm::testing {
namespace {

using namespace std::chrono_literals;
using Random = std::mt19937_64;

constexpr std::size_t kBufferBytes = std::size_t{4} << 20;
constexpr std::array<Kind, 14> kKinds = {Kind::AllReduce, Kind::Reduce,    Kind::ReduceScatter, Kind::ReduceScatterV,
                                         Kind::Broadcast, Kind::AllGather, Kind::AllGatherV,    Kind::Gather,
                                         Kind::Scatter,   Kind::AllToAll,  Kind::AllToAllV,     Kind::Barrier,
                                         Kind::GatherV,   Kind::ScatterV};

std::int64_t some_count(Random& random) {
  constexpr std::array<std::int64_t, 8> kCounts = {0, 1, 3, 7, 40, 700, 5000, 30000};
  return kCounts[random() % kCounts.size()];
}

bool has_counts(Kind kind) { return has_counts_by_rank(kind) || kind == Kind::AllToAllV; }

/// Makes a random call consistent: picks an operation that the type has, and lists if the kind needs lists.
void settle(Call& call, int size, Random& random) {
  const auto ranks = static_cast<std::size_t>(size);
  while (!supports(call.dtype, call.op)) call.op = static_cast<ReduceOp>(random() % kReduceOpCount);
  const bool scales = is_reduction(call.kind) && is_scalable(call.dtype);
  if (!scales) call.prescale = call.postscale = 1;
  const bool weighs = scales && call.op == ReduceOp::Average;
  if (!weighs) call.weights.clear();
  const std::size_t parts = !has_counts(call.kind) ? 0 : call.kind == Kind::AllToAllV ? ranks * ranks : ranks;
  if (call.counts.size() != parts) {
    call.counts.clear();
    for (std::size_t i = 0; i < parts; ++i) call.counts.push_back(some_count(random) % 1000);
  }
}

Call some_call(int size, Random& random) {
  Call call;
  call.kind = kKinds[random() % kKinds.size()];
  call.dtype = static_cast<DType>(random() % kDTypeCount);
  call.op = static_cast<ReduceOp>(random() % kReduceOpCount);
  call.count = some_count(random);
  call.root = static_cast<int>(random() % static_cast<std::uint64_t>(size));
  if (random() % 3 == 0) call.prescale = 0.5;
  if (random() % 3 == 0) call.postscale = 2;
  if (random() % 2 == 0) call.weights.assign(static_cast<std::size_t>(size), 1.5);
  settle(call, size, random);
  return call;
}

/// Returns the call with one property changed.
Call changed(Call call, int size, Random& random) {
  switch (random() % 8) {
    case 0: call.dtype = static_cast<DType>(random() % kDTypeCount); break;
    case 1: call.op = static_cast<ReduceOp>(random() % kReduceOpCount); break;
    case 2: call.count += 1; break;
    case 3: call.root = (call.root + 1) % size; break;
    case 4: call.prescale *= 1.5; break;
    case 5: call.postscale *= -1; break;
    case 6:
      if (call.weights.empty()) {
        call.weights.assign(static_cast<std::size_t>(size), 1);
      } else {
        call.weights.clear();
      }
      break;
    default: call.kind = kKinds[random() % kKinds.size()];
  }
  if (has_counts(call.kind) && !call.counts.empty() && random() % 2 == 0) {
    std::swap(call.counts.front(), call.counts.back());
    call.counts[random() % call.counts.size()] += 1;
  }
  settle(call, size, random);
  return call;
}

/// The text by which the error has to name the operation.
std::string named(const Call& call, int size) {
  if (call.kind == Kind::Barrier) return "barrier()";
  if (call.kind == Kind::AllToAllV) return fmt::format("all_to_all_v({})", to_string(call.dtype));
  const std::int64_t count = has_counts(call.kind)         ? sum_of(call.counts)
                             : call.kind == Kind::AllToAll ? call.count * size
                                                           : call.count;
  std::string text = fmt::format("{}({}[{}]", name_of(call.kind), to_string(call.dtype), count);
  if (is_reduction(call.kind)) text += fmt::format(", {}", to_string(call.op));
  if (!call.weights.empty()) text += ", weighted";
  if (call.prescale != 1) text += fmt::format(", prescale {}", call.prescale);
  if (call.postscale != 1) text += fmt::format(", postscale {}", call.postscale);
  if (has_root(call.kind)) text += fmt::format(", root {}", call.root);
  return text;
}

/// The properties that ranks have to agree on. The lists of all_to_all_v may differ; they are compared cell by cell.
std::string agreed(const Call& call, int size) {
  return named(call, size) + fmt::format(" {}", fmt::join(call.counts, " "));
}

/// One disagreement: each rank makes one of two calls (or groups of calls).
struct Clash {
  std::array<std::vector<Call>, 2> sides;
  std::vector<int> side_of;
  bool cells = false;  ///< two all_to_all_v whose lists do not fit
};

bool cells_clash(const Clash& clash, int size) {
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      const auto side = [&](int rank) {
        return static_cast<std::size_t>(clash.side_of[static_cast<std::size_t>(rank)]);
      };
      if (sent(clash.sides[side(from)][0], size, from, to) != sent(clash.sides[side(to)][0], size, from, to))
        return true;
    }
  }
  return false;
}

Clash some_clash(int size, Random& random) {
  while (true) {
    Clash clash;
    for (int rank = 0; rank < size; ++rank) clash.side_of.push_back(static_cast<int>(random() % 2));
    const int ones = std::accumulate(clash.side_of.begin(), clash.side_of.end(), 0);
    if (ones == 0 || ones == size) continue;
    const Call first = some_call(size, random);
    const Call second = random() % 4 == 0 ? some_call(size, random) : changed(first, size, random);
    clash.sides = {std::vector<Call>{first}, std::vector<Call>{second}};
    const bool groups = first.kind == Kind::AllReduce || first.kind == Kind::Broadcast ||
                        first.kind == Kind::AllGather || first.kind == Kind::ReduceScatter;
    if (groups && random() % 3 == 0) {
      // Two groups that differ in order, in length or in one count; or a group, and only the first of its calls.
      clash.sides[1] = clash.sides[0];
      Call other = first;
      other.count += 1 + static_cast<std::int64_t>(random() % 3) * 10000;
      clash.sides[0].push_back(other);
      switch (random() % 4) {
        case 0: clash.sides[1].insert(clash.sides[1].begin(), other); break;
        case 1: clash.sides[1].insert(clash.sides[1].end(), {other, other}); break;
        case 2: clash.sides[1].push_back(first); break;
        default: break;
      }
      return clash;
    }
    if (first.kind == Kind::AllToAllV && second.kind == Kind::AllToAllV && first.dtype == second.dtype) {
      clash.cells = true;
      if (cells_clash(clash, size)) return clash;
    } else if (agreed(first, size) != agreed(second, size)) {
      return clash;
    }
  }
}

/// Memory for any call of a rank. No call is ever carried out.
struct Buffers {
  explicit Buffers(Communicator& comm) : arena(comm.allocate(kBufferBytes)), in(kBufferBytes), out(kBufferBytes) {
    std::fill(in.begin(), in.end(), std::byte{1});
    std::fill(out.begin(), out.end(), std::byte{0x5A});
    std::fill(registered(), registered() + kBufferBytes, std::byte{0x5A});
  }
  std::byte* registered() const { return static_cast<std::byte*>(arena.data()); }
  bool untouched() const {
    const auto same = [](std::byte value) { return value == std::byte{0x5A}; };
    return std::all_of(out.begin(), out.end(), same) && std::all_of(registered(), registered() + kBufferBytes, same);
  }
  Memory arena;
  Bytes in;
  Bytes out;
};

Work start_side(Communicator& comm, const std::vector<Call>& calls, Buffers& buffers, bool registered) {
  std::byte* const out = registered ? buffers.registered() : buffers.out.data();
  if (calls.size() == 1) return start(comm, calls[0], buffers.in.data(), out);
  std::vector<ConstBuffer> inputs;
  std::vector<Buffer> outputs;
  for (const Call& call : calls) {
    inputs.emplace_back(buffers.in.data(), elements_in(call, comm.size(), comm.rank()), call.dtype);
    outputs.emplace_back(out, elements_out(call, comm.size(), comm.rank()), call.dtype);
  }
  return start_grouped(comm, calls.front(), inputs, outputs);
}

std::string check_refusal(const std::string& text, const Clash& clash, int size) {
  if (clash.cells) {
    const bool told = text.find(" sends ") != std::string::npos && text.find("which expects") != std::string::npos;
    return told ? "" : "does not tell who sends and who expects how much";
  }
  if (clash.sides[0].size() > 1) return text.find("grouped") != std::string::npos ? "" : "does not tell of groups";
  for (const std::vector<Call>& side : clash.sides) {
    const std::string name = named(side[0], size);
    if (text.find(" brought " + name) == std::string::npos) return "does not name " + name;
  }
  return "";
}

/// Cases are seeded by the size, so all ranks generate the same ones.
void refuse_all(Communicator comm, int cases) {
  const int size = comm.size();
  Random random(static_cast<std::uint64_t>(size));
  Buffers buffers(comm);
  for (int number = 0; number < cases; ++number) {
    const Clash clash = some_clash(size, random);
    const bool registered = random() % 2 == 0;
    const bool together = random() % 4 == 0;  // the next operations are started before the refusal is known
    const std::vector<Call>& own =
        clash.sides[static_cast<std::size_t>(clash.side_of[static_cast<std::size_t>(comm.rank())])];
    std::array<std::int32_t, 3> values = {number, comm.rank(), 1};
    std::string wrong = "was not refused";
    Work good;
    try {
      Work bad = start_side(comm, own, buffers, registered);
      if (together) good = comm.all_reduce(std::span(values));
      bad.wait();
    } catch (const Error& error) {
      wrong = error.code() == ErrorCode::Mismatch ? check_refusal(error.what(), clash, size) : "is no Mismatch";
      if (!wrong.empty()) wrong += std::string(": ") + error.what();
    }
    if (!together) good = comm.all_reduce(std::span(values));
    good.wait();
    const std::array<std::int32_t, 3> right = {number * size, size * (size - 1) / 2, size};
    if (wrong.empty() && values != right) wrong = "what came after it was wrong";
    if (wrong.empty()) continue;
    std::string both;
    for (const auto& side : clash.sides) {
      for (const Call& call : side) both += " " + describe(call);
      both += " |";
    }
    throw std::runtime_error(fmt::format("case {}, rank {} of {}, {} :{}", number, comm.rank(), size, wrong, both));
  }
  EXPECT_TRUE(buffers.untouched()) << "a refused operation delivered something";
}

class Mismatches : public ::testing::TestWithParam<int> {};

TEST_P(Mismatches, AreRefusedOnEveryRankAndTheWorldGoesOn) {
  run_world(GetParam(), [](Communicator comm) { refuse_all(comm, 3340); }, {.timeout = 30s});
}

INSTANTIATE_TEST_SUITE_P(Ranks, Mismatches, ::testing::Values(2, 3, 4));

TEST(GroupMismatches, OfListsAreRefusedOnEveryRank) {
  run_world(3,
            [](Communicator comm) {
              const std::vector<int> first = {0, 1};
              const std::vector<int> second = {1, 0};
              for (int number = 0; number < 200; ++number) {
                const bool odd = comm.rank() == number % 3;
                try {
                  if (number % 2 == 0) {
                    static_cast<void>(comm.group(odd ? first : second));
                  } else if (odd) {
                    static_cast<void>(comm.group(first));
                  } else {
                    static_cast<void>(comm.split({.color = 1}));
                  }
                  ADD_FAILURE() << "formed, case " << number;
                } catch (const Error& error) {
                  EXPECT_EQ(error.code(), ErrorCode::Mismatch) << error.what();
                  EXPECT_NE(std::string(error.what()).find("group(of ranks #"), std::string::npos) << error.what();
                }
                std::int32_t one = 1;
                comm.all_reduce(std::span(&one, 1)).wait();
                EXPECT_EQ(one, 3);
              }
            },
            {.timeout = 30s});
}

}  // namespace
}  // namespace cohort::comm::testing
