// A fault at the Nth call by which this process changes the disk: the program that links disk_fault.cpp has its own
// open, write, fsync, rename, mkdir and unlink, which count, strike, and ask the kernel for the rest. Calls count from
// all threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace cohort::testing {

enum class DiskFault : std::uint8_t {
  None,
  Kill,     ///< SIGKILL before the call, in the middle of a write
  KillJob,  ///< to the whole process group
  NoSpace,  ///< ENOSPC, from then on until `mend`
  Broken,   ///< EIO, once
};

/// "none", "kill", "kill-job", "enospc", "eio"; throws std::invalid_argument.
DiskFault disk_fault_of(const std::string& name);

/// The `at`th call from now on, counted from 1.
void arm_disk_fault(DiskFault fault, std::int64_t at);
/// Calls since then.
std::int64_t disk_calls();
/// True if the fault has come.
bool disk_fault_struck();
void mend_disk();

}  // namespace cohort::testing
