// A connection between two ranks, and what goes over it: frames, and before them a few messages that say what it is
// for. Layouts are plain and their functions pure; every length and number that comes from a peer is checked by its
// reader.
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
  std::uint32_t kind = 0;  ///< FrameKind, with kMark in the upper bytes and perhaps kTagged
  std::uint32_t tag = 0;
  std::uint64_t operation = 0;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(FrameHeader) == 24);
inline constexpr std::uint32_t kMark = 0x43480200;  // "CH", version 2
inline constexpr std::uint32_t kTagged = 0x80;      // behind its bytes comes a FrameMac::Tag of the header and them
/// Longer frames wait in the socket until they are posted. 64 KiB, and what a slice is rounded up by.
inline constexpr std::size_t kMostKept = std::size_t{68} << 10;
/// Limit for frames of an operation that this rank is in the midst of, longer ones of which do so too: they are posted
/// soon, and putting them aside costs as much as the wire does.
inline constexpr std::size_t kMostKeptNow = std::size_t{8} << 10;
inline constexpr std::size_t kMostMessage = std::size_t{64} << 10;

inline bool tagged(const FrameHeader& header) noexcept { return (header.kind & kTagged) != 0; }
/// Kind of a header that was checked.
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
/// Secret by which the ranks of one world prove themselves, so that a connection belongs to one world. `secret` may be
/// empty: then the token alone has to be secret. Connections of one protection do not pass for another.
net::Secret world_secret(std::span<const std::uint8_t> secret, std::string_view token,
                         Protection protection = Protection::Authenticated);
/// Distinguishes worlds, and need not be kept secret.
std::uint64_t world_number(const net::Secret& of_world);
/// Options of both ends of a connection between ranks.
net::SecureOptions between_ranks();

/// Message of the end that opens the connection.
struct Hello {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint32_t lane = 0;  ///< which of the pair's connections it is to be
};
/// Reply of the other end.
enum class Decision : std::uint8_t { Welcome, UseMine };
/// The opener's last message: a rank that has given up by now does not send it.
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

// One connection of a pair of ranks: what is queued for the peer, what is expected of it, and the socket once there is
// one. Does no waiting. Not thread-safe: the transport's mutex guards it.
class Link {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State { Idle, Connecting, Up, Lost };

  /// A peer whose host does not answer for `silence` is lost.
  Link(int peer, int lane, std::chrono::seconds silence) : peer_(peer), lane_(lane), silence_(silence) {}
  ~Link() { close(); }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int peer() const noexcept { return peer_; }
  int lane() const noexcept { return lane_; }
  State state() const noexcept { return state_; }
  int fd() const noexcept { return socket_.get(); }
  const std::string& why_lost() const noexcept { return why_lost_; }

  // The transport connects; this is its book about it.
  struct Connecting {
    /// Beginning of the first attempt; or when the peer was last heard of, which is busy then, but can be reached.
    Clock::time_point since{};
    Clock::time_point next{};  ///< the next attempt
    std::size_t address = 0;   ///< of the next attempt
    bool only_refused = true;  ///< nobody listened, at every address tried so far
    bool accepting = false;    ///< the peer's own attempt has been welcomed
    int going = 0;             ///< own attempts under way
    std::string last_failure;

    void give_up_accepting() noexcept {
      accepting = false;
      since = Clock::now();
    }
  } connecting;

  void begin_connecting(Clock::time_point next) noexcept;
  /// How what goes over a connection is kept from being changed: by encryption, or by tags behind its frames.
  struct Guard {
    std::unique_ptr<net::TlsStream> tls;
    std::unique_ptr<net::FrameMac> sent, received;  ///< where there is no `tls`
    bool all = true;                                ///< or only the frames that have to be
    static Guard of_tags(std::span<const std::uint8_t, 32> session, bool opened, Protection protection);
  };
  void up(sys::UniqueFd socket, Guard guard);
  void lose(std::string why);

  /// False if the link is lost or has ended.
  void send(Outgoing& frame);
  void send_copy(FrameKind kind, std::uint32_t tag, std::string_view bytes);
  void receive(Incoming& frame);
  void forget(std::uint64_t operation);
  /// A frame is posted that has not come, or one has not been taken.
  bool owes() const noexcept;
  /// Operations' frames are neither sent nor delivered any more, and their memory is not touched.
  void end();

  /// Loses the link if its host has not acknowledged anything for nearly `silence`. A peer that is stopped still does.
  void look_for_silence(Clock::time_point now);
  /// True, after `read`, if its turn was over and bytes lie here that no poll reports.
  bool holds_more() const noexcept { return more_ && state_ == State::Up && !blocked_; }
  /// Sends what the socket takes. True if it took anything.
  bool flush();
  /// Reads what has come.
  bool read(TransportEvents& events);
  bool wants_read() const noexcept { return state_ == State::Up && !blocked_; }
  bool wants_write() const noexcept { return state_ == State::Up && !idle(); }
  bool idle() const noexcept { return queue_.empty() && sealed_ == sealing_.size(); }
  /// Events last registered with epoll.
  std::uint32_t watched = 0;

 private:
  struct Item {
    FrameHeader header;
    Outgoing* frame = nullptr;  // null: `copy`
    std::string copy;
    std::size_t left_out = 0;  // bytes before those in `copy`, which have gone
    std::size_t sent = 0;      // of header, bytes and tag
    std::size_t covered = 0;   // by the tag, of header and bytes; never behind `sent` where there is one
    net::FrameMac::Tag tag;
    /// The frame's bytes from there on.
    const std::byte* data(std::size_t at) const noexcept {
      return frame != nullptr ? frame->data + at : reinterpret_cast<const std::byte*>(copy.data()) + (at - left_out);
    }
    bool tagged() const noexcept { return tcp::tagged(header); }
    FrameKind kind() const noexcept { return kind_of(header); }
    bool authenticated() const noexcept { return frame != nullptr && frame->authenticated; }
    std::size_t length() const noexcept {
      return sizeof(FrameHeader) + header.bytes + (tagged() ? sizeof(net::FrameMac::Tag) : 0);
    }
    /// The bytes from there on that lie in one piece of memory.
    std::span<const std::byte> from(std::size_t at) const noexcept;
  };
  struct Kept {
    FrameHeader header;
    std::vector<std::byte> bytes;
  };

  void close() noexcept;
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
  State state_ = State::Idle;
  sys::UniqueFd socket_;
  std::string why_lost_;
  bool leaving_ = false;  // the peer has said so
  bool ended_ = false;
  bool more_ = false;
  std::optional<Clock::time_point> unanswered_since_;

  std::deque<Item> queue_;
  Guard guard_;
  std::vector<std::byte> sealing_;  // a record's worth of the queue, on its way into `tls`
  std::size_t sealed_ = 0;          // so much of it is there
  std::list<Incoming*> posted_;
  std::deque<Kept> kept_;
  std::uint64_t over_ = 0;     // operations up to this one are
  std::uint64_t running_ = 0;  // of this one frames of this link have been posted

  // The frame that is coming in.
  bool in_frame_ = false;
  bool keeps_ = false;    // it is put aside
  bool blocked_ = false;  // its bytes wait in the socket until it is posted
  FrameHeader header_;
  std::byte* to_ = nullptr;  // null: the bytes are dropped
  std::size_t got_ = 0;
  Incoming* into_ = nullptr;
  std::vector<std::byte> aside_;                                                   // of frames kept and of messages
  std::vector<std::byte> buffer_ = std::vector<std::byte>(std::size_t{64} << 10);  // read ahead
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace cohort::transport::tcp
