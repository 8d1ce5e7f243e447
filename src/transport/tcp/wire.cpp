#include "transport/tcp/wire.h"

#include "base/records.h"
#include "net/hmac.h"

#include <algorithm>
#include <cstring>

namespace cohort::transport::tcp {
namespace {

constexpr std::uint32_t kPeerInfoMagic = 0x35435743;  // "CWC5"
constexpr std::size_t kLongestText = 512;
constexpr std::uint32_t kMostAddresses = 64;

}  // namespace

Result<FrameKind> check(const FrameHeader& header) {
  const std::uint32_t kind = header.kind & 0xFF & ~kTagged;
  if ((header.kind & ~0xFFu) != kMark || kind < 1 || kind > 4) {
    return fail(ErrorCode::Corrupt, "a frame begins with {:08x}", header.kind);
  }
  const auto known = static_cast<FrameKind>(kind);
  if (known != FrameKind::Data && header.bytes > kMostMessage) {
    return fail(ErrorCode::Corrupt, "a message of {} bytes", header.bytes);
  }
  return known;
}

net::Secret world_secret(std::span<const std::uint8_t> secret, std::string_view token, Protection protection) {
  return net::Secret::from_bytes(
      net::hmac_sha256(secret, fmt::format("cohort ranks 3 protection {} {}", static_cast<int>(protection), token)));
}

std::uint64_t world_number(const net::Secret& of_world) {
  const net::Mac mac = net::hmac_sha256(of_world.bytes(), "number of the world");
  std::uint64_t number = 0;
  std::memcpy(&number, mac.data(), sizeof number);
  return number;
}

net::SecureOptions between_ranks() { return {.purpose = "ranks", .longest_message = 256, .detachable = true}; }

template <class M, class A>
void visit_fields(M& m, A& a, const Hello*) {
  a(m.from, m.to, m.lane);
}

std::string encode(const Hello& hello) { return codec::encode(hello); }
Result<Hello> decode_hello(std::string_view bytes) { return codec::decode<Hello>(bytes); }

std::string encode(Decision decision) { return codec::encode(codec::below(decision, 2, {})); }
Result<Decision> decode_decision(std::string_view bytes) {
  Decision decision{};
  codec::Decoder in(bytes);
  in(codec::below(decision, 2, "a verdict that does not exist"));
  if (const auto done = in.finish(); !done) return tl::unexpected(done.error());
  return decision;
}

net::FrameMac::Key direction_key(std::span<const std::uint8_t, 32> session, bool of_opener) {
  net::FrameMac::Key key{};
  static_assert(2 * key.size() == session.size());
  std::copy_n(session.begin() + (of_opener ? 0 : key.size()), key.size(), key.begin());
  return key;
}

Bytes32 random_bytes() {
  const net::Secret random = value_or_throw(net::Secret::generate());
  Bytes32 bytes{};
  std::copy(random.bytes().begin(), random.bytes().end(), bytes.begin());
  return bytes;
}

template <class M, class A>
void visit_fields(M& m, A& a, const PeerInfo*) {
  a(codec::constant(kPeerInfoMagic,
                    "these bytes are no description of a rank -- do all ranks run the same build of Cohort?"),
    m.host, m.machine, m.pid,
    codec::below(m.protection, 3,
                 "the description of a rank names no known protection -- do all ranks run the same build of Cohort?"),
    m.lanes);
  a.demand(m.lanes >= 1 && m.lanes <= kMostLanes,
           "the description of a rank names no number of connections -- do all ranks run the same build of Cohort?");
  a(codec::most(m.addresses, kMostAddresses, kLongestText), m.mpi_process, m.mpi_job);
}

std::string encode(const PeerInfo& info) { return codec::encode(info); }
Result<PeerInfo> decode_peer_info(std::string_view bytes) {
  return codec::decode<PeerInfo>(bytes, {.longest_text = kLongestText});
}

}  // namespace cohort::transport::tcp
