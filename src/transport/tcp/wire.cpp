#include "transport/tcp/wire.h"

#include "base/codec.h"
#include "net/secret.h"

#include <algorithm>
#include <cstring>

namespace cohort::transport::tcp {
namespace {

constexpr std::uint32_t kCardMagic = 0x34435743;  // "CWC4"
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

std::string encode(const WireCard& card) {
  codec::Writer out;
  out.number(kCardMagic)
      .text(card.host)
      .text(card.machine)
      .number(card.pid)
      .number(static_cast<std::uint8_t>(card.protection));
  out.number(static_cast<std::uint8_t>(card.lanes));
  out.number(static_cast<std::uint32_t>(card.addresses.size()));
  for (const net::Address& address : card.addresses) out.text(address.host).number(address.port);
  return out.number(card.mpi_process).text(card.mpi_job).take();
}

Result<WireCard> decode_wire_card(std::string_view bytes) {
  codec::Reader in(bytes);
  WireCard card;
  const auto magic = in.number<std::uint32_t>();
  if (!magic || *magic != kCardMagic) return fail(ErrorCode::Corrupt, "this is no card of a rank");
  for (std::string* const text : {&card.host, &card.machine}) {
    const auto value = in.text(kLongestText);
    if (!value) return tl::unexpected(value.error());
    *text = *value;
  }
  const auto pid = in.number<std::int64_t>();
  if (!pid) return tl::unexpected(pid.error());
  card.pid = *pid;
  const auto protection = in.number<std::uint8_t>();
  if (!protection || *protection > 2) return fail(ErrorCode::Corrupt, "a card without its protection");
  card.protection = static_cast<Protection>(*protection);
  const auto lanes = in.number<std::uint8_t>();
  if (!lanes || *lanes < 1 || *lanes > kMostLanes) return fail(ErrorCode::Corrupt, "a card without connections");
  card.lanes = *lanes;
  const auto count = in.number<std::uint32_t>();
  if (!count) return tl::unexpected(count.error());
  if (*count > kMostAddresses) return fail(ErrorCode::Corrupt, "a card with {} addresses", *count);
  for (std::uint32_t i = 0; i < *count; ++i) {
    const auto host = in.text(kLongestText);
    if (!host) return tl::unexpected(host.error());
    const auto port = in.number<std::uint16_t>();
    if (!port) return tl::unexpected(port.error());
    card.addresses.push_back({std::string(*host), *port});
  }
  const auto process = in.number<std::int32_t>();
  if (!process) return tl::unexpected(process.error());
  card.mpi_process = *process;
  const auto job = in.text(kLongestText);
  if (!job) return tl::unexpected(job.error());
  card.mpi_job = *job;
  if (!in.at_end()) return fail(ErrorCode::Corrupt, "bytes after the end of a card");
  return card;
}

}  // namespace cohort::transport::tcp
