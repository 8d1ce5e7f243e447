// Groups that a rank has no means for: all ranks of the communicator hear it from the split itself, and go on.
#include "comm_processes.h"

#include "base/testing/sanitized.h"

#include <sys/resource.h>

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

}  // namespace
}  // namespace cohort::testing
