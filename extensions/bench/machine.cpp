#include "bench/machine.h"

#include "base/hardware.h"
#include "base/memory.h"
#include "base/result.h"
#include "bench/operation.h"
#include "comm/gpu/driver.h"
#include "comm/gpu/nccl.h"
#include "launch/version.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace cohort::app::bench {
CpuTime cpu_time() {
  std::ifstream file("/proc/stat");
  std::string cpu;
  double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, irq = 0, soft_irq = 0, stolen = 0;
  file >> cpu >> user >> nice >> system >> idle >> waiting >> irq >> soft_irq >> stolen;
  const double ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
  return {(user + nice + system + irq + soft_irq) / ticks, stolen / ticks, std::chrono::steady_clock::now()};
}

double own_cpu_seconds() {
  double seconds = 0;
  for (const auto who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage{};
    ::getrusage(who, &usage);
    for (const timeval& time : {usage.ru_utime, usage.ru_stime}) {
      seconds += static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    }
  }
  return seconds;
}

namespace {

/// Number of busy cores, measured for `time`.
double busy_cores(std::chrono::milliseconds time) {
  const CpuTime begin = cpu_time();
  std::this_thread::sleep_for(time);
  const CpuTime end = cpu_time();
  return (end.busy - begin.busy) / std::chrono::duration<double>(end.at - begin.at).count();
}

}  // namespace

nlohmann::json describe_machine() {
  std::array<double, 3> load{};
  if (::getloadavg(load.data(), 3) < 1) load[0] = -1;
  const std::time_t now = std::time(nullptr);
  const std::string processor = sys::processor_name();
  return {{"event", "header"},
          {"time", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now))},
          {"version", launch::kVersion},
          {"compiler", launch::kCompiler},
          {"build", launch::kBuildType},
          {"host", sys::host_name()},
          {"processor", processor.empty() ? "unknown processor" : processor},
          {"cores", sys::usable_cores()},
          {"load", load[0]},
          {"busy_cores_before", busy_cores(std::chrono::milliseconds(200))}};
}

namespace {

int number_of_gpus() {
  const auto count = comm::cuda::Gpu::count();
  if (!count) raise(ErrorCode::Unavailable, "--device cuda: {}", count.error().what());
  if (*count == 0) {
    raise(ErrorCode::Unavailable,
          "--device cuda: there is a CUDA driver, but this process sees no GPU -- CUDA_VISIBLE_DEVICES says which it "
          "sees; `nvidia-smi -L` lists those of the machine");
  }
  return *count;
}

}  // namespace

void check_gpus() { number_of_gpus(); }

RankGpu gpu_of(const Communicator& comm) {
  RankGpu own;
  // If some of the host's ranks have to share a GPU, all share one, since mixed times would mean little.
  own.index = comm.local_size() <= number_of_gpus() ? comm.local_rank() : 0;
  own.uuid = comm::cuda::Gpu::at(own.index).uuid();
  own.software = value_or_throw(comm::cuda::Gpu::look());
  const auto& nccl = comm::cuda::Nccl::find();
  own.software += nccl ? fmt::format("; NCCL {} ({})", comm::cuda::Nccl::text_of(nccl->version), nccl->path)
                       : fmt::format("; no NCCL: {}", nccl.error().what());
  return own;
}

int different_gpus(Communicator& comm, const RankGpu& own) {
  std::vector<decltype(own.uuid)> all(static_cast<std::size_t>(comm.size()));
  const auto bytes = static_cast<std::int64_t>(own.uuid.size());
  comm.all_gather(ConstBuffer(own.uuid.data(), bytes, DType::UInt8),
                  Buffer(all.data(), bytes * comm.size(), DType::UInt8))
      .wait();
  const std::set<decltype(own.uuid)> found(all.begin(), all.end());
  return static_cast<int>(found.size());
}

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double over_ranks(Communicator& comm, double value, ReduceOp op) {
  std::array<double, 1> one = {value};
  comm.all_reduce(std::span<double>(one), {.op = op}).wait();
  return one[0];
}

}  // namespace

double MemoryRoof::rate(Communicator& comm, std::byte* data, std::size_t bytes, MemoryKind kind, State state) {
  constexpr std::size_t kLeast = 4096;
  constexpr double kSeconds = 2e-3;
  if (bytes < kLeast) return 0;
  if (state == State::Touched) state = State::Hot;
  const auto key = std::make_tuple(bytes, kind, state);
  if (const auto found = known_.find(key); found != known_.end()) return found->second;

  double best = 0;
  for (const std::size_t streams : kStreams) {
    int passes = 1;
    for (int trial = 0; trial < 4; ++trial) {
      if (state == State::Cold) drop_from_caches(data, bytes);
      comm.barrier().wait();
      const auto begin = Clock::now();
      for (int pass = 0; pass < passes; ++pass) read_and_write(data, bytes, streams);
      // Measures until the last rank ends, since more ranks than cores run one after the other.
      comm.barrier().wait();
      const double seconds = over_ranks(comm, seconds_since(begin), ReduceOp::Max);
      best = std::max(best, 2.0 * static_cast<double>(bytes) * passes / seconds);
      // Small buffers are traversed many times, so that the barrier's time is negligible.
      if (trial == 0 && state == State::Hot) passes = std::max(1, static_cast<int>(kSeconds / seconds));
    }
  }
  return known_[key] = best;
}

namespace {

struct alignas(128) Line {
  std::atomic<std::uint32_t> word;
};
struct Page {
  Line there, back, turn;
};

constexpr std::uint32_t kBatch = 50;
constexpr std::uint32_t kBatches = 40;
constexpr int kMostPeers = 8;
constexpr std::chrono::seconds kPatience(30);

/// The ranks' common page; nullopt if a rank cannot map it. Rank 0 sends its address in rank 0's process.
std::optional<sys::Mapping> common_page(Communicator& comm) {
  std::optional<sys::SharedSegment> own;
  std::array<std::int64_t, 2> place = {-1, -1};
  if (comm.rank() == 0) {
    if (auto segment = sys::create_shared_segment("cohort-bench", sizeof(Page))) {
      own = *std::move(segment);
      place = {::getpid(), own->fd.get()};
    }
  }
  comm.broadcast(std::span<std::int64_t>(place)).wait();
  std::optional<sys::Mapping> page;
  if (place[0] >= 0 && comm.local_size() == comm.size()) {
    const std::string path = fmt::format("/proc/{}/fd/{}", place[0], place[1]);
    const sys::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (fd) {
      if (auto mapped = sys::map_shared_segment(fd.get(), sizeof(Page))) page = *std::move(mapped);
    }
  }
  if (over_ranks(comm, page ? 1 : 0, ReduceOp::Min) < 1) page.reset();
  return page;
}

void await(const Line& line, std::uint32_t value) {
  std::optional<Clock::time_point> since;
  for (std::uint32_t spins = 1; line.word.load(std::memory_order_acquire) != value; ++spins) {
    if (spins < 20000) continue;
    ::sched_yield();
    if (!since) since = Clock::now();
    if (Clock::now() - *since > kPatience) {
      raise(ErrorCode::Timeout, "bench: another rank did not answer a flag for {} s", kPatience.count());
    }
  }
}

/// Time of a round trip in the fastest batch, since interruptions of other batches are no part of the distance.
double shortest_trip(Page& page) {
  double shortest = 1e12;
  for (std::uint32_t i = 1; i <= kBatch * kBatches;) {
    const auto begin = Clock::now();
    for (const std::uint32_t end = i + kBatch; i < end; ++i) {
      page.there.word.store(i, std::memory_order_release);
      await(page.back, i);
    }
    shortest = std::min(shortest, seconds_since(begin) * 1e9 / kBatch);
  }
  return shortest;
}

void answer_trips(Page& page) {
  for (std::uint32_t i = 1; i <= kBatch * kBatches; ++i) {
    await(page.there, i);
    page.back.word.store(i, std::memory_order_release);
  }
}

}  // namespace

std::vector<double> flag_round_trips(Communicator& comm) {
  std::vector<double> trips;
  const auto mapping = common_page(comm);
  if (!mapping) return trips;
  Page& page = *static_cast<Page*>(mapping->data());
  for (int peer = 1; peer < std::min(comm.size(), kMostPeers + 1); ++peer) {
    double trip = 0;
    if (comm.rank() == 0) {
      page.there.word.store(0);
      page.back.word.store(0);
      page.turn.word.store(static_cast<std::uint32_t>(peer), std::memory_order_release);
      trip = shortest_trip(page);
    } else {
      // Ranks that do not measure leave the cores to the two that do.
      const auto deadline = Clock::now() + kPatience;
      while (page.turn.word.load(std::memory_order_acquire) < static_cast<std::uint32_t>(peer)) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        if (Clock::now() > deadline) raise(ErrorCode::Timeout, "bench: rank 0 did not begin with its flags");
      }
      if (comm.rank() == peer) answer_trips(page);
    }
    trips.push_back(over_ranks(comm, trip, ReduceOp::Max));
  }
  return trips;
}

}  // namespace cohort::app::bench
