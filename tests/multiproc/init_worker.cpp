// Forms a world as its arguments (name=value) say and tells on standard output what came of it: "formed ..." and exit
// status 0, or "CODE: message" and exit status 3. With threads=N its N threads are then ranks of a world over all
// processes. With share=FOLDER rank 0 tells the others by files there. With until=FILE it forms a second world once
// there is such a file. With beat=1 it meets the others again and again until one is lost, says so, and forms another
// world.
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

/// Sums what only the right ranks together give.
void sum_on_threads(const cohort::Communicator& processes, int threads) {
  cohort::run_on_threads(threads,
                         [](cohort::Communicator world) {
                           std::vector<float> values(100003);
                           for (std::size_t i = 0; i < values.size(); ++i) {
                             values[i] = static_cast<float>(world.rank() + 1) * static_cast<float>(i % 1000);
                           }
                           world.all_reduce(std::span<float>(values)).wait();
                           const float all = static_cast<float>(world.size() * (world.size() + 1) / 2);
                           bool right = true;
                           for (std::size_t i = 0; i < values.size(); ++i)
                             right = right && values[i] == all * static_cast<float>(i % 1000);
                           std::printf("thread rank=%d size=%d local=%d/%d cross=%d/%d sum=%s timeout_ms=%lld\n",
                                       world.rank(), world.size(), world.local_rank(), world.local_size(),
                                       world.cross_rank(), world.cross_size(), right ? "right" : "wrong",
                                       static_cast<long long>(world.timeout().count()));
                           world.barrier().wait();
                         },
                         {.across = processes});
}

}  // namespace

int main(int argc, char** argv) {
  cohort::InitOptions options;
  options.init_timeout = std::chrono::seconds(40);
  int times = 1;
  std::optional<int> threads;
  bool hold = false;
  bool beat = false;
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
    if (name == "init_timeout_ms") options.init_timeout = std::chrono::milliseconds(std::atoi(value.c_str()));
    if (name == "alone") options.alone = true;
    if (name == "times") times = std::atoi(value.c_str());
    if (name == "threads") threads = std::atoi(value.c_str());
    if (name == "hold") hold = true;
    if (name == "beat") beat = true;
    if (name == "until") until = value;
    if (name == "barrier") meet_all = value == "1";
  }
  try {
    for (int i = 0; i < times; ++i) {
      while (i > 0 && !until.empty() && !std::filesystem::exists(until))
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      cohort::Communicator world = cohort::init(options);
      if (meet_all) world.barrier().wait();
      std::printf("formed rank=%d size=%d local=%d/%d cross=%d/%d timeout_ms=%lld\n", world.rank(), world.size(),
                  world.local_rank(), world.local_size(), world.cross_rank(), world.cross_size(),
                  static_cast<long long>(world.timeout().count()));
      std::fflush(stdout);
      if (hold) ::pause();
      while (beat) {
        try {
          world.barrier().wait();
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
        } catch (const cohort::Error& error) {
          std::printf("ended by %s\n", std::string(cohort::to_string(error.code())).c_str());
          std::fflush(stdout);
          break;
        }
      }
      if (threads) sum_on_threads(world, *threads);
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
