#include "meet/servers.h"

#include <cohort/cluster_spec.h>
#include <cohort/role.h>

#include "base/env.h"
#include "base/result.h"
#include "store/store.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <memory>

namespace cohort {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// For the job's store, which answers at once.
constexpr auto kStore = std::chrono::seconds(30);
constexpr auto kSoon = std::chrono::seconds(2);
constexpr const char* kPs = "ps";

// Servers of a job that is started again listen somewhere else.
std::int64_t restart() { return env::number(env::kRestart).value_or(0); }
std::string key_of(int number) { return meet::server_key(restart(), number); }

std::shared_ptr<store::Store> job_store() { return store::connect_job_store(steady_clock::now() + kStore); }

}  // namespace

namespace meet {

std::string server_key(std::int64_t restart, int number) { return fmt::format("servers/{}/{}", restart, number); }
std::string ended_key(std::int64_t restart, int number) { return server_key(restart, number) + "/ended"; }

std::optional<std::string> how_server_ended(int number, const std::string& address) {
  if (!env::get(env::kStore)) return std::nullopt;
  const auto store = store::connect_job_store(steady_clock::now() + kSoon);
  if (store->try_get(key_of(number)) != address) return std::nullopt;
  return store->try_get(ended_key(restart(), number));
}

std::optional<std::vector<std::string>> listed_servers() {
  const std::string text = env::text(env::kTfConfig);
  if (env::get(env::kStore) || text.empty()) return std::nullopt;
  const ClusterSpec spec = ClusterSpec::from_tf_config(text);
  std::vector<std::string> addresses;
  if (spec.as_dict().count(kPs) > 0) {
    for (const auto& [index, address] : spec.job_tasks(kPs)) addresses.push_back(address);
  }
  return addresses;
}

std::optional<std::string> earlier_server_address() {
  if (env::number(env::kServerRestart).value_or(0) == 0 || !env::get(env::kStore)) return std::nullopt;
  return job_store()->try_get(key_of(role_number()));
}

}  // namespace meet

void announce_server(const std::string& address) {
  if (role() != Role::Server) {
    raise(ErrorCode::InvalidArgument,
          "announce_server: this process is no server but a {} -- see `cohort run --servers`", to_string(role()));
  }
  if (address.empty()) raise(ErrorCode::InvalidArgument, "announce_server: the address is empty -- give HOST:PORT");
  if (!meet::listed_servers()) job_store()->set(key_of(role_number()), address);
}

std::vector<std::string> server_addresses(milliseconds timeout) {
  if (auto listed = meet::listed_servers()) return *std::move(listed);
  const int all = num_servers();
  std::vector<std::string> found;
  if (all == 0) return found;
  const auto deadline = steady_clock::now() + timeout;
  const auto store = job_store();
  std::vector<int> missing;
  for (int number = 0; number < all; ++number) {
    try {
      found.push_back(store->get(key_of(number), std::max(deadline, steady_clock::now() + milliseconds(10))));
      if (found.back() == meet::kEndedBefore) {
        raise(
            ErrorCode::Unavailable,
            "server_addresses: server {} of {} has ended ({}), and had not said where it listens -- is the program of "
            "servers one that calls announce_server?",
            number, all, store->try_get(meet::ended_key(restart(), number)).value_or("exit code 0"));
      }
    } catch (const Error& error) {
      if (error.code() != ErrorCode::Timeout) throw;
      missing.push_back(number);
    }
  }
  if (!missing.empty()) {
    const bool one = missing.size() == 1;
    raise(
        ErrorCode::Timeout,
        "server_addresses: server{} {} of {} {} not said within {:g} s where {} -- is the program of servers one that "
        "calls announce_server?",
        one ? "" : "s", fmt::join(missing, ", "), all, one ? "has" : "have",
        std::chrono::duration<double>(timeout).count(), one ? "it listens" : "they listen");
  }
  return found;
}

}  // namespace cohort
