#include "horovod/named/rounds.h"

#include <cohort/error.h>

#include <limits>
#include <span>
#include <utility>

namespace cohort::named {
namespace {

constexpr int kTag = 0x6265;  // the engine's communicator carries no other messages
constexpr std::uint64_t kLast = std::numeric_limits<std::uint64_t>::max();
// Timeout of ranks without requests, which may be idle for any time. A year is the core's longest timeout.
constexpr auto kIdle = std::chrono::hours(24 * 365);

}  // namespace

void Wakeup::notify() {
  {
    const std::lock_guard lock(mutex_);
    notified_ = true;
  }
  changed_.notify_one();
}

void Wakeup::request() {
  {
    const std::lock_guard lock(mutex_);
    requested_ = true;
    if (lingering_) return;
  }
  changed_.notify_one();
}

void Wakeup::end_lingering() {
  // Under the mutex, the thread has either seen the change or sleeps.
  { const std::lock_guard lock(mutex_); }
  changed_.notify_one();
}

void Wakeup::wait_until(std::chrono::steady_clock::time_point limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, limit, [&] { return notified_ || requested_; });
  notified_ = requested_ = false;
}

void Wakeup::linger(std::chrono::nanoseconds moment) {
  const auto limit = std::chrono::steady_clock::now() + moment;
  std::unique_lock lock(mutex_);
  lingering_ = true;
  changed_.wait_until(lock, limit, [&] { return notified_ || urgent_ > 0; });
  lingering_ = false;
}

MessageRoundAnnouncer::MessageRoundAnnouncer(Communicator comm, std::shared_ptr<Wakeup> wakeup)
    : comm_(std::move(comm)), wakeup_(std::move(wakeup)) {
  for (int rank = 0; rank < comm_.size(); ++rank) {
    if (rank == comm_.rank()) continue;
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->rank = rank;
    listen(*peers_.back());
  }
}

MessageRoundAnnouncer::~MessageRoundAnnouncer() {
  // Without `close` the communicator has ended, or has to end here, because receives without a sender would wait for a
  // year. Threads that wait for the engine have received the reason.
  for (const auto& peer : peers_) {
    if (!peer->receive.done()) comm_.abort("the engine of named operations has ended");
  }
  const auto wait_out = [](Work& work) {
    try {
      work.wait();
    } catch (const Error&) {  // see above
    }
  };
  for (const auto& peer : peers_) {
    wait_out(peer->receive);
    for (Ring& ring : peer->rings) wait_out(ring.send);
  }
}

void MessageRoundAnnouncer::listen(Peer& peer) {
  SendOptions options;
  options.tag = kTag;
  options.timeout = kIdle;
  peer.receive = comm_.recv(std::span(&peer.incoming, 1), peer.rank, options);
  peer.receive.on_done([wakeup = wakeup_] { wakeup->notify(); });
}

void MessageRoundAnnouncer::take(Peer& peer) {
  peer.receive.wait();
  if (peer.incoming == kLast) {
    peer.closed = true;
    return;
  }
  if (peer.incoming > heard_) heard_ = peer.incoming;
  listen(peer);
}

void MessageRoundAnnouncer::ring(std::uint64_t round) {
  SendOptions options;
  options.tag = kTag;
  for (const auto& peer : peers_) {
    // A peer receives rings between rounds only. Waiting here for an earlier ring, when this round has begun, could be
    // a deadlock with a peer that waits for this rank.
    while (!peer->rings.empty() && peer->rings.front().send.done()) {
      peer->rings.front().send.wait();
      peer->rings.pop_front();
    }
    Ring& ring = peer->rings.emplace_back();
    ring.round = round;
    ring.send = comm_.send(std::span(&std::as_const(ring.round), 1), peer->rank, options);
  }
}

std::uint64_t MessageRoundAnnouncer::heard() {
  for (const auto& peer : peers_) {
    while (!peer->closed && peer->receive.done()) take(*peer);
  }
  return heard_;
}

void MessageRoundAnnouncer::close(std::chrono::milliseconds limit) {
  ring(kLast);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (const auto& peer : peers_) {
    while (!peer->closed) {
      if (!peer->receive.wait_for(deadline - std::chrono::steady_clock::now())) {
        comm_.abort("a rank did not end its engine of named operations in time");
        return;
      }
      take(*peer);
    }
    for (Ring& ring : peer->rings) ring.send.wait();
  }
}

}  // namespace cohort::named
