// A process of a job that ps_kills_test.cpp starts: a server, with a journal, replicas or both, or a worker that
// counts.
//   ps_kills_peer journal|replicas|both PUSHES KILLS
// Each worker pushes 1 to one of 60 counters, PUSHES times, many under way at once, and breaks one of its connections
// after every hundredth push, at random. Worker 0 kills servers meanwhile, KILLS times, each once `cohort run` has
// started the one before again; with replicas once all rows have a backup again; with both at any time. At the end each
// says what is counted.
#include "net/address.h"
#include "net/store.h"
#include "ps/server_map.h"
#include "ps/tests/testing_counters.h"

#include <cohort/error.h>
#include <cohort/ps.h>
#include <cohort/role.h>

#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace cohort;
using namespace std::chrono_literals;

constexpr std::size_t kCounters = 60;
constexpr std::size_t kUnderWay = 100;
constexpr auto kPatience = 60s;

std::string name_of(int server) {
  return "@cohort-kills-" + std::string(std::getenv("COHORT_JOB_ID")) + "-" + std::to_string(server);
}

[[noreturn]] void serve(bool replicated, bool journals) {
  ps::ServerOptions options;
  options.endpoint = name_of(role_number());
  if (replicated) options.replicas = 1;
  if (journals) {
    options.journal = "journal-" + std::to_string(role_number());
    options.journal_tail = std::size_t{64} << 10;  // written anew again and again, so that kills meet that, too
  }
  options.shared_memory = role_number() == 0;  // one by either way
  const ps::Server server(options);
  while (true) ::pause();
}

template <class Is>
void wait_until(const char* what, Is&& is) {
  for (const auto end = std::chrono::steady_clock::now() + kPatience; !is(); std::this_thread::sleep_for(2ms)) {
    if (std::chrono::steady_clock::now() > end) throw std::runtime_error(std::string("not in time: ") + what);
  }
}

pid_t pid_of(std::size_t server) {
  std::ifstream file(std::string(std::getenv("COHORT_RUN_DIR")) + "/job.json");
  return nlohmann::json::parse(file)["server_pids"][server];
}

/// Reads from the job's store who serves what; this connection may be broken, too. nullopt: not available now.
std::optional<ps::ServerMap> look_at_map() {
  try {
    const auto text = store::connect_job_store(net::deadline_in(30s))->try_get("ps/0/map");
    if (!text) return std::nullopt;
    return value_or_throw(codec::decode<ps::ServerMap>(*text, {.longest_text = 1024}));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::PeerLost) throw;
    return std::nullopt;
  }
}

bool all_have_backups(const ps::ServerMap& map) {
  return map.formed() && std::all_of(map.rows.begin(), map.rows.end(), [&](const ps::Serving& one) {
           return map.lives(one.primary) && map.lives(one.backup);
         });
}

void kill_servers(bool replicated, long kills, long pushes, const std::atomic<long>& pushed) {
  std::mt19937 random(static_cast<unsigned>(::getpid()));
  wait_until("job.json",
             [] { return ::access((std::string(std::getenv("COHORT_RUN_DIR")) + "/job.json").c_str(), R_OK) == 0; });
  for (long kill = 0; kill < kills; ++kill) {
    while (pushed < (2 * kill + 1) * pushes / (2 * kills)) std::this_thread::sleep_for(1ms);
    ps::ServerMap before;
    const auto is_safe = [&] {
      const auto map = look_at_map();
      if (map) before = *map;
      return map && all_have_backups(*map);
    };
    if (replicated) wait_until("a backup of all rows", is_safe);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));  // a kill may meet anything
    const std::size_t server = random() % static_cast<std::size_t>(num_servers());
    const pid_t pid = pid_of(server);
    if (::kill(pid, SIGKILL) != 0) throw std::runtime_error("server " + std::to_string(server) + " is not there");
    wait_until("a server is started again", [&] { return pid_of(server) != pid; });
    // Until it has entered the map that takes the killed one for alive.
    const auto is_known = [&] {
      const auto map = look_at_map();
      return map && map->members[server].life != before.members[server].life;
    };
    if (replicated) wait_until("a server is in the map again", is_known);
  }
}

int work(bool replicated, long pushes, long kills) {
  ps::ClientOptions options;
  options.worker = role_number();
  options.workers = num_workers();
  for (int i = 0; i < num_servers(); ++i) options.servers.push_back(name_of(i));
  ps::Client client = ps::Client::connect(options);
  ps::Table table = client.table("counters", ps::testing::counters(ps::Consistency::async()));
  std::atomic<long> pushed{0};
  std::thread killer;
  if (options.worker == 0)
    killer = std::thread([&] {
      try {
        kill_servers(replicated, kills, pushes, pushed);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "ps_kills_peer: %s\n", error.what());
        std::_Exit(1);
      }
    });
  std::mt19937 random(static_cast<unsigned>(options.worker));
  std::deque<ps::Work> under_way;
  const std::vector<float> one = {-1};
  long broken = 0;
  const auto began = std::chrono::steady_clock::now();
  const auto push = [&](long i) {
    under_way.push_back(table.push(std::vector<std::uint64_t>{static_cast<std::uint64_t>(i) % kCounters}, one));
    if (random() % 100 == 0 && ps::testing::break_a_connection(random)) ++broken;
    if (under_way.size() == kUnderWay) {
      under_way.front().wait();
      under_way.pop_front();
    }
    pushed = i + 1;
  };
  try {
    for (long i = 0; i < pushes; ++i) push(i);
    for (ps::Work& one_push : under_way) one_push.wait();
  } catch (...) {
    if (killer.joinable()) killer.detach();
    throw;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  if (killer.joinable()) killer.join();
  client.barrier();
  std::vector<std::uint64_t> keys(kCounters);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  std::vector<float> counts(kCounters);
  table.pull(keys, counts).wait();
  double sum = 0;
  long wrong = 0;
  for (std::size_t i = 0; i < kCounters; ++i) {
    const long each =
        pushes / static_cast<long>(kCounters) + (static_cast<long>(i) < pushes % static_cast<long>(kCounters));
    wrong += static_cast<long>(counts[i]) != each * options.workers;
    sum += static_cast<double>(counts[i]);
  }
  std::printf("counted %.0f of %ld, %ld counters are wrong; %ld connections broken, in %.1f s\n", sum,
              pushes * options.workers, wrong, broken, took.count());
  std::fflush(stdout);
  client.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 4) throw std::runtime_error("ps_kills_peer journal|replicas|both PUSHES KILLS");
    const std::string has = argv[1];
    if (role() == Role::Server) serve(has != "journal", has != "replicas");
    return work(has == "replicas", std::atol(argv[2]), std::atol(argv[3]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ps_kills_peer: %s\n", error.what());
  }
  return 1;
}
