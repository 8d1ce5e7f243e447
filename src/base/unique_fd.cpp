#include "base/unique_fd.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <vector>

namespace cohort::sys {
namespace {

// Never destroyed, since a fork may come while the process ends.
struct Table {
  std::mutex mutex;
  std::vector<int> descriptors;
};

Table& table() {
  static Table& made = *new Table;
  return made;
}

// The table is locked during fork, so that the child finds it consistent.
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

ssize_t send_with_fd(int socket, const void* bytes, std::size_t size, int descriptor, int flags) noexcept {
  iovec part{const_cast<void*>(bytes), size};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (descriptor >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
  }
  return ::sendmsg(socket, &header, flags | MSG_NOSIGNAL);
}

ssize_t receive_with_fd(int socket, void* bytes, std::size_t size, UniqueFd& descriptor, int flags) noexcept {
  iovec part{bytes, size};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  const ssize_t received = ::recvmsg(socket, &header, flags | MSG_CMSG_CLOEXEC);
  if (received < 0) return received;
  // The buffer is for one descriptor; padding may admit a second. The system closes descriptors that do not fit.
  for (cmsghdr* item = CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; at + sizeof(int) <= item->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(item) + at, sizeof number);
      descriptor.reset(number);
    }
  }
  return received;
}

}  // namespace cohort::sys
