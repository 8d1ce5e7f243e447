// A rank under MPI's launcher, which does as its arguments (name=value) say and tells what came of it:
//   begin=LEVEL library=FILE   the program initialises MPI itself, with this thread level, and finalizes it
//   trials=N                   every Nth conformance trial of the world's size
//   groups=1                   operations in groups of ranks, and large messages
//   leave=RANK                 this rank ends at once, the others two seconds later
//   kill=RANK                  this rank dies by SIGKILL amid operations; the others go on until they fail
//   status=N                   exit status of rank 0
#include "comm/testing/trials.h"

#include <cohort/cohort.h>

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace {

using Arguments = std::map<std::string, std::string>;

/// MPI as the program uses it: found at run time, so that one executable does for all MPIs.
class OwnMpi {
 public:
  OwnMpi(const std::string& library, int level) : handle_(::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    if (handle_ == nullptr) throw std::runtime_error(::dlerror());
    const auto begin = reinterpret_cast<int (*)(int*, char***, int, int*)>(::dlsym(handle_, "MPI_Init_thread"));
    int provided = -1;
    if (begin(nullptr, nullptr, level, &provided) != 0) throw std::runtime_error("MPI_Init_thread");
    std::printf("own MPI level=%d\n", provided);
  }
  ~OwnMpi() {
    if (reinterpret_cast<int (*)()>(::dlsym(handle_, "MPI_Finalize"))() == 0) std::printf("own MPI finalized\n");
  }
  OwnMpi(const OwnMpi&) = delete;
  OwnMpi& operator=(const OwnMpi&) = delete;

 private:
  void* handle_;
};

std::optional<int> number(const Arguments& arguments, const std::string& name) {
  const auto found = arguments.find(name);
  return found == arguments.end() ? std::nullopt : std::optional(std::atoi(found->second.c_str()));
}

std::string run_trials(cohort::Communicator& world, int every) {
  using namespace cohort::comm::testing;
  int ran = 0;
  for (const Trial& trial : make_trials()) {
    if (trial.size != world.size() || trial.number % every != 0) continue;
    const std::string verdict = run(world, trial, prepare(trial));
    if (!verdict.empty()) return verdict;
    ++ran;
  }
  return "right " + std::to_string(ran);
}

std::string run_groups(cohort::Communicator& world) {
  const int rank = world.rank();
  cohort::Communicator half = world.split({.color = rank % 2, .key = -rank});
  std::vector<std::int64_t> numbers(300'000);
  std::iota(numbers.begin(), numbers.end(), rank);
  half.all_reduce(std::span(numbers)).wait();
  std::int64_t ranks = 0;
  for (int other = rank % 2; other < world.size(); other += 2) ranks += other;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] != ranks + half.size() * static_cast<std::int64_t>(i)) return "wrong in the group";
  }
  // Round the ring, large enough to be asked for.
  std::vector<std::int64_t> sent(1'000'000, rank);
  std::vector<std::int64_t> received(sent.size(), -1);
  const int before = (rank + world.size() - 1) % world.size();
  auto sending = world.send(std::span<const std::int64_t>(sent), (rank + 1) % world.size());
  world.recv(std::span(received), before).wait();
  sending.wait();
  for (const std::int64_t value : received) {
    if (value != before) return "wrong in the message";
  }
  return "right";
}

int run(const Arguments& arguments) {
  std::optional<OwnMpi> own;
  if (const auto level = number(arguments, "begin")) own.emplace(arguments.at("library"), *level);
  cohort::InitOptions options;
  options.init_timeout = std::chrono::seconds(60);
  options.timeout = std::chrono::seconds(40);
  cohort::Communicator world = cohort::init(options);
  const int rank = world.rank();
  if (const auto every = number(arguments, "trials"))
    std::printf("rank %d: %s\n", rank, run_trials(world, *every).c_str());
  if (arguments.contains("groups")) std::printf("rank %d: %s\n", rank, run_groups(world).c_str());
  if (const auto leaving = number(arguments, "leave")) {
    world.barrier().wait();
    const bool leaves = rank == *leaving;
    world = {};
    if (!leaves) std::this_thread::sleep_for(std::chrono::seconds(2));
  }
  if (const auto victim = number(arguments, "kill")) {
    std::vector<float> values(200'000, 1.0F);
    for (int i = 0;; ++i) {
      if (rank == *victim && i == 20) ::raise(SIGKILL);
      world.all_reduce(std::span(values)).wait();
      std::fill(values.begin(), values.end(), 1.0F);
    }
  }
  std::printf("rank %d: over\n", rank);
  std::fflush(stdout);
  return rank == 0 ? number(arguments, "status").value_or(0) : 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    arguments[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
  }
  try {
    return run(arguments);
  } catch (const cohort::Error& error) {
    std::printf("%s: %s\n", std::string(cohort::to_string(error.code())).c_str(), error.what());
    std::fflush(stdout);
    return 3;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 4;
  }
}
