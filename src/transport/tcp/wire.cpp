#include "transport/tcp/wire.h"

#include "base/records.h"
#include "net/secret.h"

#include <algorithm>
#include <cstring>

namespace cohort::transport::tcp {
namespace {

constexpr std::uint32_t kCardMagic = 0x35435743;  // "CWC5"
constexpr std::size_t kLongestText = 512;
constexpr std::uint32_t kMostAddresses = 64;

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string said(std::string_view who, const Hello& hello, const Answer& answer) {
  std::string text(who);
  text += bytes_of(hello);
  text += bytes_of(answer).substr(0, offsetof(Answer, proof));
  return text;
}

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

WorldKey derive_key(std::span<const std::uint8_t> secret, std::string_view token, Protection protection) {
  WorldKey key;
  key.key =
      net::hmac_sha256(secret, fmt::format("cohort ranks 2 protection {} {}", static_cast<int>(protection), token));
  const net::Mac number = net::hmac_sha256(key.key, "number of the world");
  std::copy_n(number.begin(), key.world.size(), key.world.begin());
  return key;
}

net::Mac hello_proof(const WorldKey& key, const Hello& hello) {
  return net::hmac_sha256(key.key, "hello" + std::string(bytes_of(hello).substr(0, offsetof(Hello, proof))));
}

net::Mac answer_proof(const WorldKey& key, const Hello& hello, const Answer& answer) {
  return net::hmac_sha256(key.key, said("answer", hello, answer));
}

net::Mac finish_proof(const WorldKey& key, const Hello& hello, const Answer& answer) {
  std::string text = said("finish", hello, answer);
  text += bytes_of(answer.proof);
  return net::hmac_sha256(key.key, text);
}

net::Mac session_key(const WorldKey& key, const Hello& hello, const Answer& answer) {
  return net::hmac_sha256(key.key, said("session", hello, answer));
}

net::FrameMac::Key direction_key(const net::Mac& session, bool of_opener) {
  const net::Mac whole = net::hmac_sha256(session, of_opener ? "frames of the opener" : "frames of the accepter");
  net::FrameMac::Key key{};
  std::copy_n(whole.begin(), key.size(), key.begin());
  return key;
}

Bytes32 random_bytes() {
  const net::Secret random = value_or_throw(net::Secret::generate());
  Bytes32 bytes{};
  std::copy(random.bytes().begin(), random.bytes().end(), bytes.begin());
  return bytes;
}

template <class M, class A>
void visit_fields(M& m, A& a, const WireCard*) {
  a(codec::constant(kCardMagic, "this is no card of a rank"), m.host, m.machine, m.pid,
    codec::below(m.protection, 3, "a card without its protection"), m.lanes);
  a.demand(m.lanes >= 1 && m.lanes <= kMostLanes, "a card without connections");
  a(codec::most(m.addresses, kMostAddresses, kLongestText), m.mpi_process, m.mpi_job);
}

std::string encode(const WireCard& card) { return codec::encode(card); }
Result<WireCard> decode_wire_card(std::string_view bytes) {
  return codec::decode<WireCard>(bytes, {.longest_text = kLongestText});
}

}  // namespace cohort::transport::tcp
