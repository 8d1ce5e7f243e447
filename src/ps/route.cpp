#include "ps/route.h"

#include "base/env.h"
#include "base/log.h"
#include "cluster/identity.h"
#include "meet/place.h"
#include "net/socket.h"
#include "ps/place.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

namespace cohort::ps {
namespace {

using std::chrono::milliseconds;

// To one process, before the others are asked: at first, then longer.
constexpr milliseconds kFirstTry(2000);  // before it is known whether there are replicas
constexpr milliseconds kTry(150);
constexpr milliseconds kLongestTry(10'000);
constexpr milliseconds kAsk(200);
constexpr milliseconds kNearer(5000);  // to be reached at its Unix name

bool refuses(const std::string& endpoint) {
  const auto socket = net::connect_once(value_or_throw(parse_endpoint(endpoint)), net::deadline_in(kAsk));
  return !socket && socket.error().kind == net::ConnectFailure::Refused;
}

/// Where a worker goes: it takes memory from there.
net::RpcPlace sharing_place_of(const std::string& endpoint, const std::string& secret_file) {
  net::RpcPlace place = value_or_throw(place_of(endpoint, secret_file));
  place.secure.descriptors = true;
  return place;
}

}  // namespace

Route::Route(const Hello& hello, std::string secret_file)
    : servers_(hello.servers),
      rows_(hello.server),
      secret_file_(std::move(secret_file)),
      place_{hello.servers[hello.server], 0} {}

Route::Place Route::place() const {
  const std::lock_guard lock(mutex_);
  return place_;
}

void Route::set(const Place& place) {
  const std::lock_guard lock(mutex_);
  if (place.epoch >= place_.epoch) place_ = place;
}

Route::Met Route::meet(Hello hello, net::Deadline deadline) {
  const bool in_job = env::get(env::kStore).has_value();
  const auto begun = std::chrono::steady_clock::now();
  bool again = false;
  // The last attempt tells of its own time alone.
  const auto give_up = [&](const Error& last) {
    if (!again) throw last;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begun;
    raise(ErrorCode::Timeout, "nobody has served its rows for {:.1f} s; at last {}", waited.count(), last.what());
  };
  for (milliseconds limit = place().epoch > 0 ? kTry : kFirstTry;;
       limit = std::min(2 * limit, kLongestTry), again = true) {
    const Place now = place();
    hello.epoch = now.epoch;
    Met met;
    Place elsewhere;
    std::optional<Error> late;
    // Where nobody listens any more the others are asked at once.
    if (now.epoch == 0 || !refuses(now.endpoint)) {
      try {
        met = greet(sharing_place_of(now.endpoint, secret_file_), hello,
                    servers_.size() > 1 || in_job ? std::min(deadline, net::deadline_in(limit)) : deadline, elsewhere);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::Timeout) throw;
        if (net::passed(deadline)) give_up(error);
        late = error;
      }
    }
    if (met.rpc) {
      set({now.endpoint, met.welcome.epoch});
      if (hello.incarnation != 0) share_memory(met, sharing_place_of(now.endpoint, secret_file_), hello, deadline);
      return met;
    }
    if (elsewhere.epoch == 0) elsewhere = ask_others(kAsk);
    if (elsewhere.epoch > 0 && elsewhere.epoch >= now.epoch && elsewhere.endpoint != now.endpoint) {
      set(elsewhere);
      continue;
    }
    if (now.epoch == 0 && in_job) demand_that_it_runs(now.endpoint);
    if (net::passed(deadline)) {
      if (late) give_up(*late);
      raise(ErrorCode::Timeout,
            "nobody serves the rows of parameter server {}: the process at {} does not any more, and no other one says "
            "that it does -- is a server still running?",
            rows_, now.endpoint);
    }
    std::this_thread::sleep_for(milliseconds(10));
  }
}

/// Whose rows nobody else has: one that has ended is not waited for.
void Route::demand_that_it_runs(const std::string& endpoint) const {
  std::optional<std::string> how;
  try {
    how = meet::how_server_ended(static_cast<int>(rows_), endpoint);
  } catch (const Error& error) {
    log::debug("ps", "the job's store: {}", error.what());
  }
  if (!how) return;
  raise(ErrorCode::PeerLost,
        "it has ended ({}), though workers need it -- its program has to go on until all have left, as ps.serve does",
        *how);
}

Route::Met Route::greet(const net::RpcPlace& at, const Hello& hello, net::Deadline deadline, Place& elsewhere) const {
  Met met;
  net::rpc_connect(at, deadline, [&](net::SecureConnection connection, const std::string& peer, net::Deadline limit) {
    auto rpc = std::make_shared<net::RpcClient>(std::move(connection), "parameter", peer);
    const std::string answer = rpc->call(static_cast<std::uint8_t>(Method::Hello), pack(hello), limit);
    const auto opened = value_or_throw(unpack<Answer>(answer));
    if (opened.record.error && !opened.payload.empty()) {  // and it says where
      const auto located = value_or_throw(codec::decode<Located>(opened.payload));
      elsewhere = {located.endpoint, located.epoch};
      return;
    }
    if (opened.record.error) throw *opened.record.error;
    met = {std::move(rpc), value_or_throw(codec::decode<Welcome>(opened.payload))};
  });
  return met;
}

void Route::share_memory(Met& met, net::RpcPlace place, const Hello& hello, net::Deadline deadline) const {
  const auto none = [this](std::string_view why) { log::debug("ps", "server {}: no shared memory: {}", rows_, why); };
  try {
    const std::string host = cluster::host_identity().id;
    auto shared = met.rpc->share_memory(host, deadline);
    if (shared && *shared) {
      place.endpoints = {**shared};
      Place elsewhere;
      Met nearer = greet(place, hello, std::min(deadline, net::deadline_in(kNearer)), elsewhere);
      if (!nearer.rpc) return none("it serves the rows no more");
      met = std::move(nearer);
      shared = met.rpc->share_memory(host, deadline);
    }
    if (!shared) none(shared.error().what());
  } catch (const Error& error) {  // if that was the connection, whoever asks next finds out
    none(error.what());
  }
}

Route::Place Route::ask_others(milliseconds each) const {
  const Place now = place();
  Place newest;
  for (std::uint32_t i = 1; i <= servers_.size(); ++i) {
    const std::string& endpoint = servers_[(rows_ + i) % servers_.size()];
    if (endpoint == now.endpoint) continue;
    if (newest.epoch > now.epoch) break;
    try {
      const auto limit = net::deadline_in(each);
      net::rpc_connect(value_or_throw(place_of(endpoint, secret_file_)), limit,
                       [&](net::SecureConnection connection, const std::string& at, net::Deadline until) {
                         net::RpcClient rpc(std::move(connection), "parameter", at);
                         const std::string answer =
                             rpc.call(static_cast<std::uint8_t>(Method::Locate), pack(Locate{rows_}), until);
                         const auto opened = value_or_throw(unpack<Answer>(answer));
                         if (opened.record.error) throw *opened.record.error;
                         const auto located = value_or_throw(codec::decode<Located>(opened.payload));
                         if (located.epoch > newest.epoch) newest = {located.endpoint, located.epoch};
                       });
    } catch (const Error& error) {
      log::debug("ps", "parameter server at {}: {}", endpoint, error.what());
    }
  }
  return newest;
}

bool Route::has_moved() {
  const Place now = place();
  if (now.epoch == 0) return false;
  const Place newest = ask_others(kAsk);
  return newest.epoch > now.epoch && newest.endpoint != now.endpoint;
}

}  // namespace cohort::ps
