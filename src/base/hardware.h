// How many cores this process may really use, and how much memory its control group allows. Pure reading.
// How many GPUs this host lets a process use: their device files, without any driver's library. Pure reading.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cohort::sys {

/// Cores by affinity, cut to the control group's quota (v1 and v2), rounded up; at least 1.
int usable_cores();

/// This process's folders among the control groups of `controller` (empty: version 2), from its own up to the root of
/// them. Here and below `root` has proc and sys.
std::vector<std::string> control_groups(const std::string& controller, const std::string& root = {});

/// CPU quota of the control group, in cores; 0: there is no limit.
double quota_cores(const std::string& root = {});

/// Empty where the system does not say.
std::string processor_name(const std::string& root = {});

/// The processors that this process may run on, those of one core together, neighbours (same package) next to each
/// other.
std::vector<std::vector<int>> cores_of_process();

/// How often the kernel has killed a process of this control group for lack of memory; nullopt where it does not say.
std::optional<std::uint64_t> out_of_memory_kills();

/// Short name of this host: the node name up to the first dot.
std::string host_name();

/// NVIDIA's (dev/nvidia0, ...); where there are none, AMD's (sys/class/kfd) below `root`. 0 where nothing can be read.
int gpus_here(const std::string& root = "/");

}  // namespace cohort::sys
