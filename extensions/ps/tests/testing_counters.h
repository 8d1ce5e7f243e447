// For tests in one process or several: tables whose rows count pushes (a push of -1 adds 1), and a function that breaks
// connections of its own process, as a network would.
#pragma once

#include <cohort/ps.h>

#include <sys/socket.h>
#include <sys/stat.h>

#include <cstdint>
#include <random>
#include <vector>

namespace cohort::ps::testing {

inline TableOptions counters(Consistency consistency, std::int64_t dim = 1) {
  TableOptions options;
  options.dim = dim;
  options.optimizer = optim::Sgd{.lr = 1};
  options.consistency = consistency;
  return options;
}

/// Breaks a random connection of this process. Returns false if it has none.
inline bool break_a_connection(std::mt19937& random) {
  std::vector<int> sockets;
  for (int fd = 3; fd < 256; ++fd) {
    struct stat what {};
    if (::fstat(fd, &what) == 0 && S_ISSOCK(what.st_mode)) sockets.push_back(fd);
  }
  return !sockets.empty() && ::shutdown(sockets[random() % sockets.size()], SHUT_RDWR) == 0;
}

}  // namespace cohort::ps::testing
