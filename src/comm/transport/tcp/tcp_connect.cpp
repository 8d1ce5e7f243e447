// Connects pairs of ranks: tries all addresses of the peer, one shortly after the other, and keeps the first connection
// whose peer is authenticated. If both ranks connect to each other at once, the lower rank's connection is kept.
#include "base/log.h"
#include "base/unique_fd.h"
#include "comm/transport/tcp/tcp_transport.h"
#include "net/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace cohort::transport::tcp {

Attempt Attempt::open(const net::Secret& secret, const Hello& hello, const net::Address& address) {
  Attempt made(hello, static_cast<int>(hello.to), true);
  made.secret_ = &secret;
  made.address_ = address;
  // The address is numeric, so no name service is asked.
  const auto resolved = net::resolve(address, net::deadline_in(std::chrono::seconds(1)));
  if (!resolved || resolved->empty()) {
    made.fail_with("this is no address");
    return made;
  }
  const net::SocketAddress& to = resolved->front();
  made.socket_.reset(::socket(to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made.socket_) {
    made.fail_with(errno_text(errno));
    return made;
  }
  // Otherwise a forked child would keep the connection open, and keep it in its parent's epoll set.
  sys::close_on_fork(made.fd());
  const int on = 1;
  ::setsockopt(made.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (::connect(made.fd(), reinterpret_cast<const sockaddr*>(&to.storage), to.size) != 0 && errno != EINPROGRESS) {
    made.refused_ = errno == ECONNREFUSED;
    made.fail_with(errno_text(errno));
  }
  return made;
}

Attempt Attempt::accept(net::SecureConnection connection, const Hello& hello) {
  Attempt made(hello, static_cast<int>(hello.from), false);
  made.connection_ = std::make_unique<net::SecureConnection>(std::move(connection));
  sys::close_on_fork(made.fd());
  if (auto queued = made.connection_->queue(encode(Decision::Welcome)); !queued) made.fail_with(queued.error().what());
  return made;
}

Attempt::~Attempt() { forget(); }

void Attempt::forget() noexcept {
  if (connection_ || socket_) sys::forget_on_fork(fd());
}

std::uint32_t Attempt::events() const noexcept {
  if (!connection_) return EPOLLOUT;
  return connection_->wants_write() ? EPOLLIN | EPOLLOUT : EPOLLIN;
}

Attempt::State Attempt::fail_with(std::string why) {
  why_ = connection_ ? std::move(why) : fmt::format("{}: {}", net::to_string(address_), why);
  return state_ = State::Failed;
}

Attempt::State Attempt::connected() {
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) {
    refused_ = error == ECONNREFUSED;
    return fail_with(errno_text(error));
  }
  auto made = net::SecureConnection::with_secret(std::move(socket_), net::Role::Client, *secret_, between_ranks());
  if (!made) return fail_with(made.error().what());
  connection_ = std::make_unique<net::SecureConnection>(*std::move(made));
  if (auto queued = connection_->queue(encode(hello_)); !queued) return fail_with(queued.error().what());
  return state_;
}

Attempt::State Attempt::advance() {
  if (state_ != State::Going) return state_;
  if (!connection_ && connected() != State::Going) return state_;
  const auto moved = connection_->advance();
  if (const auto message = connection_->next_message()) {
    if (!opens_) return *message == kConfirmed ? state_ = State::Agreed : fail_with("it did not confirm");
    const auto decision = decode_decision(*message);
    if (!decision) return fail_with(decision.error().what());
    if (*decision == Decision::UseMine) return state_ = State::UseOther;
    if (late(Clock::now())) return fail_with("its welcome came too late");
    if (auto queued = connection_->queue(kConfirmed); !queued) return fail_with(queued.error().what());
    return state_ = State::Agreed;
  }
  if (!moved && moved.error().code() == ErrorCode::Unavailable)
    return fail_with(fmt::format("{} -- is the secret the same on all hosts?", moved.error().what()));
  if (!moved) return fail_with(moved.error().what());
  if (connection_->at_end()) return fail_with("it closed the connection");
  return state_;
}

Result<net::SecureConnection::Detached> Attempt::detach(Protection protection) {
  using Encryption = net::SecureConnection::Encryption;
  auto detached = connection_->detach(protection == Protection::Encrypted ? Encryption::Stays : Encryption::Ends);
  if (detached) {
    sys::forget_on_fork(detached->socket.get());
    connection_.reset();
  }
  return detached;
}

namespace {

using namespace std::chrono_literals;

constexpr auto kBetweenAddresses = 20ms;
constexpr auto kBetweenRounds = 150ms;
constexpr auto kGreeted = 1s;  // time for which an accepted, still unauthenticated connection counts as an answer
constexpr auto kRefused = 2s;  // a peer is gone if all its addresses refuse for this long
constexpr auto kUnreachable = 10s;
constexpr int kMostProbes = 127;  // the kernel's limit for TCP_KEEPCNT

// Makes the kernel probe a silent peer, so that a dead host or cable is noticed within `silence` while nothing is sent;
// with 3 s, the connection survives an interruption of 1 s. While data is sent, Link::look_for_silence detects a dead
// host, because the kernel's own limit (TCP_USER_TIMEOUT) also ends connections to processes that are only stopped.
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
  const PeerInfo& info = infos_[static_cast<std::size_t>(peer)];
  const bool same_machine = info.machine == infos_[static_cast<std::size_t>(rank_)].machine;
  std::vector<net::Address> addresses;
  for (const net::Address& address : info.addresses) {
    if (same_machine || !net::is_loopback_name(address.host)) addresses.push_back(address);
  }
  return addresses;
}

/// Begins attempts that are due, and gives up attempts that take too long.
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
  std::vector<std::uint32_t> late;
  for (const auto& [id, attempt] : attempts_) {
    if (attempt.late(now)) late.push_back(id);
  }
  for (const std::uint32_t id : late) {
    advance(id);  // first process received bytes, which may also end other attempts
    const auto found = attempts_.find(id);
    if (found == attempts_.end()) continue;
    const Attempt attempt = std::move(found->second);
    attempts_.erase(found);
    Link& link = *links_[index_of(attempt.peer(), attempt.lane())];
    if (attempt.opens()) {
      --link.connecting.going;
      link.connecting.only_refused = false;
      link.connecting.last_failure = "no answer";
    } else {
      link.connecting.give_up_accepting();
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
  const bool answers = any_attempt(link.peer(), link.lane(), [now](const Attempt& attempt) {
    return attempt.proven() || (attempt.greeted() && now - attempt.begun() < kGreeted);
  });
  if (answers || (tried_all && book.going > 0 && waited < kUnreachable)) {
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
  const Hello hello{static_cast<std::uint32_t>(rank_), static_cast<std::uint32_t>(link.peer()),
                    static_cast<std::uint32_t>(link.lane())};
  add_attempt(Attempt::open(secret_, hello, addresses[which]));
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

void TcpTransport::accept_all() {
  while (auto accepted = acceptor_->next()) {
    const auto hello = decode_hello(accepted->first);
    const bool ours = hello && hello->to == static_cast<std::uint32_t>(rank_) &&
                      hello->from < static_cast<std::uint32_t>(size_) && hello->from != hello->to &&
                      hello->lane < static_cast<std::uint32_t>(lanes_to(static_cast<int>(hello->from)));
    if (!ours) {
      log::debug("comm", "rank {}: {} wants what is not there", rank_, accepted->connection.peer());
    } else if (is_welcome(static_cast<int>(hello->from), static_cast<int>(hello->lane))) {
      add_attempt(Attempt::accept(std::move(accepted->connection), *hello));
    } else {
      static_cast<void>(accepted->connection.queue(encode(Decision::UseMine)));
    }
  }
}

/// True if a connecting peer is welcome; false if it should use the connection that this rank opens.
bool TcpTransport::is_welcome(int peer, int lane) {
  const auto& made = links_[index_of(peer, lane)];
  Link& link = made ? *made : open(peer, lane);
  if (link.state() == Link::State::Up || link.state() == Link::State::Lost) return false;
  Link::Connecting& book = link.connecting;
  if (book.accepting) return false;
  if (rank_ < peer && book.going > 0) {
    if (any_attempt(peer, lane, [](const Attempt& attempt) { return attempt.greeted(); })) return false;
    // If none of this rank's attempts has reached the peer yet, the peer may not be reachable from here.
    close_attempts(peer, lane);
    book.going = 0;
  }
  book.accepting = true;
  return true;
}

void TcpTransport::advance(std::uint32_t id) {
  const auto found = attempts_.find(id);
  if (found == attempts_.end()) return;
  const std::uint32_t before = found->second.events();
  const auto state = found->second.advance();
  if (state == Attempt::State::Going) {
    if (found->second.events() != before) watch_fd(found->second.fd(), found->second.events(), kOfAttempt | id, false);
    return;
  }
  Attempt attempt = std::move(found->second);
  attempts_.erase(found);
  const int peer = attempt.peer();
  if (state == Attempt::State::Agreed) return establish(std::move(attempt));
  Link::Connecting& book = links_[index_of(peer, attempt.lane())]->connecting;
  if (!attempt.opens()) return book.give_up_accepting();
  --book.going;
  book.only_refused = book.only_refused && attempt.refused();
  if (state == Attempt::State::UseOther) {
    book.since = Clock::now();
    book.next = std::max(book.next, book.since + kBetweenRounds);
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
  auto detached = attempt.detach(protection());
  if (!detached) {
    if (!attempt.opens()) link.connecting.give_up_accepting();
    if (attempt.opens()) --link.connecting.going;
    link.connecting.last_failure = detached.error().what();
    return;
  }
  const int fd = detached->socket.get();
  keep_alive(fd, silence_);
  close_attempts(peer, link.lane());
  link.connecting.going = 0;
  Link::Guard guard;
  if (detached->stream) {
    guard.tls = std::move(detached->stream);
  } else {
    guard = Link::Guard::of_tags(detached->key, attempt.opens(), protection());
  }
  link.up(std::move(detached->socket), std::move(guard));
  link.watched = EPOLLIN | EPOLLOUT;
  watch_fd(fd, link.watched, key_of(link), false);
  log::debug("comm", "rank {}: connected to rank {} ({}) at {}", rank_, peer,
             infos_[static_cast<std::size_t>(peer)].host, net::describe_peer(fd));
  drive(link, true);
}

void TcpTransport::close_attempts(int peer, int lane) {
  for (auto each = attempts_.begin(); each != attempts_.end();) {
    if (each->second.peer() != peer || each->second.lane() != lane) {
      ++each;
      continue;
    }
    each = attempts_.erase(each);
  }
}

}  // namespace cohort::transport::tcp
