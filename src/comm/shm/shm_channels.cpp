#include "comm/shm/local_communicator.h"

#include "base/thread.h"
#include "comm/shm/protocol.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::comm::local {

using messages::Arrival;
using messages::HeaderKind;
using messages::Lock;
using messages::Message;
using messages::MessageHeader;
using messages::Transfer;

namespace {

// Bytes read from a peer's memory with one call. Deadlines and the world's end are checked between calls.
constexpr std::size_t kPullBytes = std::size_t{512} << 10;

}  // namespace

class Arriving;

/// This rank's side of both rings between it and a peer.
class ShmChannel final : public messages::Channel {
 public:
  ShmChannel(ShmChannels& channels, int own, int peer)
      : messages::Channel(channels.layout_.cell_bytes()),
        channels_(channels),
        peer_(peer),
        wakeup_(channels.layout_.wakeup(channels.base_, static_cast<std::size_t>(peer))),
        in_(channels.layout_, channels.base_, peer, own),
        out_(channels.layout_, channels.base_, own, peer),
        room_(out_.cells()) {}

  bool stirred() const noexcept override {
    const std::uint64_t number = next_.load(std::memory_order_relaxed);
    if (stands(in_.cell(number).stamp, number) || channels_.pulls_to_do_.load(std::memory_order_relaxed) > 0)
      return true;
    return blocked_.load(std::memory_order_relaxed) &&
           out_.head().taken.load(std::memory_order_relaxed) + out_.cells() > room_.load(std::memory_order_relaxed);
  }
  bool peek(Arrival& arrival) noexcept override;
  void take() noexcept override;
  bool put(const MessageHeader& header, const std::byte* payload) override;
  void note_met() override { in_.head().delivered.store(++delivered_, std::memory_order_release); }
  std::uint64_t met() const noexcept override { return out_.head().delivered.load(std::memory_order_acquire); }
  std::unique_ptr<Transfer> send_payload(const Message& message, std::uint64_t offer) override;
  std::unique_ptr<Transfer> receive_payload(const Message& message, const MessageHeader& offer) override;

  /// Puts a fragment into a cell. Returns false if there is no space; threads are woken when there is some.
  bool put_fragment(std::uint64_t offer, const std::byte* from, std::size_t bytes);

 private:
  friend class Arriving;
  bool has_room() noexcept;
  void publish(HeaderKind kind);
  void take_fragment(const Cell& cell, const std::byte* payload) noexcept;

  ShmChannels& channels_;
  const int peer_;
  WakeupWord& wakeup_;
  const ShmRing in_, out_;
  std::atomic<std::uint64_t> next_{1};  // number of the next cell of `in_` to take; written under the mutex
  std::uint64_t placed_ = 0;            // number of cells of `out_` written
  std::atomic<std::uint64_t> room_;     // last cell of `out_` known to be free; written under the mutex
  std::atomic<bool> blocked_{false};    // a header or fragment waits for space
  std::uint64_t delivered_ = 0;
  std::vector<Arriving*> arriving_;
};

/// A payload that is read from its sender's memory.
class Pull final : public Transfer {
 public:
  Pull(ShmChannels& channels, int peer, const Message& message, std::uint64_t address)
      : Transfer(false), channels_(channels), peer_(peer), message_(message), address_(address) {
    channels_.pulls_to_do_.fetch_add(1, std::memory_order_relaxed);
  }
  ~Pull() override { channels_.pulls_to_do_.fetch_sub(1, std::memory_order_relaxed); }

  Result<Step> step(Lock& lock) override {
    const std::size_t bytes = std::min(kPullBytes, message_.bytes() - moved_);
    busy = true;
    channels_.pulls_to_do_.fetch_sub(1, std::memory_order_relaxed);
    lock.unlock();
    const auto read = channels_.world_.read_peer(peer_, message_.to + moved_, address_ + moved_, bytes);
    lock.lock();
    busy = false;
    channels_.pulls_to_do_.fetch_add(1, std::memory_order_relaxed);
    if (channels_.world_.ended_before_reads()) return Step::Moved;  // the sender may have reused its memory
    if (!read) return fail(read.error().code(), "{} -- COHORT_PLAN=cross=off does without it", read.error().what());
    moved_ += bytes;
    return moved_ < message_.bytes() ? Step::Moved : Step::Over;
  }

 private:
  ShmChannels& channels_;
  const int peer_;
  const Message& message_;
  const std::uint64_t address_;
  std::size_t moved_ = 0;
};

/// A payload that is received in fragments.
class Arriving final : public Transfer {
 public:
  Arriving(ShmChannel& channel, const Message& message, std::uint64_t which)
      : Transfer(true), offer(which), channel_(channel), message_(message) {
    channel_.arriving_.push_back(this);
  }
  ~Arriving() override {
    channel_.arriving_.erase(std::find(channel_.arriving_.begin(), channel_.arriving_.end(), this));
  }

  void add(const std::byte* from, std::size_t bytes) noexcept {
    bytes = std::min(bytes, message_.bytes() - moved_);
    std::memcpy(message_.to + moved_, from, bytes);
    moved_ += bytes;
  }
  Result<Step> step(Lock&) override { return moved_ < message_.bytes() ? Step::Still : Step::Over; }

  const std::uint64_t offer;

 private:
  ShmChannel& channel_;
  const Message& message_;
  std::size_t moved_ = 0;
};

/// A payload that is sent in fragments.
class Leaving final : public Transfer {
 public:
  Leaving(ShmChannel& channel, const Message& message, std::uint64_t offer)
      : Transfer(false), channel_(channel), message_(message), offer_(offer) {}

  Result<Step> step(Lock&) override {
    const std::size_t before = moved_;
    while (moved_ < message_.bytes()) {
      const std::size_t bytes = std::min(channel_.eager_bytes, message_.bytes() - moved_);
      if (!channel_.put_fragment(offer_, message_.from + moved_, bytes))
        return moved_ > before ? Step::Moved : Step::Still;
      moved_ += bytes;
    }
    return Step::Over;
  }

 private:
  ShmChannel& channel_;
  const Message& message_;
  const std::uint64_t offer_;
  std::size_t moved_ = 0;
};

// --- ShmChannels ---

ShmChannels::ShmChannels(const World& world, std::vector<int> here)
    : Channels(false),
      world_(world),
      here_(std::move(here)),
      layout_(world.layout().ring_layout()),
      base_(world.layout().rings(world.control())),
      wakeup_(layout_.wakeup(base_, static_cast<std::size_t>(world.rank()))),
      pulls_allowed_(world.header().plan.cross_copy_bytes != kNever) {}

bool ShmChannels::leads_to(int peer) const noexcept { return std::binary_search(here_.begin(), here_.end(), peer); }

std::unique_ptr<messages::Channel> ShmChannels::open(int peer) {
  const auto found = std::lower_bound(here_.begin(), here_.end(), peer);
  return std::make_unique<ShmChannel>(*this, world_.rank(), static_cast<int>(found - here_.begin()));
}

void ShmChannels::sleep(std::uint32_t bell, std::chrono::nanoseconds longest) {
  sys::futex_wait(wakeup_.bell, bell, longest);
}

void ShmChannels::ring(WakeupWord& door) noexcept {
  door.bell.fetch_add(1);
  sys::futex_wake_all(door.bell);
}

// --- headers out ---

bool ShmChannel::has_room() noexcept {
  const auto known = [&] { return placed_ < room_.load(std::memory_order_relaxed); };
  const auto ask = [&] { room_.store(room_up_to(out_.head(), out_.cells()), std::memory_order_relaxed); };
  if (known()) return true;
  ask();
  if (!known()) {
    blocked_.store(true, std::memory_order_relaxed);
    ask_for_room(out_.head());
    ask();
    if (!known()) return false;
  }
  if (blocked_.load(std::memory_order_relaxed)) {
    blocked_.store(false, std::memory_order_relaxed);
    out_.head().full.store(0, std::memory_order_relaxed);
  }
  return true;
}

void ShmChannel::publish(HeaderKind kind) {
  Cell& cell = out_.cell(placed_ + 1);
  cell.kind = kind;
  local::publish(cell.stamp, ++placed_);
  if (wakeup_.sleepers.load(std::memory_order_relaxed) != 0) ShmChannels::ring(wakeup_);
}

bool ShmChannel::put(const MessageHeader& header, const std::byte* payload) {
  if (!has_room()) return false;
  const std::uint64_t number = placed_ + 1;
  Cell& cell = out_.cell(number);
  cell.count = header.count;
  cell.tag = header.tag;
  cell.dtype = header.dtype;
  if (header.kind == HeaderKind::Eager) {
    const std::size_t bytes = header.bytes();
    if (bytes > 0) std::memcpy(bytes <= Cell::kInline ? cell.payload : out_.beside(number), payload, bytes);
  } else {
    cell.expected = header.expected;
    cell.about = {header.offer, header.address, header.expected_count};
  }
  publish(header.kind);
  return true;
}

bool ShmChannel::put_fragment(std::uint64_t offer, const std::byte* from, std::size_t bytes) {
  if (!has_room()) return false;
  const std::uint64_t number = placed_ + 1;
  std::memcpy(out_.beside(number), from, bytes);
  Cell& cell = out_.cell(number);
  cell.count = static_cast<std::int64_t>(bytes);
  cell.about = {offer, 0, 0};
  publish(HeaderKind::OfChannel);
  return true;
}

// --- headers in ---

bool ShmChannel::peek(Arrival& arrival) noexcept {
  while (true) {
    const std::uint64_t number = next_.load(std::memory_order_relaxed);
    const Cell& cell = in_.cell(number);
    if (!stands(cell.stamp, number)) return false;
    if (cell.kind == HeaderKind::OfChannel) {
      take_fragment(cell, in_.beside(number));
      take();
      continue;
    }
    MessageHeader& header = arrival.header;
    header.kind = cell.kind;
    header.count = cell.count;
    header.tag = cell.tag;
    header.dtype = cell.dtype;
    if (cell.kind == HeaderKind::Eager) {
      arrival.payload = header.bytes() <= Cell::kInline ? cell.payload : in_.beside(number);
      header.offer = 0;
    } else {
      header.expected = cell.expected;
      header.offer = cell.about.offer;
      header.address = cell.about.address;
      header.expected_count = cell.about.expected_count;
    }
    return true;
  }
}

void ShmChannel::take() noexcept {
  const std::uint64_t number = next_.load(std::memory_order_relaxed);
  const bool sender_waits = release(in_.head(), number);
  next_.store(number + 1, std::memory_order_relaxed);
  if (sender_waits && wakeup_.sleepers.load(std::memory_order_relaxed) != 0) ShmChannels::ring(wakeup_);
}

void ShmChannel::take_fragment(const Cell& cell, const std::byte* payload) noexcept {
  const auto found = std::find_if(arriving_.begin(), arriving_.end(),
                                  [&](const Arriving* each) { return each->offer == cell.about.offer; });
  if (found != arriving_.end()) (*found)->add(payload, static_cast<std::size_t>(cell.count));
}

// --- payloads ---

std::unique_ptr<Transfer> ShmChannel::send_payload(const Message& message, std::uint64_t offer) {
  return std::make_unique<Leaving>(*this, message, offer);
}

std::unique_ptr<Transfer> ShmChannel::receive_payload(const Message& message, const MessageHeader& offer) {
  if (channels_.pulls_allowed_) return std::make_unique<Pull>(channels_, peer_, message, offer.address);
  return std::make_unique<Arriving>(*this, message, offer.offer);
}

}  // namespace cohort::comm::local
