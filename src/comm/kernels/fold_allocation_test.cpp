// No fold allocates: this program's `operator new` counts what a thread allocates.
#include "comm/kernels/fold.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <new>
#include <vector>

namespace {

thread_local std::size_t allocations = 0;

}  // namespace

// Not inlined: where g++ sees only one of `malloc` and `free`, it warns of a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (void* const memory = operator new(bytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace cohort::comm {
namespace {

TEST(Fold, NeverAllocates) {
  constexpr std::int64_t kCount = 700;  // of the largest elements more than a block
  std::vector<std::uint64_t> input(2 * kCount);
  std::vector<std::uint64_t> output(2 * kCount);
  std::vector<const void*> inputs(2000, input.data());
  const std::array<void*, 1> outputs{output.data()};
  const std::size_t before = allocations;
  for (int d = 0; d < kDTypeCount; ++d) {
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average}) {
      if (!supports(static_cast<DType>(d), op)) continue;
      for (const std::size_t ranks : {std::size_t{1}, std::size_t{64}, std::size_t{65}, inputs.size()}) {
        for (const Stores stores : {Stores::Cached, Stores::NonTemporal}) {
          fold({static_cast<DType>(d), op, std::span(inputs).first(ranks), outputs, kCount, {}, 0, 1, stores});
        }
      }
    }
  }
  EXPECT_EQ(allocations, before);
  EXPECT_GT(before, 0U);  // it does count: the vectors
}

}  // namespace
}  // namespace cohort::comm
