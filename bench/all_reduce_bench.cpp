// Times all_reduce of this project on one host: ranks are processes, memory is the communicator's or the program's own.
//   all_reduce_bench [--ranks N] [--bytes B] [--iterations I] [--heap]   one JSON line
//   all_reduce_bench --round-trip       nanoseconds of a cache line there and back between two processes
// Every rank rewrites its buffer before each timed call, and a call's time is the slowest rank's. The same line holds
// `bound_us`: the time in which each rank reads and writes that many bytes of its own in place, all ranks at once: no
// all_reduce can move less.
#include <cohort/cohort.h>

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

double microseconds(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

struct Settings {
  int ranks = 2;
  std::size_t bytes = std::size_t{64} << 20;
  int iterations = 20;
  bool heap = false;
};

/// The median over iterations of the slowest rank's time.
double slowest_median(cohort::Communicator& comm, std::vector<double> own) {
  std::vector<double> slowest(own);
  comm.all_reduce(std::span(slowest), {.op = cohort::ReduceOp::Max}).wait();
  return median(slowest);
}

int run_rank(const Settings& settings, const std::string& file, int rank) {
  cohort::Communicator comm = cohort::join({.init_method = "file://" + file,
                                            .rank = rank,
                                            .world_size = settings.ranks,
                                            .timeout = std::chrono::minutes(2)});
  const std::size_t count = settings.bytes / sizeof(float);
  cohort::Memory arena = comm.allocate(settings.bytes);
  std::vector<float> heap(count);
  const std::span<float> data =
      settings.heap ? std::span<float>(heap) : std::span<float>(static_cast<float*>(arena.data()), count);

  std::vector<double> times;
  std::vector<double> bounds;
  for (int i = 0; i < settings.iterations + 3; ++i) {
    std::fill(data.begin(), data.end(), 1.0F);
    comm.barrier().wait();
    const auto begin = Clock::now();
    comm.all_reduce(data).wait();
    const auto end = Clock::now();
    if (data.front() != static_cast<float>(settings.ranks) || data.back() != data.front()) {
      std::fprintf(stderr, "rank %d: wrong result\n", rank);
      return 1;
    }
    if (i >= 3) times.push_back(microseconds(end - begin));  // the first ones map memory
  }
  for (int i = 0; i < settings.iterations + 3; ++i) {
    comm.barrier().wait();
    const auto begin = Clock::now();
    for (float& value : data) value += 1.0F;
    if (i >= 3) bounds.push_back(microseconds(Clock::now() - begin));
  }
  const double time = slowest_median(comm, times);
  const double bound = slowest_median(comm, bounds);
  if (rank == 0) {
    std::printf(
        "{\"library\": \"cohort\", \"ranks\": %d, \"bytes\": %zu, \"memory\": \"%s\", \"us\": %.2f, \"bound_us\": "
        "%.2f}\n",
        settings.ranks, settings.bytes, settings.heap ? "heap" : "allocate", time, bound);
    std::fflush(stdout);
  }
  comm.barrier().wait();
  return 0;
}

int run_ranks(const Settings& settings) {
  std::string folder = (std::filesystem::temp_directory_path() / "cohort-bench-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) return 1;
  std::vector<pid_t> children;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      int status = 1;
      try {
        status = run_rank(settings, folder + "/meet", rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      ::_exit(status);
    }
    children.push_back(pid);
  }
  int worst = 0;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    if (status != 0) worst = 1;
  }
  std::filesystem::remove_all(folder);
  return worst;
}

// A line that two processes write by turns, the way the engine's announcements travel.
int round_trip() {
  struct alignas(64) Line {
    std::atomic<std::uint32_t> word;
  };
  void* const shared = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  Line* const lines = static_cast<Line*>(shared);
  constexpr std::uint32_t kTrips = 20000;
  const pid_t child = ::fork();
  const auto await = [](std::atomic<std::uint32_t>& word, std::uint32_t value) {
    for (int spins = 0; word.load(std::memory_order_acquire) != value; ++spins) {
      if (spins > 100000) ::sched_yield();
    }
  };
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (std::uint32_t i = 1; i <= kTrips; ++i) {
      await(lines[0].word, i);
      lines[1].word.store(i, std::memory_order_release);
    }
    ::_exit(0);
  }
  std::vector<double> trips;
  for (std::uint32_t i = 1; i <= kTrips;) {
    const auto begin = Clock::now();
    for (int batch = 0; batch < 100; ++batch, ++i) {
      lines[0].word.store(i, std::memory_order_release);
      await(lines[1].word, i);
    }
    trips.push_back(microseconds(Clock::now() - begin) * 10);  // ns per trip
  }
  ::waitpid(child, nullptr, 0);
  std::printf("{\"round_trip_ns\": %.0f}\n", median(trips));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("times all_reduce on one host");
  Settings settings;
  bool trip = false;
  app.add_option("--ranks", settings.ranks)->check(CLI::Range(1, 64));
  app.add_option("--bytes", settings.bytes)->check(CLI::Range(std::size_t{4}, std::size_t{1} << 32));
  app.add_option("--iterations", settings.iterations)->check(CLI::Range(1, 1000000));
  app.add_flag("--heap", settings.heap, "memory of the program's own, not the communicator's");
  app.add_flag("--round-trip", trip);
  CLI11_PARSE(app, argc, argv);
  return trip ? round_trip() : run_ranks(settings);
}
