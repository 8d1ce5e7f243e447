#include "ps/place.h"

#include "base/env.h"
#include "cluster/detect.h"
#include "meet/plan.h"
#include "net/interfaces.h"
#include "ps/protocol.h"

namespace cohort::ps {

Result<std::string> own_endpoint() {
  const auto store = env::get(env::kStore);
  if (!store) return net::to_string(net::any_loopback_port());
  const auto place = net::parse_address(*store);
  if (!place) return tl::unexpected(place.error());
  auto own = net::address_towards(*place);
  if (!own) return tl::unexpected(own.error());
  // (Where the job is on this host alone, nobody comes over a network.)
  if (!net::is_loopback_name(*own) && env::get(env::kNetwork)) {
    const auto offered = net::offered_addresses();
    if (!offered) return tl::unexpected(offered.error());
    if (!offered->empty()) own = offered->front();
  }
  return net::to_string(net::Address{*own, 0});
}

Result<net::Endpoint> parse_endpoint(const std::string& text) {
  net::Endpoint endpoint;
  if (text.size() > 1 && text.size() <= 101 && text.front() == '@') {
    endpoint.unix_name = text.substr(1);
    return endpoint;
  }
  if (!text.empty() && text.front() == '@') {
    return fail(ErrorCode::InvalidArgument, "'{}' is no endpoint: a name on this host has 1 to 100 letters after the @",
                text);
  }
  auto address = net::parse_address(text);
  if (!address) return tl::unexpected(address.error());
  endpoint.tcp = *std::move(address);
  return endpoint;
}

Result<net::RpcPlace> place_of(const std::string& endpoint, const std::string& secret_file) {
  auto parsed = parse_endpoint(endpoint);
  if (!parsed) return tl::unexpected(parsed.error());
  net::RpcPlace place;
  place.endpoints.push_back(*std::move(parsed));
  place.secure = {.purpose = kPurpose, .longest_message = kLongestMessage};
  if (place.endpoints.front().is_unix()) return place;
  JoinOptions options;
  options.secret_file = secret_file;
  auto secret = meet::find_secret(options, cluster::current_environment(), meet::JoinPlan::Place::Rank0);
  if (!secret) return tl::unexpected(secret.error());
  const auto trusted = env::flag(env::kTrustNetwork);
  if (!trusted) return tl::unexpected(trusted.error());
  const net::Address at = place.endpoints.front().tcp;
  if (!*secret && !*trusted && net::is_loopback_name(at.host) && at.port != 0) {
    // As ranks meet there: by a name that this user's processes alone are let in at.
    place.endpoints.front().unix_name = fmt::format("cohort-server-{}", at.port);
    return place;
  }
  if (!*secret && !*trusted) {
    return fail(
        ErrorCode::InvalidArgument,
        "a parameter server at {} needs a secret -- run under `cohort run`, or name a file of `cohort secret` by "
        "COHORT_SECRET_FILE; or, if everybody on that network may come, COHORT_TRUST_NETWORK=1 says so",
        endpoint);
  }
  place.secret = *secret ? **secret : meet::secret_of_trusted_network();
  return place;
}

}  // namespace cohort::ps
