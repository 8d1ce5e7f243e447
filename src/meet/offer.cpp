#include "meet/offer.h"

#include <algorithm>

namespace cohort::meet {
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

Result<std::string> encode(const JoinOffer& offer, std::size_t longest) {
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

Result<JoinOffer> decode_offer(std::string_view text) {
  const auto next = [&] {
    const std::string_view part = text.substr(0, text.find(';'));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    return part;
  };
  if (next() != kVersion) return bad("another version");
  const std::string_view digits = next();
  JoinOffer offer{net::Secret::from_digits(digits), {}};
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

}  // namespace cohort::meet
