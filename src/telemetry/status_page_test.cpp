// Tests, between processes, the page by which a rank shows its agent what it does.
#include "telemetry/status_page.h"

#include "base/env.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace cohort::status {
namespace {

/// Runs `body` in a child with this descriptor in its environment (-1: none), and returns the child's exit status.
template <class Body>
int in_child(int fd, Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv(std::string(env::kStatusFd).c_str(), std::to_string(fd).c_str(), 1);
    ::_exit(body());
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(StatusPage, TellsTheAgentWhatARankDidWhenItIsGone) {
  auto segment = create_status_page();
  ASSERT_TRUE(segment) << segment.error().what();
  const auto& layout = *static_cast<const StatusLayout*>(segment->mapping.data());
  const int status = in_child(segment->fd.get(), [] {
    StatusPage& page = StatusPage::own();
    if (page.fd() < 0) return 1;
    GroupStatus& group = page.open(77, 2, 4);
    page.name_kind(3, "reduce");
    group.collectives.begin(5, LaneStatus::pack(3, DType::Float64, ReduceOp::Max), 100);
    group.collectives.end(4);
    for (int step = 0; step < 5; ++step) {
      page.times().busy_ns.fetch_add(100);
      page.count_step();
    }
    page.times().busy_ns.fetch_add(1000);
    page.say_last_words("it fell");
    page.say_last_words("and again");
    ::_exit(::getpid() == page.layout().pid ? 0 : 2);
  });
  EXPECT_EQ(status, 0);
  const GroupStatus& group = layout.groups[0];
  EXPECT_EQ(group.id, 77u);
  EXPECT_EQ(group.rank, 2);
  EXPECT_EQ(group.size, 4);
  EXPECT_EQ(group.collectives.begun, 5u);
  EXPECT_EQ(group.collectives.ended, 4u);
  EXPECT_EQ(group.collectives.count, 100);
  EXPECT_STREQ(layout.kinds[group.collectives.what & 0xFF], "reduce");
  EXPECT_EQ(layout.step, 5);
  EXPECT_EQ(layout.warm.step, StatusLayout::kWarmSteps);
  EXPECT_EQ(layout.warm.busy_ns, 100U * StatusLayout::kWarmSteps);
  EXPECT_EQ(layout.last.step, 5);
  EXPECT_EQ(layout.last.busy_ns, 500U);  // without what came after the last step
  EXPECT_GE(layout.last.at_ns.load(), layout.warm.at_ns.load());
  EXPECT_EQ(layout.times.busy_ns, 1500U);
  EXPECT_EQ(layout.words_ready, 1u);
  EXPECT_EQ(std::string(layout.words, layout.words_length), "it fell");
}

TEST(StatusPage, TellsOfWhichMembersTheWorldIsAndThatItHasTheState) {
  auto segment = create_status_page();
  ASSERT_TRUE(segment) << segment.error().what();
  const auto& layout = *static_cast<const StatusLayout*>(segment->mapping.data());
  EXPECT_EQ(layout.formed_epoch, -1);
  EXPECT_EQ(layout.has_state, 0U);
  const int status = in_child(segment->fd.get(), [] {
    StatusPage& page = StatusPage::own();
    page.begin_init(3);
    page.end_init(true, 0);
    page.begin_init(3);
    page.end_init(false, 1);  // the next epoch's members have not formed their world,
    page.begin_init(2);
    page.end_init(true);  // but some of them form a separate world
    if (page.layout().formed_epoch != 0 || page.layout().worlds != 2) return 1;
    page.begin_init(3);
    page.end_init(true, 2);
    page.note_state();
    ::_exit(page.layout().worlds == 3 ? 0 : 2);
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(layout.formed_epoch, 2);
  EXPECT_EQ(layout.has_state, 1U);
}

TEST(StatusPage, TheFirstFailureOfAWorldStandsUntilTheNextOne) {
  auto segment = create_status_page();
  ASSERT_TRUE(segment);
  const CauseStatus& cause = static_cast<const StatusLayout*>(segment->mapping.data())->cause;
  const auto error = [](ErrorCode code, int peer) {
    ErrorContext context;
    context.peer = peer;
    context.operation = std::string(1000, 'x');
    return Error(code, "it", context);
  };
  const int status = in_child(segment->fd.get(), [&] {
    StatusPage& page = StatusPage::own();
    page.open(7, 0, 2);
    page.note_failure(error(ErrorCode::PeerLost, 1));
    page.note_failure(error(ErrorCode::Aborted, 2));
    if (cause.state != CauseStatus::OfWorld || cause.peer != 1) return 1;
    page.open(8, 0, 2);
    if (cause.state != CauseStatus::None) return 2;
    page.note_failure(error(ErrorCode::Aborted, 2));
    page.note_end(error(ErrorCode::PeerLost, 3));
    return 0;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(cause.state, CauseStatus::OfProcess);
  EXPECT_EQ(cause.peer, 3);
  EXPECT_EQ(std::string(cause.operation), std::string(sizeof cause.operation - 1, 'x'));
}

TEST(StatusPage, BelongsToTheFirstProcessAndNotToItsForks) {
  auto segment = create_status_page();
  ASSERT_TRUE(segment);
  const auto& layout = *static_cast<const StatusLayout*>(segment->mapping.data());
  const int fd = segment->fd.get();
  const auto claim = [] { return StatusPage::own().fd() >= 0 ? 0 : 3; };
  const int status = in_child(fd, [&] {
    if (claim() != 0) return 1;
    const pid_t fork = ::fork();
    if (fork == 0) {
      StatusPage::own().say_last_words("of a fork");
      StatusPage::own().open(9, 0, 2);
      ::_exit(0);
    }
    ::waitpid(fork, nullptr, 0);
    return 0;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(layout.words_ready, 0u);
  EXPECT_EQ(layout.groups[0].id, 0u);
  EXPECT_EQ(in_child(fd, claim), 3);
}

TEST(StatusPage, IsPrivateMemoryWhereThereIsNoAgentOrAnotherFile) {
  const auto use = [] {
    StatusPage& page = StatusPage::own();
    GroupStatus& group = page.open(7, 0, 2);
    group.collectives.begin(1, 0, 1);
    page.close(group);
    return page.fd() == -1 ? 0 : 1;
  };
  EXPECT_EQ(in_child(-1, use), 0);
  EXPECT_EQ(in_child(99, use), 0);
  const int other = ::open("/dev/zero", O_RDWR | O_CLOEXEC);
  EXPECT_EQ(in_child(other, use), 0);
  const int file = ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(in_child(file, use), 0);
  ::close(other);
  ::close(file);
}

TEST(StatusPage, GroupsComeAndGoAndTooManyShareOne) {
  auto segment = create_status_page();
  ASSERT_TRUE(segment);
  const int status = in_child(segment->fd.get(), [] {
    StatusPage& page = StatusPage::own();
    for (int round = 0; round < 200; ++round) page.close(page.open(1, 0, 2));
    GroupStatus* last = nullptr;
    for (std::size_t i = 0; i < StatusLayout::kGroups; ++i) last = &page.open(i + 1, 0, 2);
    GroupStatus& spare = page.open(1000, 0, 2);
    GroupStatus& again = page.open(1001, 0, 2);
    if (&spare != &again || &spare == last) return 1;
    page.close(*last);
    return &page.open(1002, 0, 2) == last ? 0 : 2;
  });
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace cohort::status
