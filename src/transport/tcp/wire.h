// What goes over a connection between two ranks: frames, and before them a few messages that say what it is for.
// Plain layouts and pure functions; every length and number that comes from a peer is checked by whoever reads it.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/frame_mac.h"
#include "net/secret.h"
#include "net/secure_connection.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::transport::tcp {

// --- frames ---

enum class FrameKind : std::uint8_t { Data = 1, Message = 2, Ended = 3, Leaving = 4 };

struct FrameHeader {
  std::uint32_t kind = 0;  ///< FrameKind, with kMark in the upper bytes and perhaps kTagged
  std::uint32_t tag = 0;
  std::uint64_t operation = 0;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(FrameHeader) == 24);
inline constexpr std::uint32_t kMark = 0x43480200;  // "CH", version 2
inline constexpr std::uint32_t kTagged = 0x80;      // behind its bytes comes a FrameMac::Tag of the header and them
/// Longer frames wait in the socket until they are posted. 64 KiB, and room for what a slice is rounded up by.
inline constexpr std::size_t kMostKept = std::size_t{68} << 10;
inline constexpr std::size_t kMostMessage = std::size_t{64} << 10;

inline bool tagged(const FrameHeader& header) noexcept { return (header.kind & kTagged) != 0; }
/// Of a header that was checked.
inline FrameKind kind_of(const FrameHeader& header) noexcept {
  return static_cast<FrameKind>(header.kind & 0xFF & ~kTagged);
}
/// Corrupt if these are not the first bytes of a frame.
Result<FrameKind> check(const FrameHeader& header);

inline constexpr int kMostLanes = 16;

// --- handshake: messages of a net::SecureConnection, before its socket is given away for frames ---

enum class Protection : std::uint8_t {
  Least,          ///< messages are authenticated, and frames that have to be (transport.h)
  Authenticated,  ///< every frame is
  Encrypted,      ///< the whole connection is, and with it authenticated
};
/// What makes connections belong to one world: its ranks' own secret, by which they prove themselves. `secret` may be
/// empty: then the token alone has to be one. Connections of one protection do not pass for another.
net::Secret world_secret(std::span<const std::uint8_t> secret, std::string_view token,
                         Protection protection = Protection::Authenticated);
/// Tells worlds apart, and need not be kept secret.
std::uint64_t world_number(const net::Secret& of_world);
/// Of both ends of a connection between ranks.
net::SecureOptions between_ranks();

/// Of the one that opens it.
struct Hello {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint32_t lane = 0;  ///< which of the pair's connections it is to be
};
/// Of the other.
enum class Decision : std::uint8_t { Welcome, UseMine };
/// The opener's last word: whoever has given up by now does not say it.
inline constexpr std::string_view kConfirmed = "confirmed";

std::string encode(const Hello& hello);
Result<Hello> decode_hello(std::string_view bytes);
std::string encode(Decision decision);
Result<Decision> decode_decision(std::string_view bytes);

/// For the frames of the end that opened the connection, or of the one that accepted it; `session` is of this
/// connection alone.
net::FrameMac::Key direction_key(std::span<const std::uint8_t, 32> session, bool of_opener);
using Bytes32 = std::array<std::uint8_t, 32>;
Bytes32 random_bytes();

// --- descriptions: where a rank can be reached, as it says in the store ---

struct PeerInfo {
  std::string host;     ///< for messages
  std::string machine;  ///< equal where loopback addresses reach
  std::int64_t pid = 0;
  Protection protection = Protection::Authenticated;
  int lanes = 1;                        ///< connections it shares data among; of a pair the fewer count
  std::vector<net::Address> addresses;  ///< best first
  std::int32_t mpi_process = -1;        ///< of MPI's count, where MPI is the transport
  std::string mpi_job = {};             ///< equal on ranks that MPI connects
};
std::string encode(const PeerInfo& info);
Result<PeerInfo> decode_peer_info(std::string_view bytes);

}  // namespace cohort::transport::tcp
