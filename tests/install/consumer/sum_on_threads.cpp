// Two ranks that are threads: the sum of their numbers, in memory of the communicator's.
#include <cohort/cohort.h>

#include <atomic>
#include <cstdio>
#include <span>

int main() {
  constexpr std::size_t kCount = 1000;
  std::atomic<int> wrong{0};
  cohort::run_on_threads(2, [&](cohort::Communicator comm) {
    const cohort::Memory memory = comm.allocate(kCount * sizeof(float));
    auto* numbers = static_cast<float*>(memory.data());
    for (std::size_t i = 0; i < kCount; ++i) numbers[i] = static_cast<float>(comm.rank() + 1);
    comm.all_reduce(std::span(numbers, kCount)).wait();
    for (std::size_t i = 0; i < kCount; ++i) wrong += numbers[i] != 3.0F;
  });
  std::printf("%d of 2 x %zu sums are wrong\n", wrong.load(), kCount);
  return wrong == 0 ? 0 : 1;
}
