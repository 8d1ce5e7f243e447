#include "rendezvous/place.h"

#include "base/env.h"
#include "base/log.h"
#include "base/result.h"
#include "net/interfaces.h"
#include "net/secret.h"
#include "net/served_store.h"
#include "net/store.h"
#include "rendezvous/exchange.h"
#include "rendezvous/init_plan.h"

#include <cohort/cluster_spec.h>
#include <cohort/role.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>

namespace cohort::rendezvous {
namespace {

constexpr std::string_view kVersion = "1";
constexpr std::string_view kNoSecret = "-";
constexpr std::size_t kMostAddresses = 64;

tl::unexpected<Error> bad(std::string_view why) {
  return fail(ErrorCode::Corrupt,
              "what rank 0 left at the launcher's meeting place cannot be read: {} -- use the same "
              "build everywhere",
              why);
}

}  // namespace

Result<std::string> encode(const InitOffer& offer, std::size_t longest) {
  std::string text(kVersion);
  text.reserve(longest);
  text += ';';
  if (offer.secret) {
    offer.secret->append_digits(text);
  } else {
    text += kNoSecret;
  }
  std::size_t count = 0;
  for (const net::Address& address : offer.addresses) {
    const std::string next = ';' + net::to_string(address);
    if (text.size() + next.size() > longest || count == kMostAddresses) break;
    text += next;
    ++count;
  }
  if (count == 0) {
    return fail(ErrorCode::InvalidArgument,
                "no address of this host fits into the {} bytes that the launcher's meeting place takes", longest);
  }
  return text;
}

Result<InitOffer> decode_offer(std::string_view text) {
  const auto next = [&] {
    const std::string_view part = text.substr(0, text.find(';'));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    return part;
  };
  if (next() != kVersion) return bad("another version");
  const std::string_view digits = next();
  InitOffer offer{net::Secret::from_digits(digits), {}};
  if (!offer.secret && digits != kNoSecret) return bad("no secret");
  while (!text.empty()) {
    auto address = net::parse_address(next());
    if (!address) return bad(address.error().what());
    if (address->port == 0) return bad("a port of 0");
    offer.addresses.push_back(*std::move(address));
    if (offer.addresses.size() > kMostAddresses) return bad("too many addresses");
  }
  if (offer.addresses.empty()) return bad("no address");
  return offer;
}

namespace {

constexpr std::chrono::seconds kJobStoreLimit{20};

// Serves a store at all addresses of this host, since any may be the reachable one, or at the one that COHORT_NETWORK
// selects. The store is closed when the world is formed.
std::unique_ptr<store::StoreServer> serve(const net::Secret& secret, const std::string& meeting, int ranks,
                                          const std::vector<std::string>& offered) {
  store::StoreServerOptions options;
  options.secret = secret;
  options.meeting = meeting;
  options.expected = static_cast<std::size_t>(ranks);
  if (env::get(env::kNetwork) && offered.size() == 1) {
    options.endpoint.tcp = {offered.front(), 0};
    return std::make_unique<store::StoreServer>(options);
  }
  options.endpoint.tcp = {"::", 0};
  try {
    return std::make_unique<store::StoreServer>(options);
  } catch (const Error& error) {
    log::debug("comm", "no IPv6 here: {}", error.what());
  }
  options.endpoint.tcp = {"0.0.0.0", 0};
  return std::make_unique<store::StoreServer>(options);
}

// Rank 0 listens first, then announces its addresses, so a rank that can reach an address finds rank 0 there.
std::string make_offer(MeetingPlace& place, const std::string& meeting, int ranks, std::size_t longest,
                       const std::optional<net::Secret>& own) {
  const net::Secret secret = own ? *own : value_or_throw(net::Secret::generate());
  std::vector<std::string> offered = value_or_throw(net::offered_addresses());
  place.server = serve(secret, meeting, ranks, offered);
  const net::Address bound = place.server->endpoint().tcp;
  InitOffer offer{own ? std::nullopt : std::optional(secret), {}};
  for (std::string& address : offered) {
    const bool v6 = address.find(':') != std::string::npos;
    if (!v6 || bound.host != "0.0.0.0") offer.addresses.push_back({std::move(address), bound.port});
  }
  // Without any network, all ranks are on this host.
  if (offer.addresses.empty()) offer.addresses.push_back({"127.0.0.1", bound.port});
  return value_or_throw(encode(offer, longest));
}

// Tries all addresses, since some may not be reachable, or may belong to another host.
std::shared_ptr<store::MeetingStore> connect_to_one(const InitOffer& offer, const net::Secret& secret,
                                                    const std::string& meeting, net::Deadline deadline) {
  std::vector<net::Endpoint> endpoints;
  for (const net::Address& address : offer.addresses) endpoints.push_back({address, {}});
  store::StoreClientOptions options;
  options.secret = secret;
  options.meeting = meeting;
  try {
    return store::connect_store_at_any(endpoints, options, deadline);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::Timeout) throw;
    raise(ErrorCode::Timeout,
          "rank 0 cannot be reached at any of its addresses -- {} -- does a firewall stand between?", error.what());
  }
}

void go_through_exchange(const InitPlan& plan, const std::string& meeting, net::Deadline deadline,
                         MeetingPlace& place) {
  Exchange& exchange = *plan.exchange;
  const std::string key = "cohort-" + net::sha256_hex(meeting).substr(0, 16);
  std::optional<std::string> mine;
  if (plan.rank == 0) mine = make_offer(place, meeting, plan.size, exchange.longest_value(), plan.secret);
  auto shared = exchange.share(key, mine, deadline);
  if (mine) net::wipe(*mine);
  if (!shared) throw Error(shared.error());
  const auto decoded = decode_offer(*shared);
  net::wipe(*shared);
  const InitOffer offer = value_or_throw(decoded);
  if (offer.secret.has_value() == plan.secret.has_value()) {
    raise(ErrorCode::Mismatch,
          "rank 0 has {} secret and this rank has {} -- give all ranks the same COHORT_SECRET_FILE, "
          "or none",
          plan.secret ? "no" : "a", plan.secret ? "one" : "none");
  }
  const net::Secret secret = offer.secret ? *offer.secret : *plan.secret;
  if (plan.rank == 0) {
    net::Endpoint here = place.server->endpoint();
    if (here.tcp.host == "::") here.tcp.host = "::1";
    if (here.tcp.host == "0.0.0.0") here.tcp.host = "127.0.0.1";
    place.store = store::connect_store({.endpoint = here, .secret = secret, .meeting = meeting}, deadline);
  } else {
    place.store = connect_to_one(offer, secret, meeting, deadline);
  }
  if (offer.secret && plan.place == InitPlan::Place::Exchange) keep_launchers_secret(*offer.secret);
}

}  // namespace

std::shared_ptr<MeetingPlace> go_to(const InitPlan& plan, const std::string& meeting, net::Deadline deadline) {
  auto place = std::make_shared<MeetingPlace>();
  if (plan.place == InitPlan::Place::File) {
    place->store =
        store::open_file_store({.path = plan.path, .rank = plan.rank, .size = plan.size, .meeting = meeting}, deadline);
    return place;
  }
  if (plan.place == InitPlan::Place::Exchange || plan.place == InitPlan::Place::Shared) {
    go_through_exchange(plan, meeting, deadline, *place);
    return place;
  }
  store::StoreClientOptions client{.endpoint = plan.endpoint, .secret = plan.secret};
  if (plan.place == InitPlan::Place::Rank0) {
    client.meeting = meeting;
    if (plan.rank == 0) {
      place->server = std::make_unique<store::StoreServer>(
          store::StoreServerOptions{.endpoint = plan.endpoint,
                                    .secret = plan.secret,
                                    .meeting = meeting,
                                    .expected = static_cast<std::size_t>(plan.size)});
    }
  }
  // The job's store is started before the ranks. A rank that does not find the store belongs to an attempt that has
  // ended, or is cut off.
  if (plan.place == InitPlan::Place::Job) deadline = std::min(deadline, net::deadline_in(kJobStoreLimit));
  place->store = store::connect_store(client, deadline);
  return place;
}

}  // namespace cohort::rendezvous

namespace cohort {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Time limits of requests to the job's store; it answers without delay.
constexpr auto kStore = std::chrono::seconds(30);
constexpr auto kSoon = std::chrono::seconds(2);
constexpr const char* kPs = "ps";

// Servers of a restarted job have other addresses, so keys contain the number of restarts.
std::int64_t restart() { return env::number(env::kRestart).value_or(0); }
std::string key_of(int number) { return rendezvous::server_key(restart(), number); }

std::shared_ptr<store::Store> job_store() { return store::connect_job_store(steady_clock::now() + kStore); }

}  // namespace

namespace rendezvous {

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

}  // namespace rendezvous

void announce_server(const std::string& address) {
  if (role() != Role::Server) {
    raise(ErrorCode::InvalidArgument,
          "announce_server: this process is no server but a {} -- see `cohort run --servers`", to_string(role()));
  }
  if (address.empty()) raise(ErrorCode::InvalidArgument, "announce_server: the address is empty -- give HOST:PORT");
  if (!rendezvous::listed_servers()) job_store()->set(key_of(role_number()), address);
}

std::vector<std::string> server_addresses(milliseconds timeout) {
  if (auto listed = rendezvous::listed_servers()) return *std::move(listed);
  const int all = num_servers();
  std::vector<std::string> found;
  if (all == 0) return found;
  const auto deadline = steady_clock::now() + timeout;
  const auto store = job_store();
  std::vector<int> missing;
  for (int number = 0; number < all; ++number) {
    try {
      found.push_back(store->get(key_of(number), std::max(deadline, steady_clock::now() + milliseconds(10))));
      if (found.back() == rendezvous::kEndedBefore) {
        raise(
            ErrorCode::Unavailable,
            "server_addresses: server {} of {} has ended ({}), and had not said where it listens -- is the program of "
            "servers one that calls announce_server?",
            number, all, store->try_get(rendezvous::ended_key(restart(), number)).value_or("exit code 0"));
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
