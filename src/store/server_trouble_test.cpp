// A served store whose system refuses it something: here what watches a new connection.
#include "base/sanitized.h"
#include "net/socket.h"
#include "store/client.h"
#include "store/server.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>

namespace {
std::atomic<int> refusals = 0;
}

#if !defined(__SANITIZE_THREAD__)  // which has its own
/// In place of the system's, for this program.
extern "C" int epoll_ctl(int set, int what, int fd, epoll_event* event) noexcept {
  if (what == EPOLL_CTL_ADD && refusals > 0) {
    --refusals;
    errno = ENOSPC;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_epoll_ctl, set, what, fd, event));
}
#endif

namespace cohort::store {
namespace {

TEST(StoreServer, TakesOthersAfterOneThatItCannotWatch) {
  if (kThreadSanitizer) GTEST_SKIP() << "its own epoll_ctl refuses nothing";
  const auto secret = value_or_throw(net::Secret::generate());
  const StoreServer server({.secret = secret});
  const auto limit = net::deadline_in(std::chrono::seconds(20));
  refusals = 1;
  auto refused = net::connect_once(server.endpoint(), limit);
  ASSERT_TRUE(refused.has_value());
  ASSERT_TRUE(value_or_throw(net::wait_ready(refused->get(), POLLIN, limit)));
  char byte = 0;
  EXPECT_LE(::recv(refused->get(), &byte, 1, 0), 0);
  EXPECT_EQ(refusals, 0);
  EXPECT_EQ(connect_store({.endpoint = server.endpoint(), .secret = secret}, limit)->add("n", 1), 1);
}

}  // namespace
}  // namespace cohort::store
