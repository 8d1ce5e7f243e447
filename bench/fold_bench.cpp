// Times the kernels of reductions on one core: nanoseconds per call, GB/s of what is read and written, and millions of
// elements per second, over types, numbers of inputs and sizes that lie in the caches or in memory.
//   fold_bench [--type float32 ...] [--op sum] [--inputs 2 ...] [--outputs 1] [--bytes B ...] [--non-temporal]
//   [--out-of-place]
// All cases are timed by turns, round after round, and the median round is printed: the machine's speed drifts. The
// first output is the first input, as in an all_reduce in place, unless said otherwise; `copy` is memcpy of as many
// bytes, the machine's own.
#include "comm/kernels/arrays.h"
#include "comm/kernels/fold.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

namespace {

using cohort::DType;
using cohort::ReduceOp;
using cohort::comm::FoldJob;
using cohort::comm::Stores;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kRound(2000);

struct Case {
  bool copies = false;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  std::size_t inputs = 2;
  std::size_t outputs = 1;
  std::size_t bytes = 4;
  Stores stores = Stores::Cached;
  bool in_place = true;
  std::size_t calls = 1;            // per round
  std::vector<double> rounds = {};  // nanoseconds per call
};

/// One arena for all cases, touched: buffers are 4 KiB and a line apart, so that they do not share the caches' sets.
class Arena {
 public:
  explicit Arena(std::size_t bytes) : bytes_(bytes), memory_(static_cast<std::byte*>(::operator new(bytes, kAlign))) {
    std::memset(memory_, 0, bytes_);
  }
  ~Arena() { ::operator delete(memory_, kAlign); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  std::byte* buffer(std::size_t index, std::size_t bytes) const { return memory_ + index * (rounded(bytes) + 4160); }
  static std::size_t needed(std::size_t buffers, std::size_t bytes) { return buffers * (rounded(bytes) + 4160); }

 private:
  static constexpr std::align_val_t kAlign{std::size_t{2} << 20};
  static std::size_t rounded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
  std::size_t bytes_;
  std::byte* memory_;
};

void run(const Case& c, const Arena& arena) {
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (std::size_t k = 0; k < c.inputs; ++k) inputs.push_back(arena.buffer(k, c.bytes));
  for (std::size_t k = 0; k < c.outputs; ++k) {
    outputs.push_back(arena.buffer(k == 0 && c.in_place ? 0 : c.inputs + k, c.bytes));
  }
  const auto count = static_cast<std::int64_t>(c.bytes / cohort::size_of(c.dtype));
  const FoldJob job{c.dtype, c.op, inputs, outputs, count, {}, 0, 1, c.stores};
  for (std::size_t call = 0; call < c.calls; ++call) {
    if (c.copies) {
      cohort::comm::copy(arena.buffer(1, c.bytes), arena.buffer(0, c.bytes), c.bytes, c.stores);
    } else {
      cohort::comm::fold(job);
    }
  }
}

double nanoseconds(const Case& c, const Arena& arena) {
  const auto begin = Clock::now();
  run(c, arena);
  const std::chrono::duration<double, std::nano> time = Clock::now() - begin;
  return time.count() / static_cast<double>(c.calls);
}

/// Enough calls for a round; warms up too.
void calibrate(Case& c, const Arena& arena) {
  const double wanted = std::chrono::duration<double, std::nano>(kRound).count();
  while (nanoseconds(c, arena) * static_cast<double>(c.calls) < wanted / 2) c.calls *= 2;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void print(const Case& c) {
  const double ns = median(c.rounds);
  const double traffic = static_cast<double>(c.bytes) * static_cast<double>(c.copies ? 2 : c.inputs + c.outputs);
  const double elements = static_cast<double>(c.bytes) / static_cast<double>(cohort::size_of(c.dtype));
  std::printf("%-10s %-8s %-6s %3zu %3zu %11zu %13.1f %8.2f %10.0f\n",
              c.copies ? "copy" : std::string(to_string(c.dtype)).c_str(),
              c.copies ? "-" : std::string(to_string(c.op)).c_str(), c.stores == Stores::Cached ? "cached" : "nt",
              c.copies ? 1 : c.inputs, c.outputs, c.bytes, ns, traffic / ns, elements / ns * 1e3);
}

template <class Enum>
Enum named(const std::string& name, int count) {
  for (int i = 0; i < count; ++i) {
    if (to_string(static_cast<Enum>(i)) == name) return static_cast<Enum>(i);
  }
  throw CLI::ValidationError(name, "no such type or reduction");
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> types{"float32", "float64", "bfloat16", "float16", "int32", "int8"};
  std::string op = "sum";
  std::vector<std::size_t> inputs{2, 4};
  std::vector<std::size_t> sizes{16, 256, 16384, std::size_t{256} << 10, std::size_t{64} << 20};
  std::size_t outputs = 1;
  int rounds = 15;
  bool non_temporal = false;
  bool out_of_place = false;
  CLI::App app("times the kernels of reductions on one core");
  app.add_option("--type", types, "types, as torch names them");
  app.add_option("--op", op, "sum, average, min, max, product, bit_and, bit_or, bit_xor");
  app.add_option("--inputs", inputs, "how many inputs")->check(CLI::PositiveNumber);
  app.add_option("--outputs", outputs, "how many outputs")->check(CLI::PositiveNumber);
  app.add_option("--bytes", sizes, "bytes of each input")->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  app.add_flag("--non-temporal", non_temporal, "with streaming stores as well");
  app.add_flag("--out-of-place", out_of_place, "no output is an input");
  CLI11_PARSE(app, argc, argv);

  std::vector<Case> cases;
  std::size_t needed = 0;
  try {
    for (const std::size_t bytes : sizes) {
      for (const Stores stores : {Stores::Cached, Stores::NonTemporal}) {
        if (stores == Stores::NonTemporal && !non_temporal) continue;
        Case copied;
        copied.copies = true;
        copied.dtype = DType::UInt8;
        copied.bytes = bytes;
        copied.stores = stores;
        cases.push_back(copied);
        for (const std::string& type : types) {
          for (const std::size_t count : inputs) {
            Case c;
            c.dtype = named<DType>(type, cohort::kDTypeCount);
            c.op = named<ReduceOp>(op, cohort::kReduceOpCount);
            c.inputs = count;
            c.outputs = outputs;
            c.bytes = bytes;
            c.stores = stores;
            c.in_place = !out_of_place;
            if (!supports(c.dtype, c.op) || bytes < size_of(c.dtype)) continue;
            cases.push_back(c);
            needed = std::max(needed, Arena::needed(count + outputs + 1, bytes));
          }
        }
      }
    }
  } catch (const CLI::Error& error) {
    return app.exit(error);
  }

  const Arena arena(std::max(needed, Arena::needed(2, *std::max_element(sizes.begin(), sizes.end()))));
  for (Case& c : cases) calibrate(c, arena);
  for (int round = 0; round < rounds; ++round) {
    for (Case& c : cases) c.rounds.push_back(nanoseconds(c, arena));
  }
  std::printf("%-10s %-8s %-6s %3s %3s %11s %13s %8s %10s\n", "type", "op", "stores", "in", "out", "bytes", "ns",
              "GB/s", "Melem/s");
  for (const Case& c : cases) print(c);
  return 0;
}
