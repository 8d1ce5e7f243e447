// A rank that trains (counts steps) until it is preempted; then it "saves" for so many milliseconds, says at
// which step it was, and asks for a requeue. "alone": rank 0 asks only itself, as a program should not. "leave": it
// leaves its world, drops all it has and takes half a second more to end. "helper": each rank has a child, as loaders
// of data are, that SIGTERM ends and that it needs until it has saved. usage:
//   preemption_peer SAVE_MS [alone] [every=N] [leave] [helper]
#include <cohort/error.h>
#include <cohort/init.h>
#include <cohort/preemption.h>

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string_view>
#include <thread>

namespace {

int train(int argc, char** arguments) {
  const std::chrono::milliseconds save_time(std::atoi(arguments[1]));
  bool alone = false;
  pid_t helper = 0;
  cohort::PreemptionOptions options;
  for (int i = 2; i < argc; ++i) {
    const std::string_view word = arguments[i];
    if (word == "alone") alone = true;
    if (word == "helper" && (helper = ::fork()) == 0) {
      while (true) ::pause();
    }
    if (word.starts_with("every=")) options.every = std::atoi(arguments[i] + 6);
  }
  try {
    cohort::Preemption preemption(options);
    cohort::Communicator comm = cohort::init();
    for (int step = 1;; ++step) {
      float loss = 1;
      if (!alone) comm.all_reduce(std::span(&loss, 1)).wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(comm.rank() + 1));
      if (step == 3) {
        std::printf("rank %d trains\n", comm.rank());
        std::fflush(stdout);
      }
      const bool ends = alone ? comm.rank() == 0 && preemption.received() != 0 : preemption.requested(comm);
      if (!ends) continue;
      std::printf("rank %d saves\n", comm.rank());
      std::fflush(stdout);
      std::this_thread::sleep_for(save_time);
      if (helper != 0 && ::waitpid(helper, nullptr, WNOHANG) != 0) {
        std::fprintf(stderr, "the helper has ended\n");
        return 3;
      }
      std::printf("saved at step %d because of %d\n", step, alone ? preemption.received() : preemption.signal());
      return cohort::kRequeueStatus;
    }
  } catch (const cohort::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}

}  // namespace

int main(int argc, char** arguments) {
  const int status = train(argc, arguments);
  for (int i = 2; i < argc; ++i) {
    if (arguments[i] == std::string_view("leave")) {
      std::printf("left\n");
      std::fflush(stdout);
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
    }
  }
  return status;
}
