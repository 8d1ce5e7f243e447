#include "sys/pass_fd.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace cohort::sys {

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
  // There is room for one; of more, the system has closed those that did not fit. Padding may let a second one in.
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
