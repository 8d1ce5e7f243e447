// A rank that does what training does (reductions whose sums are checked, messages around a ring, saves that appear as
// a whole) and, on request, injects a fault at a chosen point. tools/soak/fault-harness runs it.
//
//   fault_peer FOLDER STEPS [RANK KIND PLACE STEP ARGUMENT]
//
// With COHORT_TEST_DEVICE=cuda what is reduced lies in a GPU's memory, and goes in pieces where it goes by the host's.
//
// It leaves in FOLDER pid.RANK ("pid store steps", written when it has formed its world) and struck.RANK (the monotonic
// clock's nanoseconds when the fault came).
#include "base/files.h"
#include "comm/gpu/chunking.h"
#include "comm/gpu/driver.h"

#include <cohort/cohort.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;

constexpr std::size_t kShard = 200'000;
constexpr int kStepsPerSave = 4;

struct Fault {
  int rank = -1;
  std::string kind;
  std::string place;
  int step = 0;
  std::string argument;
};

struct Place {
  std::string folder;
  int rank = 0;
  int size = 1;
};

// NOLINTNEXTLINE: read at the fault only
volatile int* nowhere = nullptr;

void limit(int resource, rlim_t value) {
  rlimit now{};
  ::getrlimit(static_cast<__rlimit_resource_t>(resource), &now);
  now.rlim_cur = std::min(value, now.rlim_max);
  ::setrlimit(static_cast<__rlimit_resource_t>(resource), &now);
}

rlim_t address_space() {
  std::ifstream file("/proc/self/statm");
  rlim_t pages = 0;
  file >> pages;
  return pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
}

/// Takes memory, and uses it, until there is none.
[[noreturn]] void take_memory() {
  std::vector<std::vector<char>> all;
  for (;;) all.emplace_back(std::size_t{4} << 20, 'x');
}

void save(const Place& place, const std::string& folder, int number, const Fault* fault = nullptr);

/// Writes the time of the fault.
void note(const Place& at) {
  std::ofstream file(fmt::format("{}/struck.{}", at.folder, at.rank));
  file << std::chrono::steady_clock::now().time_since_epoch().count() << std::endl;
}

/// Injects the fault. If it returns, the rank goes on.
void strike(const Fault& fault, const Place& at) {
  note(at);
  const rlimit no_core{0, 0};
  ::setrlimit(RLIMIT_CORE, &no_core);
  const std::string& kind = fault.kind;
  if (kind == "exit") std::exit(std::stoi(fault.argument));
  if (kind == "throw") throw std::runtime_error("injected fault");
  if (kind == "error") throw cohort::Error(cohort::ErrorCode::Io, "injected fault");
  if (kind == "abort") std::abort();
  if (kind == "kill") ::raise(SIGKILL);
  if (kind == "term") ::raise(SIGTERM);
  if (kind == "segv") *nowhere = 1;
  if (kind == "stop") ::raise(SIGSTOP);
  if (kind == "memory") {
    limit(RLIMIT_AS, address_space() + (32u << 20));
    take_memory();
  }
  if (kind == "grab") take_memory();
  if (kind == "filesize") {
    limit(RLIMIT_FSIZE, 4096);
    save(at, at.folder + "/saves", -1);
  }
  if (kind == "disk") {
    for (int number = 0; number < 1000; ++number) save(at, fault.argument, number);
  }
  if (kind == "files") limit(RLIMIT_NOFILE, 3);
  if (kind == "close") ::close_range(3, ~0u, 0);
  if (kind == "mute") ::close_range(0, 2, 0);
}

void strike_if(const Fault& fault, const std::string& place, int step, const Place& at) {
  if (fault.rank == at.rank && fault.place == place && fault.step == step) strike(fault, at);
}

void save(const Place& place, const std::string& folder, int number, const Fault* fault) {
  const std::string bytes(kShard / 2, static_cast<char>('a' + place.rank % 26));
  auto file = cohort::sys::AtomicFile::create(fmt::format("{}/shard-{}-{}", folder, place.rank, number));
  const auto check = [](const auto& result) {
    if (!result) throw result.error();
  };
  check(file);
  check(file->writer().write(bytes));
  if (fault != nullptr) strike(*fault, place);
  check(file->writer().write(bytes));
  check(file->commit());
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

void sum_over_ranks(cohort::Communicator& world, std::vector<float>& values) {
  if (variable("COHORT_TEST_DEVICE") != "cuda") {
    world.all_reduce(std::span(values)).wait();
    return;
  }
  using cohort::comm::cuda::Gpu;
  cohort::comm::cuda::set_piece_bytes(std::size_t{16} << 10);
  Gpu& gpu = Gpu::at(0);
  const auto never = std::chrono::steady_clock::time_point::max();
  const std::size_t bytes = values.size() * sizeof(float);
  const cohort::Device device{cohort::DeviceType::CUDA, 0};
  const cohort::Memory memory = world.allocate(bytes, device);
  gpu.wait(*gpu.copy_to_device(memory.data(), values.data(), bytes, *gpu.mark(nullptr)), never);
  const cohort::Buffer buffer(memory.data(), static_cast<std::int64_t>(values.size()), cohort::DType::Float32, device);
  world.all_reduce(buffer).wait();
  world.broadcast(buffer).wait();
  gpu.wait(*gpu.copy_to_host(values.data(), memory.data(), bytes, *gpu.mark(nullptr)), never);
}

void train_step(cohort::Communicator& world, int step) {
  constexpr int kCounts[] = {1, 700, 40'000};
  std::vector<float> values(static_cast<std::size_t>(kCounts[step % 3]), static_cast<float>(world.rank() + step));
  sum_over_ranks(world, values);
  const int ranks = world.size();
  const int of_ranks = ranks * (ranks - 1) / 2;
  const auto sum = static_cast<float>(of_ranks + ranks * step);
  if (std::any_of(values.begin(), values.end(), [sum](float value) { return value != sum; })) std::_Exit(98);
  if (ranks == 1) return;
  std::vector<std::int32_t> out(100, step), in(100);
  const std::span<std::int32_t> outgoing(out);
  cohort::Work sent = world.send(cohort::Buffer(outgoing), (world.rank() + 1) % ranks);
  world.recv(std::span(in), (world.rank() + ranks - 1) % ranks).wait();
  sent.wait();
  if (in != out) std::_Exit(98);
}

/// Starts a process as a user's rank may leave it behind: outside the rank's session, ignoring SIGTERM and SIGINT, and
/// with nothing in its environment that says whose it is.
void start_grandchild() {
  if (::fork() != 0) return;
  ::setsid();
  ::signal(SIGTERM, SIG_IGN);
  ::signal(SIGINT, SIG_IGN);
  if (::fork() != 0) ::_exit(0);
  ::close_range(0, ~0u, 0);
  char* const arguments[] = {const_cast<char*>("sleep"), const_cast<char*>("1000"), nullptr};
  char* const environment[] = {nullptr};
  ::execve("/bin/sleep", arguments, environment);
  ::_exit(1);
}

/// Until all other ranks have come as far as the meeting.
void wait_for_others(const Place& at) {
  for (int i = 0; i < 3000; ++i, std::this_thread::sleep_for(10ms)) {
    int there = 0;
    for (int rank = 0; rank < at.size; ++rank) {
      there += std::filesystem::exists(fmt::format("{}/began.{}", at.folder, rank)) ? 1 : 0;
    }
    if (there == at.size) break;
  }
  std::this_thread::sleep_for(50ms);
}

int run(const Place& at, int steps, const Fault& fault) {
  std::ofstream(fmt::format("{}/began.{}", at.folder, at.rank)) << std::flush;
  strike_if(fault, "start", 0, at);
  if (fault.rank == at.rank && fault.place == "meeting") {
    wait_for_others(at);
    strike(fault, at);
  }
  {
    cohort::Communicator world = cohort::init();
    if (at.rank % 2 == 1) start_grandchild();
    const std::string formed = fmt::format("{}/pid.{}", at.folder, at.rank);
    std::ofstream(formed + ".new") << ::getpid() << ' ' << variable("COHORT_STORE") << ' ' << variable("COHORT_JOB_ID")
                                   << std::endl;
    std::filesystem::rename(formed + ".new", formed);
    for (int step = 0; step < steps; ++step) {
      strike_if(fault, "step", step, at);
      train_step(world, step);
      if (step % kStepsPerSave != 0) continue;
      const bool here = fault.rank == at.rank && fault.place == "save" && fault.step == step;
      save(at, at.folder + "/saves", step, here ? &fault : nullptr);
      world.barrier().wait();
      std::filesystem::remove(fmt::format("{}/saves/shard-{}-{}", at.folder, at.rank, step - kStepsPerSave));
    }
  }
  if (fault.rank == at.rank && fault.place == "exit") {
    if (fault.kind != "exit") {
      strike(fault, at);
    } else {
      note(at);
      return std::stoi(fault.argument);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 8) return 96;
  Place at{argv[1], std::atoi(variable("RANK").c_str()), std::atoi(variable("WORLD_SIZE").c_str())};
  Fault fault;
  if (argc == 8) fault = {std::atoi(argv[3]), argv[4], argv[5], std::atoi(argv[6]), argv[7]};
  return run(at, std::atoi(argv[2]), fault);
}
