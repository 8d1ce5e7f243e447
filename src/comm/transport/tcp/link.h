// A connection between two ranks, and its protocol: first a few messages that state the connection's purpose, then
// frames. Layouts are plain and their functions pure; the reader checks every length and number from a peer.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"
#include "comm/transport/transport.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/secure_connection.h"
#include "net/tls.h"

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::transport::tcp {

// --- frames ---

enum class FrameKind : std::uint8_t { Data = 1, Message = 2, Ended = 3, Leaving = 4 };

struct FrameHeader {
  std::uint32_t kind = 0;  ///< FrameKind, with kMark in the upper bytes, and maybe kTagged
  std::uint32_t tag = 0;
  std::uint64_t operation = 0;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(FrameHeader) == 24);
inline constexpr std::uint32_t kMark = 0x43480200;  // "CH", version 2
inline constexpr std::uint32_t kTagged = 0x80;      // a FrameMac::Tag of header and bytes follows the frame's bytes
/// Longer frames wait in the socket until they are posted. The value is 64 KiB plus the rounding of a slice.
inline constexpr std::size_t kMostKept = std::size_t{68} << 10;
/// The same limit for frames of the operation that this rank is running. It is lower, since such frames are posted
/// soon, and copying them aside takes as long as the wire.
inline constexpr std::size_t kMostKeptNow = std::size_t{8} << 10;
inline constexpr std::size_t kMostMessage = std::size_t{64} << 10;

inline bool tagged(const FrameHeader& header) noexcept { return (header.kind & kTagged) != 0; }
/// Returns the kind of a checked header.
inline FrameKind kind_of(const FrameHeader& header) noexcept {
  return static_cast<FrameKind>(header.kind & 0xFF & ~kTagged);
}
/// Fails with Corrupt if this is not a valid frame header.
Result<FrameKind> check(const FrameHeader& header);

inline constexpr int kMostLanes = 16;

// --- handshake: messages of a net::SecureConnection, before its socket is detached for frames ---

enum class Protection : std::uint8_t {
  Least,          ///< messages are authenticated, and frames with `authenticated` set (transport.h)
  Authenticated,  ///< every frame is authenticated
  Encrypted,      ///< the whole connection is encrypted and authenticated
};
/// Derives the secret by which the ranks of one world authenticate, so that a connection belongs to one world. If
/// `secret` is empty, the token has to be secret. Each protection has its own secret, so a connection of one protection
/// is not accepted as another.
net::Secret world_secret(std::span<const std::uint8_t> secret, std::string_view token,
                         Protection protection = Protection::Authenticated);
/// Returns a number that distinguishes worlds, and need not be kept secret.
std::uint64_t world_number(const net::Secret& of_world);
/// Options of both ends of a connection between ranks.
net::SecureOptions between_ranks();

/// Message of the end that opens the connection.
struct Hello {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint32_t lane = 0;  ///< number among the pair's connections
};
/// Reply of the other end.
enum class Decision : std::uint8_t { Welcome, UseMine };
/// The opener's last message. An opener that has given up does not send it.
inline constexpr std::string_view kConfirmed = "confirmed";

std::string encode(const Hello& hello);
Result<Hello> decode_hello(std::string_view bytes);
std::string encode(Decision decision);
Result<Decision> decode_decision(std::string_view bytes);

/// Returns the key for frames sent by the opener (`of_opener`) or by the accepting end; `session` is unique to this
/// connection.
net::FrameMac::Key direction_key(std::span<const std::uint8_t, 32> session, bool of_opener);
using Bytes32 = std::array<std::uint8_t, 32>;
Bytes32 random_bytes();

// --- descriptions: addresses at which a rank can be reached, as written to the store ---

struct PeerInfo {
  std::string host;     ///< for messages
  std::string machine;  ///< the same for ranks that reach each other by loopback addresses
  std::int64_t pid = 0;
  Protection protection = Protection::Authenticated;
  int lanes = 1;                        ///< connections among which data is divided; a pair uses the lower number
  std::vector<net::Address> addresses;  ///< best first
  std::int32_t mpi_process = -1;        ///< MPI's process number, if MPI is the transport
  std::string mpi_job = {};             ///< the same on ranks that MPI connects
};
std::string encode(const PeerInfo& info);
Result<PeerInfo> decode_peer_info(std::string_view bytes);

/// How often links are looked at for silence and losses.
inline constexpr std::chrono::milliseconds kListen{100};

// One connection of a pair of ranks: the frames queued for the peer, the frames expected from the peer, and the socket
// after connecting. Never waits. Not thread-safe: the transport's mutex guards the link.
class Link {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State { Idle, Connecting, Up, Lost };

  /// The peer is lost if its host does not answer for `silence`. `host`, its name, outlives the link.
  Link(int peer, int lane, std::chrono::seconds silence, std::string_view host)
      : peer_(peer), lane_(lane), silence_(silence), host_(host) {}
  ~Link() { close(); }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int peer() const noexcept { return peer_; }
  int lane() const noexcept { return lane_; }
  State state() const noexcept { return state_; }
  int fd() const noexcept { return socket_.get(); }
  const std::string& why_lost() const noexcept { return why_lost_; }

  // State of connecting. The transport makes the connection.
  struct Connecting {
    /// Begin of the first attempt, or the last sign of life of a peer that is reachable but busy.
    Clock::time_point since{};
    Clock::time_point next{};  ///< time of the next attempt
    std::size_t address = 0;   ///< address of the next attempt
    bool only_refused = true;  ///< every address tried so far refused the connection
    bool accepting = false;    ///< the peer's own attempt has been welcomed
    int going = 0;             ///< own attempts under way
    std::string last_failure;

    void give_up_accepting() noexcept {
      accepting = false;
      since = Clock::now();
    }
  } connecting;

  void begin_connecting(Clock::time_point next) noexcept;
  /// Protects a connection against modification: by encryption, or by tags behind its frames.
  struct Guard {
    std::unique_ptr<net::TlsStream> tls;
    std::unique_ptr<net::FrameMac> sent, received;  ///< if there is no `tls`
    bool all = true;                                ///< false: only frames that have to be authenticated have tags
    static Guard of_tags(std::span<const std::uint8_t, 32> session, bool opened, Protection protection);
  };
  void up(sys::UniqueFd socket, Guard guard);
  void lose(std::string why);

  /// Queues a frame. After `end`, the frame is `done` immediately; a lost link drops the frame.
  void send(Outgoing& frame);
  void send_copy(FrameKind kind, std::uint32_t tag, std::string_view bytes);
  void receive(Incoming& frame);
  void forget(std::uint64_t operation);
  /// True if the peer has not sent a posted frame, or has not taken a queued one.
  bool owes() const noexcept;
  /// Stops sending and delivering operations' frames; their memory is not touched any more.
  void end();

  /// Marks the link as lost if the peer's host has acknowledged nothing for nearly `silence`. The kernel acknowledges
  /// even if the peer's process is stopped.
  void look_for_silence(Clock::time_point now);
  /// True after `read` if it stopped at its limit and bytes that poll does not report are still buffered.
  bool holds_more() const noexcept { return more_ && state_ == State::Up && !blocked_; }
  /// Sends what the socket takes. Returns true if it took anything.
  bool flush();
  /// Reads the available bytes.
  bool read(TransportEvents& events);
  bool wants_read() const noexcept { return state_ == State::Up && !blocked_; }
  bool wants_write() const noexcept { return state_ == State::Up && !idle(); }
  bool idle() const noexcept { return queue_.empty() && sealed_ == sealing_.size(); }
  /// Events last registered with epoll.
  std::uint32_t watched = 0;

 private:
  struct Item {
    FrameHeader header;
    Outgoing* frame = nullptr;  // null: the bytes are in `copy`
    std::string copy;
    std::size_t left_out = 0;  // bytes of the frame before those in `copy`; they are already sent
    std::size_t sent = 0;      // bytes sent of header, bytes and tag
    std::size_t covered = 0;   // bytes that are in the tag so far; with a tag, at least `sent`
    net::FrameMac::Tag tag;
    /// The frame's bytes from position `at` on.
    const std::byte* data(std::size_t at) const noexcept {
      return frame != nullptr ? frame->data + at : reinterpret_cast<const std::byte*>(copy.data()) + (at - left_out);
    }
    bool tagged() const noexcept { return tcp::tagged(header); }
    FrameKind kind() const noexcept { return kind_of(header); }
    bool authenticated() const noexcept { return frame != nullptr && frame->authenticated; }
    std::size_t length() const noexcept {
      return sizeof(FrameHeader) + header.bytes + (tagged() ? sizeof(net::FrameMac::Tag) : 0);
    }
    /// The bytes from position `at` on that are contiguous in memory.
    std::span<const std::byte> from(std::size_t at) const noexcept;
  };
  struct Kept {
    FrameHeader header;
    std::vector<std::byte> bytes;
  };

  void close() noexcept;
  struct TcpState;
  bool read_state(TcpState& state) noexcept;
  Item& enqueue(FrameKind kind, std::uint32_t tag, std::uint64_t operation, std::size_t bytes);
  bool needs_tag(FrameKind kind, bool authenticated) const noexcept;
  void cover(Item& item, std::size_t end);
  bool flush_encrypted();
  void advance(std::size_t bytes);
  ssize_t receive_some(std::span<iovec> pieces);
  bool parse(TransportEvents& events);
  bool begin_frame(TransportEvents& events);
  bool lacks_tag(const FrameHeader& header, bool authenticated) const noexcept;
  bool is_proven();
  void finish_frame(TransportEvents& events);
  Incoming* posted(const FrameHeader& header) noexcept;
  void break_off(TransportEvents& events, std::string why);

  std::string why_of(int error) const;

  const int peer_;
  const int lane_;
  const std::chrono::seconds silence_;
  const std::string_view host_;
  State state_ = State::Idle;
  sys::UniqueFd socket_;
  std::string why_lost_;
  bool leaving_ = false;  // the peer has announced that it leaves
  bool ended_ = false;
  bool more_ = false;
  std::optional<Clock::time_point> unanswered_since_;
  std::uint32_t lost_segments_ = 0, timeouts_ = 0,
                timeouts_ms_ = 0;  // of this connection, as last reported

  std::deque<Item> queue_;
  Guard guard_;
  std::vector<std::byte> sealing_;  // up to one TLS record of the queue, to be written to `tls`
  std::size_t sealed_ = 0;          // bytes of `sealing_` already written
  std::list<Incoming*> posted_;
  std::deque<Kept> kept_;
  std::uint64_t over_ = 0;     // operations up to this one are over
  std::uint64_t running_ = 0;  // the latest operation with frames posted at this link

  // The next members describe the frame that is being received.
  bool in_frame_ = false;
  bool keeps_ = false;    // the frame is stored until it is posted
  bool blocked_ = false;  // the frame's bytes wait in the socket until it is posted
  FrameHeader header_;
  std::byte* to_ = nullptr;  // null: the bytes are dropped
  std::size_t got_ = 0;
  Incoming* into_ = nullptr;
  std::vector<std::byte> aside_;  // stored frames and messages
  // Bytes read ahead. Not initialised: a link of small frames touches a page of it, and a rank may have a thousand
  // links.
  static constexpr std::size_t kReadAhead = std::size_t{64} << 10;
  std::unique_ptr<std::byte[]> buffer_ = std::make_unique_for_overwrite<std::byte[]>(kReadAhead);
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace cohort::transport::tcp
