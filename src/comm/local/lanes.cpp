#include "comm/local/lanes.h"

#include "comm/local/protocol.h"
#include "sys/futex.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::comm::local {

using messages::Arrival;
using messages::Letter;
using messages::LetterKind;
using messages::Lock;
using messages::Message;
using messages::Transfer;

namespace {

// Read out of a peer's memory at a time: deadlines and abort are looked after between.
constexpr std::size_t kPullBytes = std::size_t{512} << 10;

}  // namespace

class Arriving;

/// This rank's side of both lanes between it and a peer.
class LanePath final : public messages::Path {
 public:
  LanePath(Lanes& lanes, int own, int peer)
      : messages::Path(lanes.layout_.cell_bytes()),
        lanes_(lanes),
        peer_(peer),
        doorbell_(lanes.layout_.doorbell(lanes.base_, static_cast<std::size_t>(peer))),
        in_(lanes.layout_, lanes.base_, peer, own),
        out_(lanes.layout_, lanes.base_, own, peer),
        room_(out_.cells()) {}

  bool stirred() const noexcept override {
    const std::uint64_t number = next_.load(std::memory_order_relaxed);
    if (stands(in_.cell(number).stamp, number) || lanes_.pulls_to_do_.load(std::memory_order_relaxed) > 0) return true;
    return blocked_.load(std::memory_order_relaxed) &&
           out_.head().taken.load(std::memory_order_relaxed) + out_.cells() > room_.load(std::memory_order_relaxed);
  }
  bool peek(Arrival& arrival) noexcept override;
  void take() noexcept override;
  bool put(const Letter& letter, const std::byte* payload) override;
  void note_met() override { in_.head().delivered.store(++delivered_, std::memory_order_release); }
  std::uint64_t met() const noexcept override { return out_.head().delivered.load(std::memory_order_acquire); }
  std::unique_ptr<Transfer> send_payload(const Message& message, std::uint64_t offer) override;
  std::unique_ptr<Transfer> receive_payload(const Message& message, const Letter& offer) override;

  /// False if there is no room. Whoever waits for some is rung.
  bool put_fragment(std::uint64_t offer, const std::byte* from, std::size_t bytes);

 private:
  friend class Arriving;
  bool has_room() noexcept;
  void publish(LetterKind kind);
  void take_fragment(const Cell& cell, const std::byte* payload) noexcept;

  Lanes& lanes_;
  const int peer_;
  Doorbell& doorbell_;
  const Lane in_, out_;
  std::atomic<std::uint64_t> next_{1};  // cell of `in`; written under the mutex
  std::uint64_t placed_ = 0;            // cells of `out` written
  std::atomic<std::uint64_t> room_;     // up to this cell `out` is known to be free; written under the mutex
  std::atomic<bool> blocked_{false};    // something waits for room
  std::uint64_t delivered_ = 0;
  std::vector<Arriving*> arriving_;
};

/// A payload that is read out of its sender's memory.
class Pull final : public Transfer {
 public:
  Pull(Lanes& lanes, int peer, const Message& message, std::uint64_t address)
      : Transfer(false), lanes_(lanes), peer_(peer), message_(message), address_(address) {
    lanes_.pulls_to_do_.fetch_add(1, std::memory_order_relaxed);
  }
  ~Pull() override { lanes_.pulls_to_do_.fetch_sub(1, std::memory_order_relaxed); }

  Result<Step> step(Lock& lock) override {
    const std::size_t bytes = std::min(kPullBytes, message_.bytes() - moved_);
    busy = true;
    lanes_.pulls_to_do_.fetch_sub(1, std::memory_order_relaxed);
    lock.unlock();
    const auto read = lanes_.world_.read_peer(peer_, message_.to + moved_, address_ + moved_, bytes);
    lock.lock();
    busy = false;
    lanes_.pulls_to_do_.fetch_add(1, std::memory_order_relaxed);
    if (lanes_.world_.ended_before_reads()) return Step::Moved;  // the sender may have given its memory up
    if (!read) return fail(read.error().code(), "{} -- COHORT_PLAN=cross=off does without it", read.error().what());
    moved_ += bytes;
    return moved_ < message_.bytes() ? Step::Moved : Step::Over;
  }

 private:
  Lanes& lanes_;
  const int peer_;
  const Message& message_;
  const std::uint64_t address_;
  std::size_t moved_ = 0;
};

/// A payload that comes in fragments.
class Arriving final : public Transfer {
 public:
  Arriving(LanePath& path, const Message& message, std::uint64_t which)
      : Transfer(true), offer(which), path_(path), message_(message) {
    path_.arriving_.push_back(this);
  }
  ~Arriving() override { path_.arriving_.erase(std::find(path_.arriving_.begin(), path_.arriving_.end(), this)); }

  void add(const std::byte* from, std::size_t bytes) noexcept {
    bytes = std::min(bytes, message_.bytes() - moved_);
    std::memcpy(message_.to + moved_, from, bytes);
    moved_ += bytes;
  }
  Result<Step> step(Lock&) override { return moved_ < message_.bytes() ? Step::Still : Step::Over; }

  const std::uint64_t offer;

 private:
  LanePath& path_;
  const Message& message_;
  std::size_t moved_ = 0;
};

/// A payload that goes in fragments.
class Leaving final : public Transfer {
 public:
  Leaving(LanePath& path, const Message& message, std::uint64_t offer)
      : Transfer(false), path_(path), message_(message), offer_(offer) {}

  Result<Step> step(Lock&) override {
    const std::size_t before = moved_;
    while (moved_ < message_.bytes()) {
      const std::size_t bytes = std::min(path_.eager_bytes, message_.bytes() - moved_);
      if (!path_.put_fragment(offer_, message_.from + moved_, bytes))
        return moved_ > before ? Step::Moved : Step::Still;
      moved_ += bytes;
    }
    return Step::Over;
  }

 private:
  LanePath& path_;
  const Message& message_;
  const std::uint64_t offer_;
  std::size_t moved_ = 0;
};

// --- Lanes ---

Lanes::Lanes(const World& world, std::vector<int> here)
    : Paths(false),
      world_(world),
      here_(std::move(here)),
      layout_(world.layout().lane_layout()),
      base_(world.layout().lanes(world.control())),
      doorbell_(layout_.doorbell(base_, static_cast<std::size_t>(world.rank()))),
      pulls_allowed_(world.header().plan.cross_copy_bytes != kNever) {}

bool Lanes::leads_to(int peer) const noexcept { return std::binary_search(here_.begin(), here_.end(), peer); }

std::unique_ptr<messages::Path> Lanes::open(int peer) {
  const auto found = std::lower_bound(here_.begin(), here_.end(), peer);
  return std::make_unique<LanePath>(*this, world_.rank(), static_cast<int>(found - here_.begin()));
}

void Lanes::sleep(std::uint32_t bell, std::chrono::nanoseconds longest) {
  sys::futex_wait(doorbell_.bell, bell, longest);
}

void Lanes::ring(Doorbell& door) noexcept {
  door.bell.fetch_add(1);
  sys::futex_wake_all(door.bell);
}

// --- letters out ---

bool LanePath::has_room() noexcept {
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

void LanePath::publish(LetterKind kind) {
  Cell& cell = out_.cell(placed_ + 1);
  cell.kind = kind;
  local::publish(cell.stamp, ++placed_);
  if (doorbell_.sleepers.load(std::memory_order_relaxed) != 0) Lanes::ring(doorbell_);
}

bool LanePath::put(const Letter& letter, const std::byte* payload) {
  if (!has_room()) return false;
  const std::uint64_t number = placed_ + 1;
  Cell& cell = out_.cell(number);
  cell.count = letter.count;
  cell.tag = letter.tag;
  cell.dtype = letter.dtype;
  if (letter.kind == LetterKind::Eager) {
    const std::size_t bytes = letter.bytes();
    if (bytes > 0) std::memcpy(bytes <= Cell::kInline ? cell.payload : out_.beside(number), payload, bytes);
  } else {
    cell.expected = letter.expected;
    cell.about = {letter.offer, letter.address, letter.expected_count};
  }
  publish(letter.kind);
  return true;
}

bool LanePath::put_fragment(std::uint64_t offer, const std::byte* from, std::size_t bytes) {
  if (!has_room()) return false;
  const std::uint64_t number = placed_ + 1;
  std::memcpy(out_.beside(number), from, bytes);
  Cell& cell = out_.cell(number);
  cell.count = static_cast<std::int64_t>(bytes);
  cell.about = {offer, 0, 0};
  publish(LetterKind::OfPath);
  return true;
}

// --- letters in ---

bool LanePath::peek(Arrival& arrival) noexcept {
  while (true) {
    const std::uint64_t number = next_.load(std::memory_order_relaxed);
    const Cell& cell = in_.cell(number);
    if (!stands(cell.stamp, number)) return false;
    if (cell.kind == LetterKind::OfPath) {
      take_fragment(cell, in_.beside(number));
      take();
      continue;
    }
    Letter& letter = arrival.letter;
    letter.kind = cell.kind;
    letter.count = cell.count;
    letter.tag = cell.tag;
    letter.dtype = cell.dtype;
    if (cell.kind == LetterKind::Eager) {
      arrival.payload = letter.bytes() <= Cell::kInline ? cell.payload : in_.beside(number);
      letter.offer = 0;
    } else {
      letter.expected = cell.expected;
      letter.offer = cell.about.offer;
      letter.address = cell.about.address;
      letter.expected_count = cell.about.expected_count;
    }
    return true;
  }
}

void LanePath::take() noexcept {
  const std::uint64_t number = next_.load(std::memory_order_relaxed);
  const bool sender_waits = release(in_.head(), number);
  next_.store(number + 1, std::memory_order_relaxed);
  if (sender_waits && doorbell_.sleepers.load(std::memory_order_relaxed) != 0) Lanes::ring(doorbell_);
}

void LanePath::take_fragment(const Cell& cell, const std::byte* payload) noexcept {
  const auto found = std::find_if(arriving_.begin(), arriving_.end(),
                                  [&](const Arriving* each) { return each->offer == cell.about.offer; });
  if (found != arriving_.end()) (*found)->add(payload, static_cast<std::size_t>(cell.count));
}

// --- payloads ---

std::unique_ptr<Transfer> LanePath::send_payload(const Message& message, std::uint64_t offer) {
  return std::make_unique<Leaving>(*this, message, offer);
}

std::unique_ptr<Transfer> LanePath::receive_payload(const Message& message, const Letter& offer) {
  if (lanes_.pulls_allowed_) return std::make_unique<Pull>(lanes_, peer_, message, offer.address);
  return std::make_unique<Arriving>(*this, message, offer.offer);
}

}  // namespace cohort::comm::local
