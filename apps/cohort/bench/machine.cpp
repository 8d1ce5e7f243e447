#include "bench/machine.h"

#include "launch/version.h"
#include "sys/hardware.h"

#include <sys/resource.h>
#include <unistd.h>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>

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

double busy_cores(std::chrono::milliseconds time) {
  const CpuTime begin = cpu_time();
  std::this_thread::sleep_for(time);
  const CpuTime end = cpu_time();
  return (end.busy - begin.busy) / std::chrono::duration<double>(end.at - begin.at).count();
}

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

}  // namespace cohort::app::bench
