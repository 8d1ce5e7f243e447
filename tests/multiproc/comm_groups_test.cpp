// Groups that cannot be formed: where a rank has no means for one, all ranks of the communicator hear it from the split
// itself, and go on; a rank that is lost, or fails, while they meet is named to the others at once.
#include "comm_processes.h"

#include "base/testing/sanitized.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <gtest/gtest.h>

#include <string>

namespace cohort::testing {
namespace {

constexpr int kSize = 3;

TEST(Groups, ARankThatCannotPrepareFailsThemForAll) {
  if (kUndefinedBehaviorSanitizer) GTEST_SKIP() << "UBSan looks at objects through a pipe";
  Processes world(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    world.start_rank(rank, [&world, rank]() -> std::string {
      comm::FormOptions options = world.form_options(rank);
      options.timeout = 20s;
      Communicator comm = Processes::form(options);
      comm.barrier().wait();
      rlimit files{};
      ::getrlimit(RLIMIT_NOFILE, &files);
      const rlimit none{0, files.rlim_max};
      if (rank == 1 && ::setrlimit(RLIMIT_NOFILE, &none) != 0) return "setrlimit";
      std::string said = "no error";
      try {
        static_cast<void>(comm.split({}));
      } catch (const Error& error) {
        said = error.what();
      }
      if (rank == 1 && ::setrlimit(RLIMIT_NOFILE, &files) != 0) return "setrlimit";
      // The communicator is as good as before, and so is a group.
      Communicator group = comm.split({.key = -rank});
      group.barrier().wait();
      comm.barrier().wait();
      return group.rank() == kSize - 1 - rank ? said : "another order";
    });
  }
  for (int rank = 0; rank < kSize; ++rank) {
    const Ending ending = world.collect(rank);
    EXPECT_EQ(ending.said.rfind("no group is formed: rank 1 failed -- ", 0), 0u) << ending.said;
    EXPECT_NE(ending.said.find("Too many open files"), std::string::npos) << ending.said;
  }
}

/// From now on this thread's calls of connect() end the process, or fail with EMFILE.
void forbid_connect(bool kills) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),  // the number of the call
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_connect, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, kills ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ERRNO | EMFILE),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog filter{std::size(program), program};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    std::abort();
}

struct Meeting {
  std::string worlds;
  int size;
  bool killed;
};

class GroupsThatMeet : public ::testing::TestWithParam<Meeting> {};

// All know who is in the group when its last rank connects to those before it.
TEST_P(GroupsThatMeet, ARankThatDoesNotComeIsNamedAtOnce) {
  if (kThreadSanitizer || kUndefinedBehaviorSanitizer) GTEST_SKIP() << "the sanitizer has calls of its own";
  const auto& [worlds, size, killed] = GetParam();
  constexpr int kLast = 2;
  Processes world(size, comm::testing::Worlds(worlds));
  for (int rank = 0; rank < size; ++rank) {
    world.start_rank(rank, [&, rank]() -> std::string {
      Communicator comm(comm::testing::Worlds(worlds).backend(size).create(world.form_options(rank)));
      comm.barrier().wait();
      if (rank == kLast) forbid_connect(killed);
      const Communicator group = comm.split({.color = rank <= kLast ? 0 : 1});
      return "no error";
    });
  }
  for (int rank = 0; rank <= kLast; ++rank) {
    const Ending ending = world.collect(rank);
    if (rank == kLast && killed) continue;
    EXPECT_NE(ending.said.find(killed ? "lost rank 2" : "cannot connect to rank 0"), std::string::npos) << ending.said;
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, GroupsThatMeet,
                         ::testing::Values(Meeting{"local", 3, true}, Meeting{"local", 3, false},
                                           Meeting{"hosts:3,1", 4, true}, Meeting{"hosts:3,1", 4, false}));

}  // namespace
}  // namespace cohort::testing
