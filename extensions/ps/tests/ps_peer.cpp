// A server or a worker of a parameter server, as a process that ps_test kills.
//   ps_peer server ENDPOINT JOURNAL
//   ps_peer replicated ENDPOINT NUMBER SERVERS [JOURNAL]
//   ps_peer worker NUMBER WORKERS MODE CLOCKS RESETS ENDPOINT...
//   ps_peer watch|flood SECONDS ENDPOINT...
// A worker pushes 1 to each of 60 counters in every clock, in three pushes; with RESETS, a thread breaks its
// connections again and again. At the end, or after SIGTERM, it waits for the others and prints the counters' least and
// most. MODE: async or sync. One that watches pushes to a counter of each server, from a thread each, and prints how
// long the longest push took, and how many to each server ended meanwhile; one that floods pushes more than is under
// way at once besides. COHORT_TEST_SAVES=FOLDER: worker 0, or who watches, takes snapshots there all the time, and says
// how many came about. COHORT_TEST_SLOW_FSYNC=SECONDS: so long the disk takes for a snapshot's file.
// COHORT_TEST_FULL_DISK=NAME: a journal whose path ends so can have a hundred records.
// COHORT_TEST_PATIENCE=MILLISECONDS: after which a silent worker is lost (1500).
#include "ps/tests/testing_counters.h"

#include <cohort/error.h>
#include <cohort/ps.h>

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <optional>
#include <random>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

static std::string path_of(int fd) {
  char path[4096] = {};
  (void)!::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof path - 1);
  return path;
}

// In place of the system's.
extern "C" int fsync(int fd) {
  const char* const seconds = std::getenv("COHORT_TEST_SLOW_FSYNC");
  if (seconds != nullptr && path_of(fd).find(".rows") != std::string::npos)
    ::usleep(static_cast<useconds_t>(std::atof(seconds) * 1e6));
  return static_cast<int>(::syscall(SYS_fsync, fd));
}
extern "C" ssize_t pwritev(int fd, const iovec* parts, int count, off_t at) {
  static std::atomic<int> written{0};
  if (const char* const full = std::getenv("COHORT_TEST_FULL_DISK"); full != nullptr) {
    if (path_of(fd).ends_with(full) && ++written > 100) {
      errno = ENOSPC;
      return -1;
    }
  }
  return ::syscall(SYS_pwritev, fd, parts, count, at, 0);
}

namespace {

using namespace cohort;

/// Takes snapshots as long as it is there, if that is wanted.
class Saver {
 public:
  explicit Saver(ps::Client& client) {
    if (const char* const folder = std::getenv("COHORT_TEST_SAVES"))
      thread_ = std::thread([this, &client, folder = std::string(folder)] { save(client, folder); });
  }
  ~Saver() {
    if (!thread_.joinable()) return;
    ended_ = true;
    thread_.join();
    std::printf("%d snapshots.\n", saved_);
  }
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

 private:
  void save(ps::Client& client, const std::string& folder) {
    while (!ended_) {
      try {
        (void)client.snapshot(folder);
        ++saved_;
      } catch (const Error& error) {
        std::printf("no snapshot: %s\n", error.what());
      }
    }
  }
  std::atomic<bool> ended_{false};
  int saved_ = 0;
  std::thread thread_;
};

[[noreturn]] void run_server(ps::ServerOptions options) {
  const char* const patience = std::getenv("COHORT_TEST_PATIENCE");
  options.patience = std::chrono::milliseconds(patience == nullptr ? 1500 : std::atoi(patience));
  const ps::Server server(options);
  std::printf("serves\n");
  std::fflush(stdout);
  while (true) ::pause();
}

/// Breaks a connection of this process about every 20 ms, as a network would.
void break_connections(const std::stop_token& ended) {
  std::mt19937 random(std::random_device{}());
  while (!ended.stop_requested()) {
    ::usleep(20'000);
    ps::testing::break_a_connection(random);
  }
}

volatile std::sig_atomic_t told_to_end = 0;

int work(int argc, char** argv) {
  std::signal(SIGTERM, [](int) { told_to_end = 1; });
  ps::ClientOptions options;
  options.worker = std::atoi(argv[2]);
  options.workers = std::atoi(argv[3]);
  const std::string mode = argv[4];
  const bool sync = mode == "sync";
  const int clocks = std::atoi(argv[5]);
  const bool resets = std::atoi(argv[6]) != 0;
  options.servers.assign(argv + 7, argv + argc);
  ps::Client client = ps::Client::connect(options);
  const auto consistency = sync ? ps::Consistency::sync() : ps::Consistency::async();
  ps::Table table = client.table("counters", ps::testing::counters(consistency));
  std::vector<std::uint64_t> keys(60);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  const std::vector<float> ones(20, -1);
  std::vector<float> counts(keys.size());
  std::optional<Saver> saver;
  if (options.worker == 0) saver.emplace(client);
  std::jthread breaker;  // which ends with an error of ours, too
  if (resets) breaker = std::jthread(break_connections);
  std::printf("works from clock %lld\n", static_cast<long long>(client.now()));
  std::fflush(stdout);
  for (int done = 0; told_to_end == 0 && done < clocks; ++done) {
    if (sync) table.pull(keys, counts).wait();
    std::vector<ps::Work> pushes;
    for (std::size_t part = 0; part < 3; ++part)
      pushes.push_back(table.push(std::span(keys).subspan(part * 20, 20), ones));
    for (ps::Work& push : pushes) push.wait();
    client.clock();
    std::printf("ended %d.\n", done + 1);
    std::fflush(stdout);
  }
  breaker = {};
  saver.reset();
  client.barrier();
  table.pull(keys, counts).wait();
  const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
  std::printf("counts from %.0f to %.0f.\n", *least, *most);
  std::fflush(stdout);
  client.barrier();
  return 0;
}

int watch(int argc, char** argv) {
  ps::ClientOptions options;
  options.servers.assign(argv + 3, argv + argc);
  const bool floods = std::string(argv[1]) == "flood";
  ps::Client client = ps::Client::connect(options);
  ps::Table table = client.table("counters", ps::testing::counters(ps::Consistency::async()));
  const std::size_t servers = options.servers.size();
  // A key of each: the one that adds a row there.
  std::vector<std::uint64_t> keys(servers, 0);
  std::vector<bool> found(servers, false);
  std::vector<std::uint64_t> before(servers, 0);
  for (std::uint64_t key = 1; std::find(found.begin(), found.end(), false) != found.end(); ++key) {
    table.push(std::vector<std::uint64_t>{key}, std::vector<float>{-1}).wait();
    const auto rows = table.stats().rows_of_servers;
    for (std::size_t i = 0; i < servers; ++i) {
      if (rows[i] == before[i] || found[i]) continue;
      found[i] = true;
      keys[i] = key;
    }
    before = rows;
  }
  using Clock = std::chrono::steady_clock;
  struct Pushes {
    std::vector<Clock::time_point> ended;
    Clock::time_point longest_begun, longest_ended;  // of the push that took longest
  };
  std::vector<Pushes> pushes_of(servers);
  std::vector<std::thread> threads;
  std::printf("works from clock 0\n");
  std::fflush(stdout);
  std::optional<Saver> saver(std::in_place, client);
  const auto end = Clock::now() + std::chrono::seconds(std::atoi(argv[2]));
  for (std::size_t i = 0; i < servers; ++i) {
    threads.emplace_back([&, i] {
      Pushes& mine = pushes_of[i];
      try {
        for (auto begun = Clock::now(); begun < end; begun = Clock::now()) {
          table.push(std::vector<std::uint64_t>{keys[i]}, std::vector<float>{-1}).wait();
          const auto now = mine.ended.emplace_back(Clock::now());
          if (now - begun > mine.longest_ended - mine.longest_begun) {
            mine.longest_begun = begun;
            mine.longest_ended = now;
          }
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "ps_peer: %s\n", error.what());
      }
    });
  }
  double bulk = 0;
  std::vector<std::uint64_t> many(20000);
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = i;
  const std::vector<float> zeros(many.size(), 0);
  for (std::deque<ps::Work> pushes; floods && Clock::now() < end;) {
    const auto begun = Clock::now();
    pushes.push_back(table.push(many, zeros));
    if (pushes.size() > 200) pushes.pop_front();
    const std::chrono::duration<double, std::milli> took = Clock::now() - begun;
    bulk = std::max(bulk, took.count());
  }
  std::printf("bulk: longest %.0f ms.\n", bulk);
  for (std::thread& thread : threads) thread.join();
  saver.reset();
  for (std::size_t i = 0; i < servers; ++i) {
    float counted = 0;
    table.pull(std::vector<std::uint64_t>{keys[i]}, std::span(&counted, 1)).wait();
    const auto& [ended, from, until] = pushes_of[i];
    const std::chrono::duration<double, std::milli> longest = until - from;
    std::printf("server %zu: longest %.0f ms, meanwhile", i, longest.count());
    for (const Pushes& other : pushes_of) {
      std::printf(" %td", std::count_if(other.ended.begin(), other.ended.end(),
                                        [from = from, until = until](auto at) { return at > from && at < until; }));
    }
    // The one that found the key counts as well.
    std::printf(", %s.\n", counted == static_cast<float>(ended.size() + 1) ? "exact" : "not exact");
  }
  std::printf("watched.\n");
  std::fflush(stdout);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    ps::ServerOptions server;
    if (argc > 2) server.endpoint = argv[2];
    if (argc == 4 && std::string(argv[1]) == "server") {
      server.journal = argv[3];
      run_server(server);
    }
    if ((argc == 5 || argc == 6) && std::string(argv[1]) == "replicated") {
      if (argc == 6) server.journal = argv[5];
      server.journal_tail = std::size_t{64} << 10;
      server.replicas = 1;
      server.number = std::atoi(argv[3]);
      server.servers = std::atoi(argv[4]);
      run_server(server);
    }
    if (argc >= 4 && (std::string(argv[1]) == "watch" || std::string(argv[1]) == "flood")) return watch(argc, argv);
    if (argc >= 8 && std::string(argv[1]) == "worker") return work(argc, argv);
    std::fprintf(stderr,
                 "ps_peer server ENDPOINT JOURNAL | replicated ENDPOINT NUMBER SERVERS | worker NUMBER WORKERS MODE "
                 "CLOCKS RESETS ENDPOINT... | watch SECONDS ENDPOINT...\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ps_peer: %s\n", error.what());
  }
  return 1;
}
