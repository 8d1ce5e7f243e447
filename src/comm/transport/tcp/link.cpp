#include "comm/transport/tcp/link.h"

#include "base/records.h"
#include "base/unique_fd.h"
#include "net/secret.h"
#include "telemetry/status_page.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

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

void visit_fields(auto& m, auto& a, const Hello*) { a(m.from, m.to, m.lane); }

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

void visit_fields(auto& m, auto& a, const PeerInfo*) {
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

namespace {

constexpr std::size_t kLong = std::size_t{16} << 10;  // after longer frames, little is read ahead
constexpr std::size_t kPeek = std::size_t{2} << 10;
constexpr std::size_t kReadAtOnce = std::size_t{1} << 20;  // most bytes of one turn of a link
// Bytes of a frame with a tag that are hashed and copied together, while they are in the core's own cache.
constexpr std::size_t kTaggedAtOnce = std::size_t{256} << 10;

constexpr const char* kNoTag = "it sent a frame without the tag that proves it";

/// True if sending failed for a reason other than a closed connection. After a close, the peer's last bytes are still
/// read, and then reading detects the end.
bool is_no_end(int error) noexcept { return error != EPIPE && error != ECONNRESET; }

}  // namespace

std::string Link::why_of(int error) const {
  if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH) {
    return fmt::format("its host has not answered for {} s ({})", silence_.count(), errno_text(error));
  }
  return fmt::format("its connection has ended ({})", errno_text(error));
}

Link::Guard Link::Guard::of_tags(std::span<const std::uint8_t, 32> session, bool opened, Protection protection) {
  Guard guard;
  guard.sent = std::make_unique<net::FrameMac>(direction_key(session, opened));
  guard.received = std::make_unique<net::FrameMac>(direction_key(session, !opened));
  guard.all = protection != Protection::Least;
  return guard;
}

/// The kernel's tcp_info up to the counts of time-outs (Linux 6.7), which older headers lack.
struct Link::TcpState {
  tcp_info info;
  std::array<std::byte, 136> between;
  std::uint16_t timeouts;
  std::uint16_t recoveries;
  std::uint32_t timeouts_ms;
};

/// Returns false if the state cannot be read. Adds what the network has lost since the last call to the status page.
bool Link::read_state(TcpState& state) noexcept {
  static_assert(sizeof(tcp_info) == 104 && offsetof(TcpState, timeouts) == 240 && sizeof(TcpState) == 248);
  state = {};
  socklen_t size = sizeof state;
  if (::getsockopt(fd(), IPPROTO_TCP, TCP_INFO, &state, &size) != 0) return false;
  const auto added = [](std::uint32_t& before, std::uint32_t now) {
    const std::uint32_t last = std::exchange(before, now);
    return now > last ? now - last : 0;
  };
  const std::uint32_t segments = added(lost_segments_, state.info.tcpi_total_retrans);
  const std::uint32_t timeouts = added(timeouts_, state.timeouts);
  // An older kernel shows only that a time-out is under way, not how many there were.
  if (size < sizeof state && state.info.tcpi_ca_state == TCP_CA_Loss && state.info.tcpi_unacked > 0)
    state.timeouts_ms = timeouts_ms_ + static_cast<std::uint32_t>(kListen.count());
  const std::uint32_t timeouts_ms = added(timeouts_ms_, state.timeouts_ms);
  if (segments > 0 || timeouts_ms > 0) status::StatusPage::own().note_losses(segments, timeouts, timeouts_ms, host_);
  return true;
}

void Link::begin_connecting(Clock::time_point next) noexcept {
  if (state_ != State::Idle) return;
  state_ = State::Connecting;
  connecting.since = Clock::now();
  connecting.next = next;
}

void Link::up(sys::UniqueFd socket, Guard guard) {
  socket_ = std::move(socket);
  TcpState state{};  // what connecting itself has sent again does not count
  if (socklen_t size = sizeof state; ::getsockopt(fd(), IPPROTO_TCP, TCP_INFO, &state, &size) == 0) {
    lost_segments_ = state.info.tcpi_total_retrans;
    timeouts_ = state.timeouts;
    timeouts_ms_ = state.timeouts_ms;
  }
  guard_ = std::move(guard);
  sys::close_on_fork(fd());
  state_ = State::Up;
}

void Link::close() noexcept {
  if (!socket_) return;
  if (TcpState state; state_ == State::Up || state_ == State::Lost) static_cast<void>(read_state(state));
  sys::forget_on_fork(fd());
  guard_ = {};
  socket_.reset();
}

void Link::lose(std::string why) {
  if (state_ == State::Lost) return;
  state_ = State::Lost;
  why_lost_ = leaving_ ? std::string(kLeft) : std::move(why);
  close();
  if (into_ != nullptr) posted_.push_back(into_);
  in_frame_ = blocked_ = false;
  into_ = nullptr;
}

void Link::look_for_silence(Clock::time_point now) {
  const auto patience = std::chrono::milliseconds(silence_) - std::chrono::milliseconds(300);
  constexpr auto kInARow = std::chrono::milliseconds(1000);
  if (state_ != State::Up) return;
  TcpState state;
  if (!read_state(state)) return;
  const tcp_info& about = state.info;
  // Retransmitted bytes or keep-alive and window probes that have no answer yet.
  const bool unanswered = (about.tcpi_unacked > 0 && about.tcpi_retransmits > 0) || about.tcpi_probes > 0;
  if (!unanswered) return unanswered_since_.reset();
  if (!unanswered_since_) unanswered_since_ = now;
  if (now - *unanswered_since_ < kInARow || std::chrono::milliseconds(about.tcpi_last_ack_recv) < patience) return;
  lose(why_of(ETIMEDOUT));
}

// --- sending ---

std::span<const std::byte> Link::Item::from(std::size_t at) const noexcept {
  if (at < sizeof header) return std::as_bytes(std::span(&header, 1)).subspan(at);
  at -= sizeof header;
  if (at < header.bytes) return {data(at), header.bytes - at};
  return std::span(tag).subspan(at - header.bytes);
}

Link::Item& Link::enqueue(FrameKind kind, std::uint32_t tag, std::uint64_t operation, std::size_t bytes) {
  Item& item = queue_.emplace_back();
  item.header = {kMark | static_cast<std::uint32_t>(kind), tag, operation, bytes};
  return item;
}

void Link::send(Outgoing& frame) {
  if (ended_) {
    frame.done.store(true, std::memory_order_release);
    return;
  }
  if (state_ == State::Lost) return;
  Item& item = enqueue(FrameKind::Data, frame.tag, frame.operation, frame.bytes);
  item.frame = &frame;
}

void Link::send_copy(FrameKind kind, std::uint32_t tag, std::string_view bytes) {
  if (state_ == State::Lost) return;
  enqueue(kind, tag, 0, bytes.size()).copy = bytes;
}

/// True if a frame needs a tag. Frames may be queued before the link is connected, so this is decided when they are
/// sent.
bool Link::needs_tag(FrameKind kind, bool authenticated) const noexcept {
  return !guard_.tls && (guard_.all || kind != FrameKind::Data || authenticated);
}

/// Adds the frame's bytes up to `end` to its tag. Called before they are sent, so that the tag can directly follow
/// them.
void Link::cover(Item& item, std::size_t end) {
  const std::size_t length = sizeof item.header + item.header.bytes;
  if (item.covered == 0) guard_.sent->begin();
  while (item.covered < std::min(end, length)) {
    const auto piece = item.from(item.covered);
    const std::size_t step = std::min(piece.size(), end - item.covered);
    guard_.sent->add(piece.data(), step);
    item.covered += step;
    if (item.covered == length) item.tag = guard_.sent->finish();
  }
}

/// Records that this many bytes of the queue have been sent.
void Link::advance(std::size_t bytes) {
  while (bytes > 0) {
    Item& item = queue_.front();
    const std::size_t step = std::min(bytes, item.length() - item.sent);
    item.sent += step;
    bytes -= step;
    if (item.sent < item.length()) return;
    if (item.frame != nullptr) item.frame->done.store(true, std::memory_order_release);
    queue_.pop_front();
  }
}

/// Sends one TLS record at a time. Small frames share a record; a frame's memory is free when copied into the record.
bool Link::flush_encrypted() {
  constexpr std::size_t kRecord = std::size_t{16} << 10;
  bool any = false;
  while (state_ == State::Up) {
    if (sealed_ == sealing_.size()) {
      sealing_.clear();
      sealed_ = 0;
      while (!queue_.empty() && sealing_.size() < kRecord) {
        const auto there = queue_.front().from(queue_.front().sent);
        const auto piece = there.first(std::min(kRecord - sealing_.size(), there.size()));
        sealing_.insert(sealing_.end(), piece.begin(), piece.end());
        advance(piece.size());
      }
      if (sealing_.empty()) return any;
    }
    const auto taken = guard_.tls->write(std::span(sealing_).subspan(sealed_));
    if (!taken) {
      const int error = errno;
      if (taken.error().code() != ErrorCode::PeerLost) {
        lose(taken.error().what());
      } else if (is_no_end(error)) {
        lose(why_of(error));
      }
      return any;
    }
    if (*taken == 0) return any;
    any = true;
    sealed_ += *taken;
  }
  return any;
}

bool Link::flush() {
  if (guard_.tls) return flush_encrypted();
  constexpr std::size_t kMostPieces = 32;
  bool any = false;
  while (state_ == State::Up && !queue_.empty()) {
    std::array<iovec, kMostPieces> pieces;
    std::size_t count = 0;
    std::size_t total = 0;
    for (Item& item : queue_) {
      if (needs_tag(item.kind(), item.authenticated())) item.header.kind |= kTagged;
      const std::size_t most = item.tagged() ? kTaggedAtOnce : kReadAtOnce;
      if (count + 3 > kMostPieces || total >= most) break;
      const std::size_t end = std::min(item.sent + (most - total), item.length());
      if (item.tagged()) cover(item, end);
      for (std::size_t at = item.sent; at < end;) {
        const auto there = item.from(at);
        const auto piece = there.first(std::min(there.size(), end - at));
        pieces[count++] = {const_cast<std::byte*>(piece.data()), piece.size()};
        at += piece.size();
        total += piece.size();
      }
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(fd(), &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      if (errno != EAGAIN && is_no_end(errno)) lose(why_of(errno));
      return any;
    }
    any = true;
    advance(static_cast<std::size_t>(sent));
    if (static_cast<std::size_t>(sent) < total) return any;
  }
  return any;
}

// --- receiving ---

void Link::receive(Incoming& frame) {
  if (ended_) return;
  if (frame.operation == over_ + 1) running_ = frame.operation;
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    if (kept->header.operation != frame.operation || kept->header.tag != frame.tag) continue;
    if (lacks_tag(kept->header, frame.authenticated)) return lose(kNoTag);
    frame.bytes = kept->bytes.size();
    if (frame.bytes <= frame.room) {
      if (frame.bytes > 0) std::memcpy(frame.to, kept->bytes.data(), frame.bytes);
    }
    kept_.erase(kept);
    frame.done.store(true, std::memory_order_release);
    return;
  }
  posted_.push_back(&frame);
  blocked_ = false;  // this may be the frame that the link waits for; the next read checks
}

bool Link::owes() const noexcept {
  return !posted_.empty() || into_ != nullptr ||
         std::any_of(queue_.begin(), queue_.end(), [](const Item& item) { return item.frame != nullptr; });
}

void Link::forget(std::uint64_t operation) {
  over_ = operation;
  kept_.erase(
      std::remove_if(kept_.begin(), kept_.end(), [&](const Kept& kept) { return kept.header.operation <= operation; }),
      kept_.end());
}

void Link::end() {
  ended_ = true;
  posted_.clear();
  kept_.clear();
  if (in_frame_ && into_ != nullptr) {
    into_ = nullptr;
    to_ = nullptr;  // drop the frame's remaining bytes
  }
  blocked_ = false;  // frames that are not posted are now dropped
  std::deque<Item> kept;
  for (Item& item : queue_) {
    if (item.frame == nullptr) {
      kept.push_back(std::move(item));
    } else if (item.sent > 0 || item.covered > 0) {
      // The frame has been partly sent or added to the tag, so its rest is sent from a copy, and the peer can parse
      // what follows. The part already sent may be most of a large frame, and is not copied.
      item.left_out = std::min(item.sent - std::min(item.sent, sizeof item.header), item.frame->bytes);
      item.copy.assign(reinterpret_cast<const char*>(item.frame->data) + item.left_out,
                       item.frame->bytes - item.left_out);
      item.frame->done.store(true, std::memory_order_release);
      item.frame = nullptr;
      kept.push_back(std::move(item));
    } else {
      item.frame->done.store(true, std::memory_order_release);
    }
  }
  queue_ = std::move(kept);
}

Incoming* Link::posted(const FrameHeader& header) noexcept {
  for (auto each = posted_.begin(); each != posted_.end(); ++each) {
    Incoming* const frame = *each;
    if (frame->operation != header.operation || frame->tag != header.tag) continue;
    posted_.erase(each);
    return frame;
  }
  return nullptr;
}

void Link::break_off(TransportEvents& events, std::string why) {
  lose(why);
  events.on_broken(peer_, why);
}

/// Decides, after a frame's header has arrived, where its bytes go. Returns false if they have to wait, or the link is
/// lost.
bool Link::begin_frame(TransportEvents& events) {
  const auto kind = check(header_);
  if (!kind) {
    break_off(events, kind.error().what());
    return false;
  }
  into_ = nullptr;
  to_ = nullptr;
  keeps_ = false;
  if (lacks_tag(header_, false)) {
    break_off(events, kNoTag);
    return false;
  }
  if (*kind != FrameKind::Data || ended_) {
    if (*kind != FrameKind::Data) {
      aside_.resize(header_.bytes);
      to_ = aside_.data();
    }
  } else if (Incoming* const frame = posted(header_)) {
    if (header_.bytes > frame->room) {
      break_off(events, fmt::format("it sent {} bytes where {} were expected", header_.bytes, frame->room));
      return false;
    }
    if (lacks_tag(header_, frame->authenticated)) {
      break_off(events, kNoTag);
      return false;
    }
    frame->bytes = header_.bytes;
    into_ = frame;
    to_ = frame->to;
  } else if (header_.bytes <= (header_.operation == running_ ? kMostKeptNow : kMostKept)) {
    keeps_ = true;
    aside_.resize(header_.bytes);
    to_ = aside_.data();
  } else {
    blocked_ = true;
    return false;
  }
  in_frame_ = true;
  got_ = 0;
  if (tagged(header_)) {
    guard_.received->begin();
    guard_.received->add(&header_, sizeof header_);
  }
  return true;
}

bool Link::lacks_tag(const FrameHeader& header, bool authenticated) const noexcept {
  return tagged(header) != needs_tag(kind_of(header), authenticated || tagged(header));
}

/// Checks the tag of a frame whose bytes have all arrived; the tag is in the buffer.
bool Link::is_proven() {
  net::FrameMac::Tag tag;
  std::memcpy(tag.data(), buffer_.get() + begin_, tag.size());
  begin_ += tag.size();
  return net::FrameMac::same(tag, guard_.received->finish());
}

void Link::finish_frame(TransportEvents& events) {
  in_frame_ = false;
  const FrameKind kind = kind_of(header_);
  const std::string_view text(reinterpret_cast<const char*>(aside_.data()),
                              kind == FrameKind::Data ? 0 : aside_.size());
  switch (kind) {
    case FrameKind::Data:
      if (into_ != nullptr) {
        into_->done.store(true, std::memory_order_release);
        into_ = nullptr;
      } else if (keeps_ && !ended_) {
        // The frame may have been posted while it arrived.
        if (Incoming* const frame = posted(header_)) {
          if (lacks_tag(header_, frame->authenticated)) return break_off(events, kNoTag);
          frame->bytes = header_.bytes;
          if (frame->bytes <= frame->room && frame->bytes > 0) std::memcpy(frame->to, aside_.data(), frame->bytes);
          frame->done.store(true, std::memory_order_release);
        } else {
          kept_.push_back({header_, std::exchange(aside_, {})});
        }
      }
      break;
    case FrameKind::Message: events.on_message(peer_, header_.tag, text); break;
    case FrameKind::Ended: events.on_ended(peer_, text); break;
    case FrameKind::Leaving: leaving_ = true; break;
  }
}

/// Processes the buffered bytes. Returns false if no more bytes can be taken.
bool Link::parse(TransportEvents& events) {
  while (state_ == State::Up) {
    if (!in_frame_) {
      if (end_ - begin_ < sizeof(FrameHeader)) return true;
      std::memcpy(&header_, buffer_.get() + begin_, sizeof header_);
      if (!begin_frame(events)) return false;
      begin_ += sizeof(FrameHeader);
    }
    const std::size_t step = std::min<std::size_t>(end_ - begin_, header_.bytes - got_);
    if (to_ != nullptr && step > 0) std::memcpy(to_ + got_, buffer_.get() + begin_, step);
    if (tagged(header_)) guard_.received->add(buffer_.get() + begin_, step);
    got_ += step;
    begin_ += step;
    if (got_ < header_.bytes) return true;
    if (tagged(header_)) {
      if (end_ - begin_ < sizeof(net::FrameMac::Tag)) return true;
      if (!is_proven()) {
        break_off(events, "what it sent was changed on the way: its tag is not right");
        return false;
      }
    }
    finish_frame(events);
  }
  return false;
}

/// Reads like readv; decrypted bytes go only into the first piece.
ssize_t Link::receive_some(std::span<iovec> pieces) {
  if (!guard_.tls) return ::readv(fd(), pieces.data(), static_cast<int>(pieces.size()));
  const auto got = guard_.tls->read({static_cast<std::byte*>(pieces[0].iov_base), pieces[0].iov_len});
  if (!got) {
    const int error = errno;
    if (got.error().code() != ErrorCode::PeerLost) lose(got.error().what());
    errno = error;
    return -1;
  }
  if (!*got) errno = EAGAIN;
  return *got ? static_cast<ssize_t>(**got) : -1;
}

bool Link::read(TransportEvents& events) {
  bool any = false;
  std::size_t total = 0;
  more_ = false;
  while (state_ == State::Up && parse(events)) {
    if (total >= kReadAtOnce) {
      more_ = guard_.tls != nullptr && guard_.tls->holds_bytes();
      return true;
    }
    if (begin_ == end_) {
      begin_ = end_ = 0;
    } else if (begin_ > 0) {
      std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
    // Reads the rest of the frame into its destination, and later bytes into the buffer.
    std::array<iovec, 2> pieces;
    std::size_t count = 0;
    std::size_t direct = 0;
    std::size_t room = kReadAhead - end_;
    if (in_frame_ && to_ != nullptr && got_ < header_.bytes) {
      direct = header_.bytes - got_;
      // Reads little ahead, so that most of a long next frame can be read directly into its destination too.
      if (header_.bytes >= kLong) room = std::min(room, kPeek);
      if (tagged(header_) && direct > kTaggedAtOnce) {
        direct = kTaggedAtOnce;
        room = 0;  // later bytes belong to this frame too
      }
      pieces[count++] = {to_ + got_, direct};
    }
    if (room > 0) pieces[count++] = {buffer_.get() + end_, room};
    const ssize_t got = receive_some(std::span(pieces).first(count));
    if (state_ != State::Up) return true;  // the received bytes were not encrypted correctly
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return any;
    if (got <= 0) {
      lose(got == 0 ? "its connection was closed: its process has ended, or was killed" : why_of(errno));
      return true;
    }
    any = true;
    const std::size_t placed = std::min(static_cast<std::size_t>(got), direct);
    if (placed > 0 && tagged(header_)) guard_.received->add(to_ + got_, placed);
    got_ += placed;
    end_ += static_cast<std::size_t>(got) - placed;
    total += static_cast<std::size_t>(got);
    if (!guard_.tls && static_cast<std::size_t>(got) < direct + room / 2) {  // the socket has no more bytes for now
      parse(events);
      return true;
    }
  }
  return any;
}

}  // namespace cohort::transport::tcp
