#include "meet/place.h"

#include "base/env.h"
#include "base/log.h"
#include "meet/exchange.h"
#include "meet/offer.h"
#include "meet/rendezvous_method.h"
#include "net/interfaces.h"
#include "net/mac.h"
#include "store/served_store.h"
#include "store/store.h"

#include <algorithm>
#include <chrono>
#include <fstream>

namespace cohort::meet {
namespace {

constexpr std::chrono::seconds kJobStoreLimit{20};

// For all addresses of this host, whichever the others can reach, or for the one that COHORT_NETWORK leaves: closed
// again once the world is formed. Where IPv6 sockets do not take IPv4, IPv4 only.
std::unique_ptr<store::StoreServer> serve(const net::Secret& secret, const std::string& meeting,
                                          const std::vector<std::string>& offered) {
  store::StoreServerOptions options;
  options.secret = secret;
  options.meeting = meeting;
  if (env::get(env::kNetwork) && offered.size() == 1) {
    options.endpoint.tcp = {offered.front(), 0};
    return std::make_unique<store::StoreServer>(options);
  }
  std::string v6_only;
  std::ifstream("/proc/sys/net/ipv6/bindv6only") >> v6_only;
  if (v6_only == "0") {
    options.endpoint.tcp = {"::", 0};
    try {
      return std::make_unique<store::StoreServer>(options);
    } catch (const Error& error) {
      log::debug("comm", "no IPv6 here: {}", error.what());
    }
  }
  options.endpoint.tcp = {"0.0.0.0", 0};
  return std::make_unique<store::StoreServer>(options);
}

// Rank 0 listens first, then tells: whoever knows an address finds somebody there, or cannot reach it at all.
std::string make_offer(MeetingPlace& place, const std::string& meeting, std::size_t longest,
                       const std::optional<net::Secret>& own) {
  const net::Secret secret = own ? *own : value_or_throw(net::Secret::generate());
  std::vector<std::string> offered = value_or_throw(net::offered_addresses());
  place.server = serve(secret, meeting, offered);
  const net::Address bound = place.server->endpoint().tcp;
  JoinOffer offer{own ? std::nullopt : std::optional(secret), {}};
  for (std::string& address : offered) {
    const bool v6 = address.find(':') != std::string::npos;
    if (!v6 || bound.host != "0.0.0.0") offer.addresses.push_back({std::move(address), bound.port});
  }
  // Without any network all ranks are here.
  if (offer.addresses.empty()) offer.addresses.push_back({"127.0.0.1", bound.port});
  return value_or_throw(encode(offer, longest));
}

// Some of its addresses may lead nowhere, or to somebody else.
std::shared_ptr<store::MeetingStore> connect_to_one(const JoinOffer& offer, const net::Secret& secret,
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

void go_through_exchange(const JoinPlan& plan, const std::string& meeting, net::Deadline deadline,
                         MeetingPlace& place) {
  Exchange& exchange = *plan.exchange;
  const std::string key = "cohort-" + net::sha256_hex(meeting).substr(0, 16);
  std::optional<std::string> mine;
  if (plan.rank == 0) mine = make_offer(place, meeting, exchange.longest_value(), plan.secret);
  auto shared = exchange.share(key, mine, deadline);
  if (mine) net::wipe(*mine);
  if (!shared) throw Error(shared.error());
  const auto decoded = decode_offer(*shared);
  net::wipe(*shared);
  const JoinOffer offer = value_or_throw(decoded);
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
  if (offer.secret && plan.place == JoinPlan::Place::Exchange) keep_launchers_secret(*offer.secret);
}

}  // namespace

std::shared_ptr<MeetingPlace> go_to(const JoinPlan& plan, const std::string& meeting, net::Deadline deadline) {
  auto place = std::make_shared<MeetingPlace>();
  if (plan.place == JoinPlan::Place::File) {
    place->store =
        store::open_file_store({.path = plan.path, .rank = plan.rank, .size = plan.size, .meeting = meeting}, deadline);
    return place;
  }
  if (plan.place == JoinPlan::Place::Exchange || plan.place == JoinPlan::Place::Shared) {
    go_through_exchange(plan, meeting, deadline, *place);
    return place;
  }
  store::StoreClientOptions client{.endpoint = plan.endpoint, .secret = plan.secret};
  if (plan.place == JoinPlan::Place::Rank0) {
    client.meeting = meeting;
    if (plan.rank == 0) {
      place->server = std::make_unique<store::StoreServer>(
          store::StoreServerOptions{.endpoint = plan.endpoint, .secret = plan.secret, .meeting = meeting});
    }
  }
  // The job's store was there before its ranks. Who does not reach it is of an attempt that has ended, or cut off.
  if (plan.place == JoinPlan::Place::Job) deadline = std::min(deadline, net::deadline_in(kJobStoreLimit));
  place->store = store::connect_store(client, deadline);
  return place;
}

}  // namespace cohort::meet
