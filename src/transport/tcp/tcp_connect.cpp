// How pairs of ranks come to their connection: all addresses of the peer, one shortly after the other; the first that
// proves itself stays. Of two that open one to each other at once, the lower rank's stays.
#include "base/log.h"
#include "net/socket.h"
#include "transport/tcp/tcp_transport.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

namespace cohort::transport::tcp {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kOfAttempt = std::uint64_t{2} << 32;

constexpr auto kBetweenAddresses = 20ms;
constexpr auto kBetweenRounds = 150ms;
constexpr auto kAttempt = 5s;  // until it is given up
constexpr auto kRefused = 2s;  // nobody listens anywhere, for that long: the peer is gone
constexpr auto kUnreachable = 10s;
constexpr std::size_t kMostStrangers = 128;  // beyond, and one for each link, one goes
constexpr int kAcceptedAtOnce = 64;
constexpr int kMostProbes = 127;  // as many as the kernel takes for TCP_KEEPCNT

// The kernel asks a peer that is silent for a sign of life, so that a dead host or cable is noticed while nothing is
// sent, within `silence`; at 3 s a cut of 1 s is survived. While something is sent, Link::look_for_silence looks after
// it: the kernel's own limit for that (TCP_USER_TIMEOUT) also ends connections to processes that are only stopped.
void keep_alive(int fd, std::chrono::seconds silence) {
  const int on = 1;
  const int idle_seconds = 1;
  const int after_that = std::max(1, static_cast<int>(silence.count()) - idle_seconds);
  const int between_seconds = after_that / kMostProbes + 1;
  const int count = std::max(1, after_that / between_seconds);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_seconds, sizeof idle_seconds);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between_seconds, sizeof between_seconds);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

}  // namespace

std::vector<net::Address> TcpTransport::reachable(int peer) const {
  const WireCard& card = cards_[static_cast<std::size_t>(peer)];
  const bool same_machine = card.machine == cards_[static_cast<std::size_t>(rank_)].machine;
  std::vector<net::Address> addresses;
  for (const net::Address& address : card.addresses) {
    if (same_machine || !net::is_loopback_name(address.host)) addresses.push_back(address);
  }
  return addresses;
}

/// Begins attempts that are due and gives up those that take too long.
bool TcpTransport::look_after_connecting() {
  const auto now = Clock::now();
  bool any = false;
  connecting_ = false;
  for (Link* const link : open_) {
    if (link->state() != Link::State::Connecting) continue;
    connecting_ = true;
    if (now >= link->connecting.next && !link->connecting.accepting) {
      connect_next(*link, now);
      any = true;
    }
  }
  if (now - looked_ < 50ms) return any;
  looked_ = now;
  if (doors_shut_) open_doors(now);
  std::vector<std::uint32_t> late;
  for (const auto& [id, attempt] : attempts_) {
    if (now - attempt.begun() > kAttempt) late.push_back(id);
  }
  for (const std::uint32_t id : late) {
    const Attempt attempt = std::move(attempts_.at(id));
    attempts_.erase(id);
    if (!attempt.opens()) turn_away(attempt);
    if (attempt.peer() < 0) continue;
    Link& link = *links_[index_of(attempt.peer(), attempt.lane())];
    if (attempt.opens()) {
      --link.connecting.going;
      link.connecting.only_refused = false;
      link.connecting.last_failure = "no answer";
    } else {
      link.connecting.accepting = false;
    }
  }
  return any;
}

void TcpTransport::connect_next(Link& link, Clock::time_point now) {
  Link::Connecting& book = link.connecting;
  const std::vector<net::Address> addresses = reachable(link.peer());
  const auto waited = now - book.since;
  if (addresses.empty()) {
    link.lose("it has no address that can be reached from here; COHORT_NETWORK may have left none in common");
    return;
  }
  const bool tried_all = book.address >= addresses.size();
  if (tried_all && book.going > 0 && waited < kUnreachable) {
    book.next = now + kBetweenAddresses;
    return;
  }
  if (tried_all && waited >= (book.only_refused ? std::chrono::milliseconds(kRefused) : kUnreachable)) {
    std::string where;
    for (const net::Address& address : addresses) where += (where.empty() ? "" : ", ") + net::to_string(address);
    close_attempts(link.peer(), link.lane());
    link.lose(
        fmt::format("it cannot be reached at {} ({}): its process has ended, or a firewall or a wrong network is in "
                    "between",
                    where, book.last_failure));
    return;
  }
  if (tried_all) {
    book.address = 0;
    book.next = now + kBetweenRounds;
    return;
  }
  const std::size_t which = book.address++;
  book.next = now + kBetweenAddresses;
  ++book.going;
  add_attempt(Attempt::open(key_, rank_, link.peer(), link.lane(), addresses[which]));
}

void TcpTransport::add_attempt(Attempt attempt) {
  const std::uint32_t id = next_attempt_++;
  const int fd = attempt.fd();
  const std::uint32_t events = attempt.events();
  const bool failed = attempt.state() == Attempt::State::Failed;
  attempts_.emplace(id, std::move(attempt));
  if (failed) return advance(id);
  watch_fd(fd, events, kOfAttempt | id, true);
}

void TcpTransport::accept_all(std::size_t which) {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    auto visitor = entrances_[which].door.next();
    if (!visitor) break;
    ++strangers_;
    add_attempt(Attempt::accept(key_, rank_, size_, *std::move(visitor)));
    if (strangers_ > kMostStrangers + open_.size()) make_room();
  }
  entrances_[which].shut_until = entrances_[which].door.shut_until();
  if (!entrances_[which].shut_until) return;
  doors_shut_ = true;
  watch_listener(which, 0, false);
}

void TcpTransport::open_doors(Clock::time_point now) {
  doors_shut_ = false;
  for (std::size_t which = 0; which < entrances_.size(); ++which) {
    std::optional<Clock::time_point>& shut_until = entrances_[which].shut_until;
    if (shut_until && now >= *shut_until) {
      shut_until.reset();
      watch_listener(which, EPOLLIN, false);
    }
    doors_shut_ = doors_shut_ || shut_until;
  }
}

/// Of one that was accepted and has gone without a proof.
void TcpTransport::turn_away(const Attempt& attempt) {
  --strangers_;
  if (attempt.credible()) return;
  for (Entrance& entrance : entrances_) entrance.door.turn_away(attempt.source());
}

/// A peer says who it is with its first bytes. Of those that have done so a link has one at most: there is room for
/// them.
void TcpTransport::make_room() {
  const auto is_peer = [](const auto& each) { return each.second.opens() || each.second.peer() >= 0; };
  const auto nameless = net::who_has_to_go(attempts_, is_peer);
  if (is_peer(*nameless)) return;
  const Attempt attempt = std::move(nameless->second);
  attempts_.erase(nameless);
  turn_away(attempt);
}

Attempt::Verdict TcpTransport::welcome(const Hello& hello) {
  const int peer = static_cast<int>(hello.from);
  const int lane = static_cast<int>(hello.lane);
  // Somebody may have recorded it. He cannot go on from here, but would keep the peer's place for a while.
  if (!heard_.first_time(hello.nonce)) return Attempt::Verdict::Unknown;
  if (lane >= lanes_to(peer)) return Attempt::Verdict::Unknown;
  const auto& made = links_[index_of(peer, lane)];
  Link& link = made ? *made : open(peer, lane);
  if (link.state() == Link::State::Up || link.state() == Link::State::Lost) return Attempt::Verdict::UseMine;
  Link::Connecting& book = link.connecting;
  if (book.accepting) return Attempt::Verdict::UseMine;
  if (rank_ < peer && book.going > 0) {
    const bool greeted = std::any_of(attempts_.begin(), attempts_.end(), [&](const auto& each) {
      return each.second.peer() == peer && each.second.lane() == lane && each.second.greeted();
    });
    if (greeted) return Attempt::Verdict::UseMine;
    // Whom nothing of this rank has reached yet may not be reachable from here at all.
    close_attempts(peer, lane);
    book.going = 0;
  }
  book.accepting = true;
  return Attempt::Verdict::Welcome;
}

void TcpTransport::advance(std::uint32_t id) {
  const auto found = attempts_.find(id);
  if (found == attempts_.end()) return;
  const std::uint32_t before = found->second.events();
  const auto state = found->second.advance([this](const Hello& hello) { return welcome(hello); });
  if (state == Attempt::State::Going) {
    if (found->second.events() != before) watch_fd(found->second.fd(), found->second.events(), kOfAttempt | id, false);
    return;
  }
  Attempt attempt = std::move(found->second);
  attempts_.erase(found);
  if (!attempt.opens() && state == Attempt::State::Proven) {
    --strangers_;
    for (Entrance& entrance : entrances_) entrance.door.let_in(attempt.source());
  } else if (!attempt.opens()) {
    turn_away(attempt);
  }
  const int peer = attempt.peer();
  if (peer < 0) {
    log::debug("comm", "rank {}: a connection was turned away: {}", rank_, attempt.why());
    return;
  }
  if (state == Attempt::State::Proven) return establish(std::move(attempt));
  Link::Connecting& book = links_[index_of(peer, attempt.lane())]->connecting;
  if (!attempt.opens()) {
    book.accepting = false;
    return;
  }
  --book.going;
  book.only_refused = book.only_refused && attempt.refused();
  if (state == Attempt::State::UseOther) {
    book.next = std::max(book.next, Clock::now() + kBetweenRounds);
    book.only_refused = false;
  } else {
    book.last_failure = attempt.why();
    log::debug("comm", "rank {}: no connection to rank {}: {}", rank_, peer, attempt.why());
  }
}

void TcpTransport::establish(Attempt attempt) {
  const int peer = attempt.peer();
  Link& link = *links_[index_of(peer, attempt.lane())];
  if (link.state() != Link::State::Connecting) return;
  sys::UniqueFd socket = attempt.take();
  keep_alive(socket.get(), silence_);
  close_attempts(peer, link.lane());
  link.connecting.going = 0;
  const int fd = socket.get();
  Link::Guard guard;
  if (protection() == Protection::Encrypted) {
    auto made = net::TlsStream::make(fd, !attempt.opens(), attempt.key());
    if (!made) return link.lose(made.error().what());
    guard.tls = *std::move(made);
  } else {
    guard = Link::Guard::of_tags(attempt.key(), attempt.opens(), protection());
  }
  link.up(std::move(socket), std::move(guard));
  link.watched = EPOLLIN | EPOLLOUT;
  watch_fd(fd, link.watched, key_of(link), false);
  log::debug("comm", "rank {}: connected to rank {} ({}) at {}", rank_, peer,
             cards_[static_cast<std::size_t>(peer)].host, net::describe_peer(fd));
  drive(link, true);
}

void TcpTransport::close_attempts(int peer, int lane) {
  for (auto each = attempts_.begin(); each != attempts_.end();) {
    if (each->second.peer() != peer || each->second.lane() != lane) {
      ++each;
      continue;
    }
    if (!each->second.opens()) --strangers_;
    each = attempts_.erase(each);
  }
}

}  // namespace cohort::transport::tcp
