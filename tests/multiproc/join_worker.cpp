// Joins as its arguments (name=value) say and tells on standard output what came of it: "joined ..." and exit status 0,
// or "CODE: message" and exit status 3. With threads=N it is N ranks, each a thread of this process: task P of a
// launcher is ranks P * N to P * N + N - 1, of tasks=T times N. With share=FOLDER rank 0 tells the others by files
// there. With until=FILE it joins for a second time once there is such a file.
#include <cohort/cohort.h>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

/// Through a file for each key.
cohort::ShareFunction through(const std::filesystem::path& folder) {
  return [folder](const std::string& key, const std::optional<std::string>& mine, std::chrono::milliseconds patience) {
    const auto path = folder / key;
    if (mine) {
      std::ofstream(path.string() + ".new") << *mine;
      std::filesystem::rename(path.string() + ".new", path);
      return *mine;
    }
    const auto limit = std::chrono::steady_clock::now() + patience;
    while (!std::filesystem::exists(path)) {
      if (std::chrono::steady_clock::now() > limit) throw std::runtime_error("nobody has told");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    std::string said;
    std::ifstream(path) >> said;
    return said;
  };
}

/// Joins as this process's ranks, and sums what only the right ranks together give. The exit status.
int join_as_threads(const cohort::JoinOptions& shared, int threads, int tasks) {
  const char* const task = std::getenv("SLURM_PROCID");
  if (task == nullptr) return 4;
  std::vector<int> statuses(static_cast<std::size_t>(threads), 3);
  std::vector<std::jthread> ranks;
  for (int thread = 0; thread < threads; ++thread) {
    ranks.emplace_back([&, thread] {
      cohort::JoinOptions options = shared;
      options.rank = std::atoi(task) * threads + thread;
      options.world_size = tasks * threads;
      try {
        cohort::Communicator world = cohort::join(options);
        std::vector<float> values(100003);
        for (std::size_t i = 0; i < values.size(); ++i) {
          values[i] = static_cast<float>(world.rank() + 1) * static_cast<float>(i % 1000);
        }
        world.all_reduce(std::span<float>(values)).wait();
        const float all = static_cast<float>(world.size() * (world.size() + 1) / 2);
        bool right = true;
        for (std::size_t i = 0; i < values.size(); ++i)
          right = right && values[i] == all * static_cast<float>(i % 1000);
        std::printf("thread rank=%d size=%d local=%d/%d cross=%d/%d sum=%s\n", world.rank(), world.size(),
                    world.local_rank(), world.local_size(), world.cross_rank(), world.cross_size(),
                    right ? "right" : "wrong");
        world.barrier().wait();
        statuses[static_cast<std::size_t>(thread)] = right ? 0 : 1;
      } catch (const cohort::Error& error) {
        std::printf("%s: %s\n", std::string(cohort::to_string(error.code())).c_str(), error.what());
      }
    });
  }
  ranks.clear();
  std::fflush(stdout);
  for (const int status : statuses) {
    if (status != 0) return status;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  cohort::JoinOptions options;
  options.join_timeout = std::chrono::seconds(40);
  int times = 1;
  int threads = 0;
  int tasks = 1;
  bool hold = false;
  std::string until;
  bool meet_all = true;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const std::string name = argument.substr(0, argument.find('='));
    const std::string value = argument.substr(argument.find('=') + 1);
    if (name == "init") options.init_method = value;
    if (name == "rank") options.rank = std::atoi(value.c_str());
    if (name == "size") options.world_size = std::atoi(value.c_str());
    if (name == "secret") options.secret_file = value;
    if (name == "share") options.share = through(value);
    if (name == "group") options.group_name = value;
    if (name == "join_timeout_ms") options.join_timeout = std::chrono::milliseconds(std::atoi(value.c_str()));
    if (name == "alone") options.alone = true;
    if (name == "times") times = std::atoi(value.c_str());
    if (name == "threads") threads = std::atoi(value.c_str());
    if (name == "tasks") tasks = std::atoi(value.c_str());
    if (name == "hold") hold = true;
    if (name == "until") until = value;
    if (name == "barrier") meet_all = value == "1";
  }
  if (threads > 0) return join_as_threads(options, threads, tasks);
  try {
    for (int i = 0; i < times; ++i) {
      while (i > 0 && !until.empty() && !std::filesystem::exists(until))
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      cohort::Communicator world = cohort::join(options);
      if (meet_all) world.barrier().wait();
      std::printf("joined rank=%d size=%d local=%d/%d cross=%d/%d timeout_ms=%lld\n", world.rank(), world.size(),
                  world.local_rank(), world.local_size(), world.cross_rank(), world.cross_size(),
                  static_cast<long long>(world.timeout().count()));
      std::fflush(stdout);
      if (hold) ::pause();
    }
    return 0;
  } catch (const cohort::Error& error) {
    std::printf("%s: %s\n", std::string(cohort::to_string(error.code())).c_str(), error.what());
    return 3;
  } catch (const std::runtime_error& error) {
    std::printf("own: %s\n", error.what());
    return 5;
  }
}
