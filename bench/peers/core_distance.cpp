// The distance of two cores: the nanoseconds of a cache line there and back between threads pinned to the
// first two cores that this process may use. One line of JSON for each line on stdin; in between it sleeps.
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

struct alignas(128) Line {
  std::atomic<std::uint32_t> word{0};
};

constexpr std::uint32_t kBatch = 50;
constexpr std::uint32_t kBatches = 40;

std::vector<int> first_two_cores() {
  cpu_set_t cores;
  std::vector<int> found;
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return found;
  for (int core = 0; core < CPU_SETSIZE && found.size() < 2; ++core) {
    if (CPU_ISSET(core, &cores)) found.push_back(core);
  }
  return found;
}

void pin(int core) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  ::pthread_setaffinity_np(::pthread_self(), sizeof one, &one);
}

void await(const Line& line, std::uint32_t value) {
  // A core that is taken away for a while must not be spun for.
  for (int spins = 0; line.word.load(std::memory_order_acquire) != value; ++spins) {
    if (spins > 20000) std::this_thread::yield();
  }
}

/// Median over batches: what interrupts one does not count.
double round_trip(int near, int far) {
  Line there, back;
  std::thread answerer([&] {
    pin(far);
    for (std::uint32_t i = 1; i <= kBatch * kBatches; ++i) {
      await(there, i);
      back.word.store(i, std::memory_order_release);
    }
  });
  pin(near);
  std::vector<double> times;
  for (std::uint32_t i = 1; i <= kBatch * kBatches;) {
    const auto begin = Clock::now();
    for (std::uint32_t end = i + kBatch; i < end; ++i) {
      there.word.store(i, std::memory_order_release);
      await(back, i);
    }
    times.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / kBatch);
  }
  answerer.join();
  std::nth_element(times.begin(), times.begin() + kBatches / 2, times.end());
  return times[kBatches / 2];
}

}  // namespace

int main() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const std::vector<int> cores = first_two_cores();
  char line[64];
  while (std::fgets(line, sizeof line, stdin) != nullptr) {
    const double nanoseconds = cores.size() < 2 ? 0 : round_trip(cores[0], cores[1]);
    std::printf("{\"round_trip_ns\": %.1f}\n", nanoseconds);
    std::fflush(stdout);
  }
  return 0;
}
