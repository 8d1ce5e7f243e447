// A rank that does not go on, as its argument says: "deadlock", "circle" (each waits for the next one's message),
// "crossed" (by halves of the ranks, two groups in different orders), "joined" (the last one joins, rank 1 is away),
// "stopped" (rank 1), "away" (rank 1, or the rank that follows), "dies" (rank 1), "lingers" (rank 1 leaves the world
// and takes its time to end), "starts" (each lists the descriptors of a program that it starts), "absent" (rank 1 ends
// before it has formed a world), "absent again" (before it has formed a second one), "prints" (and lives on), "asks"
// (rank 1 dies where the others ask whether to save). With "logging" as the last argument all ranks log meanwhile, and
// are ready to be preempted.
#include <cohort/communicator.h>
#include <cohort/error.h>
#include <cohort/init.h>
#include <cohort/preemption.h>
#include <cohort/track.h>

#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string_view>
#include <thread>

int main(int argc, char** arguments) {
  const std::string_view how = arguments[1];
  const int who = argc > 2 ? std::atoi(arguments[2]) : 1;
  try {
    const bool is_absent = std::string_view(std::getenv("RANK")) == "1";
    if (how == "absent" && is_absent) return 0;
    if (how == "prints") std::printf("printed before\n");
    cohort::Communicator comm = cohort::init();
    if (how == "prints") {
      std::printf("printed after\n");
      std::this_thread::sleep_for(std::chrono::seconds(1000));
    }
    if (how == "absent again" && is_absent) return 0;
    if (how == "absent again") {
      comm = {};
      comm = cohort::init();
    }
    std::array<float, 10> data{};
    comm.all_reduce(std::span(data)).wait();
    std::optional<cohort::track::Metrics> metrics;
    std::optional<cohort::Preemption> preemption;
    if (std::string_view(arguments[argc - 1]) == "logging") {
      // More often than usual, so that each look of the launcher's sees another round.
      metrics.emplace(nullptr, cohort::track::MetricsOptions{
                                   .communicator = comm, .interval = std::chrono::milliseconds(50), .patience = {}});
      metrics->log(1, {{"x", 1.0}}, cohort::track::Reduce::Mean);
      preemption.emplace();
    }
    std::printf("rank %d is in\n", comm.rank());
    std::fflush(stdout);
    if (how == "starts") {
      // 3 is the one with which `ls` reads the folder.
      const int status = std::system("echo child: $(ls /proc/self/fd)");
      return status == 0 ? 0 : 4;
    }
    if (how == "deadlock" && comm.rank() == 0) comm.recv(std::span(data), 1).wait();
    if (how == "circle") comm.recv(std::span(data), (comm.rank() + 1) % comm.size()).wait();
    if (how == "crossed") {
      cohort::Communicator other = comm.split({});
      cohort::Communicator& first = comm.rank() < comm.size() / 2 ? comm : other;
      first.all_reduce(std::span(data)).wait();
      (comm.rank() < comm.size() / 2 ? other : comm).all_reduce(std::span(data)).wait();
    }
    if (how == "joined" && comm.rank() == comm.size() - 1) comm.join({});
    if (how == "stopped" && comm.rank() == 1) ::raise(SIGSTOP);
    if ((how == "away" || how == "joined") && comm.rank() == who)
      std::this_thread::sleep_for(std::chrono::seconds(1000));
    if (how == "lingers" && comm.rank() == 1) {
      comm = {};
      std::this_thread::sleep_for(std::chrono::milliseconds(1800));
      return 5;
    }
    if (how == "dies" && comm.rank() == 1) ::raise(SIGKILL);
    if (how == "asks") {
      std::signal(SIGTERM, SIG_IGN);  // so that the others tell how it ended for them
      cohort::Preemption asked;
      asked.requested(comm);  // so that nobody is in what came before
      if (comm.rank() == 1) ::raise(SIGKILL);
      asked.requested(comm);
    }
    comm.all_reduce(std::span(data)).wait();
    return 0;
  } catch (const cohort::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
