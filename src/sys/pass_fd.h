// A descriptor that goes with bytes over a Unix socket to another process. Any thread; owns no globals.
#pragma once

#include "sys/unique_fd.h"

#include <sys/types.h>

#include <cstddef>

namespace cohort::sys {

/// As send(2) without SIGPIPE, and `descriptor` along with the first byte, if it is one (from 0 on).
ssize_t send_with_fd(int socket, const void* bytes, std::size_t size, int descriptor, int flags = 0) noexcept;
/// As recv(2). A descriptor that has come along is put into `descriptor` (CLOEXEC); of several, the last.
ssize_t receive_with_fd(int socket, void* bytes, std::size_t size, UniqueFd& descriptor, int flags = 0) noexcept;

}  // namespace cohort::sys
