// Joins as its arguments (name=value) say and tells on standard output what came of it: "joined ..." and exit status 0,
// or "CODE: message" and exit status 3.
#include <cohort/cohort.h>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

int main(int argc, char** argv) {
  cohort::JoinOptions options;
  options.join_timeout = std::chrono::seconds(40);
  int times = 1;
  bool hold = false;
  bool meet_all = true;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const std::string name = argument.substr(0, argument.find('='));
    const std::string value = argument.substr(argument.find('=') + 1);
    if (name == "init") options.init_method = value;
    if (name == "rank") options.rank = std::atoi(value.c_str());
    if (name == "size") options.world_size = std::atoi(value.c_str());
    if (name == "secret") options.secret_file = value;
    if (name == "group") options.group_name = value;
    if (name == "join_timeout_ms") options.join_timeout = std::chrono::milliseconds(std::atoi(value.c_str()));
    if (name == "alone") options.alone = true;
    if (name == "times") times = std::atoi(value.c_str());
    if (name == "hold") hold = true;
    if (name == "barrier") meet_all = value == "1";
  }
  try {
    for (int i = 0; i < times; ++i) {
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
  }
}
