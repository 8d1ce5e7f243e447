#include "sys/close_on_fork.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace cohort::sys {
namespace {

// Never destroyed: a fork may come while the process ends.
struct Table {
  std::mutex mutex;
  std::vector<int> descriptors;
};

Table& table() {
  static Table& made = *new Table;
  return made;
}

// The table is locked over the fork, so that the child finds it whole.
void before() { table().mutex.lock(); }
void in_parent() { table().mutex.unlock(); }
void in_child() {
  for (const int fd : table().descriptors) ::close(fd);
  table().descriptors.clear();
  table().mutex.unlock();
}

}  // namespace

void close_on_fork(int fd) {
  static const int registered = ::pthread_atfork(before, in_parent, in_child);
  static_cast<void>(registered);
  const std::lock_guard lock(table().mutex);
  table().descriptors.push_back(fd);
}

void forget_on_fork(int fd) noexcept {
  const std::lock_guard lock(table().mutex);
  auto& all = table().descriptors;
  all.erase(std::remove(all.begin(), all.end(), fd), all.end());
}

}  // namespace cohort::sys
