// Descriptors that a forked child must not keep open: as long as it does, a peer cannot see by the end of the
// connection that the parent has died. (CLOEXEC only helps where the child execs.) Any thread.
#pragma once

namespace cohort::sys {

/// From now on children forked by this process close `fd` at once.
void close_on_fork(int fd);
/// To be called before `fd` is closed.
void forget_on_fork(int fd) noexcept;

}  // namespace cohort::sys
