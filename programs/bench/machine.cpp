#include "bench/machine.h"

#include "base/hardware.h"
#include "base/result.h"
#include "comm/gpu/driver.h"
#include "comm/gpu/nccl.h"
#include "launch/version.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <sys/resource.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace cohort::app::bench {
namespace {

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const auto colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

}  // namespace

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

/// Cores that are busy now, watched for `time`.
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
  return {{"event", "header"},
          {"time", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now))},
          {"version", launch::kVersion},
          {"compiler", launch::kCompiler},
          {"build", launch::kBuildType},
          {"host", sys::host_name()},
          {"processor", processor()},
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
  // All of the host's ranks alike: where some of them have to share, those that need not would only blur the times.
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

}  // namespace cohort::app::bench
