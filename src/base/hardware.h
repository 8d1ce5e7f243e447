// Finds the cores and memory that this process may really use, within its control group. Only reads.
// Finds the GPUs that a process may use, by their device files, without a driver's library. Only reads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cohort::sys {

/// Number of cores by affinity, limited by the control group's quota (v1 and v2), rounded up; at least 1.
int usable_cores();

/// This process's folders in the control groups of `controller` (empty: version 2), from its own up to their root. Here
/// and below, `root` is the folder with proc and sys.
std::vector<std::string> control_groups(const std::string& controller, const std::string& root = {});

/// CPU quota of the control group, in cores; 0 if there is no limit.
double quota_cores(const std::string& root = {});

/// Name of the processor; empty if the system does not say.
std::string processor_name(const std::string& root = {});

/// The processors that this process may run on, grouped by core; cores of one package are consecutive.
std::vector<std::vector<int>> cores_of_process();

/// Number of processes of this control group that the kernel has killed for lack of memory; nullopt if the kernel does
/// not say.
std::optional<std::uint64_t> out_of_memory_kills();

/// Short name of this host (the node name up to the first dot).
std::string host_name();

/// Number of NVIDIA's GPUs (dev/nvidia0, ...) below `root`, or, if there are none, of AMD's (sys/class/kfd). 0 if
/// unreadable.
int gpus_here(const std::string& root = "/");

}  // namespace cohort::sys
