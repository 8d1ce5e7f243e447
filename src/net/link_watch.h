// How long the host at the other end of a connection has been silent. Free of state; any thread may call.
#pragma once

#include "base/result.h"

#include <chrono>

namespace cohort::net {

/// Has the kernel ask the other end once a second, also while nothing is said, whether it is still there. Only the
/// other kernel's silence counts, so that a process which is stopped or busy is not taken for dead.
void watch_link(int fd);
/// Since the last sign of life from the other end's kernel. Fails with Io.
Result<std::chrono::milliseconds> link_silence(int fd);

}  // namespace cohort::net
