#include "comm/transport/tcp/tcp_transport.h"

#include "base/env.h"
#include "base/log.h"
#include "base/unique_fd.h"
#include "net/interfaces.h"
#include "net/socket.h"
#include "rendezvous/identity.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <set>
#include <utility>

namespace cohort::transport::tcp {
namespace {

using namespace std::chrono_literals;

constexpr auto kLook = 2ms;
constexpr auto kLookAtAttempts = 50ms;
constexpr std::size_t kMostUnproven = 128;  // plus some for each peer

}  // namespace

Listeners::Listeners(const Options& options) {
  const auto filters = value_or_throw(net::parse_networks(env::text(env::kNetwork)));
  std::vector<net::InterfaceAddress> all = value_or_throw(net::interface_addresses());
  if (options.loopback_only) std::erase_if(all, [](const auto& address) { return !address.loopback; });
  std::string failure;
  for (const net::InterfaceAddress& address :
       value_or_throw(net::choose(std::move(all), options.loopback_only ? decltype(filters)() : filters))) {
    auto socket = net::listen_on({{address.text, 0}, {}});
    if (!socket) {
      failure = socket.error().what();
      log::info("comm", "{}", failure);
      continue;
    }
    const auto at = net::local_endpoint(socket->get());
    if (!at) continue;
    info_.addresses.push_back({address.text, at->tcp.port});
    sys::close_on_fork(socket->get());
    sockets_.push_back(*std::move(socket));
  }
  if (sockets_.empty()) {
    raise(ErrorCode::Unavailable,
          "ranks on other hosts cannot reach this one -- no address to listen at{}{} -- is the "
          "network up? COHORT_NETWORK narrows it",
          failure.empty() ? "" : ": ", failure);
  }
  info_.host = options.host;
  info_.machine = rendezvous::host_identity().id;
  info_.pid = ::getpid();
  info_.protection = options.protection;
  info_.lanes = options.lanes;
}

void Listeners::close() noexcept {
  for (const sys::UniqueFd& socket : sockets_) sys::forget_on_fork(socket.get());
  sockets_.clear();
}

std::vector<sys::UniqueFd> Listeners::take() {
  for (const sys::UniqueFd& socket : sockets_) sys::forget_on_fork(socket.get());
  return std::move(sockets_);
}

TcpTransport::TcpTransport(Options options, Listeners listeners, TransportEvents& events)
    : rank_(options.rank),
      size_(static_cast<int>(options.infos.size())),
      secret_(*std::move(options.secret)),
      infos_(std::move(options.infos)),
      silence_(options.silence),
      events_(events),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      links_(static_cast<std::size_t>(size_) * kMostLanes) {
  if (!epoll_ || !bell_) raise(ErrorCode::Unavailable, "no descriptor left for connections: {}", errno_text(errno));
  watch_fd(bell_.get(), EPOLLIN, kOfBell, true);
  net::Acceptor::Options accepting;
  accepting.secret = secret_;
  accepting.secure = between_ranks();
  accepting.most_pending =
      kMostUnproven + static_cast<std::size_t>(size_ * infos_[static_cast<std::size_t>(rank_)].lanes);
  accepting.on_refused = [this](const net::Acceptor::Refusal& refused) {
    log::debug("comm", "rank {}: a connection was refused: {}", rank_, refused.why.what());
  };
  acceptor_.emplace(listeners.take(), std::move(accepting));
  watch_fd(acceptor_->fd(), EPOLLIN, kOfAcceptor, true);
}

TcpTransport::~TcpTransport() = default;

// --- calls ---

int TcpTransport::lanes_to(int peer) const noexcept {
  return std::min(infos_[static_cast<std::size_t>(rank_)].lanes, infos_[static_cast<std::size_t>(peer)].lanes);
}

std::uint64_t TcpTransport::key_of(const Link& link) noexcept { return kOfLink | index_of(link.peer(), link.lane()); }

Link& TcpTransport::open(int peer, int lane) {
  auto& link = links_[index_of(peer, lane)];
  if (!link) {
    link = std::make_unique<Link>(peer, lane, silence_, infos_[static_cast<std::size_t>(peer)].host);
    open_.push_back(link.get());
    if (ended_) {
      link->send_copy(FrameKind::Ended, 0, end_bytes_);
      link->end();
    }
  }
  if (link->state() == Link::State::Idle && !left_) {
    // The lower rank connects. The higher rank connects a little later, in case the lower one has no reason to connect.
    const auto now = Clock::now();
    link->begin_connecting(now + (rank_ < peer ? 0ms : 10ms));
    connecting_ = true;
    // Does not call look_after_connecting: that may end the attempt on whose behalf this is called (`is_welcome`).
    if (rank_ < peer) connect_next(*link, now);
  }
  return *link;
}

void TcpTransport::connect(int peer) {
  const Lock lock(mutex_);
  open(peer);
}

void TcpTransport::send(Outgoing& frame) {
  const Lock lock(mutex_);
  Link& link = open(frame.peer, lane_of(frame.peer, frame.tag));
  const bool first = link.idle();
  link.send(frame);
  if (first && link.state() == Link::State::Up) drive(link, false);
}

void TcpTransport::receive(Incoming& frame) {
  const Lock lock(mutex_);
  Link& link = open(frame.peer, lane_of(frame.peer, frame.tag));
  const bool waited = link.state() == Link::State::Up && !link.wants_read();
  link.receive(frame);
  if (waited) drive(link, true);
}

void TcpTransport::message(int peer, std::uint32_t tag, std::string_view bytes) {
  const Lock lock(mutex_);
  Link& link = open(peer);
  const bool first = link.idle();
  link.send_copy(FrameKind::Message, tag, bytes);
  if (first && link.state() == Link::State::Up) drive(link, false);
}

std::optional<std::string> TcpTransport::lost(int peer) {
  const Lock lock(mutex_);
  for (int lane = 0; lane < lanes_to(peer); ++lane) {
    const auto& link = links_[index_of(peer, lane)];
    if (link && link->state() == Link::State::Lost) return link->why_lost();
  }
  return std::nullopt;
}

std::vector<int> TcpTransport::peers(bool owing) {
  const Lock lock(mutex_);
  std::set<int> peers;
  for (const Link* const link : open_) {
    if (!owing || link->owes()) peers.insert(link->peer());
  }
  return {peers.begin(), peers.end()};
}

void TcpTransport::forget(std::uint64_t operation) {
  const Lock lock(mutex_);
  for (Link* const link : open_) link->forget(operation);
}

void TcpTransport::end(std::string_view bytes) {
  const Lock lock(mutex_);
  if (ended_) return;
  ended_ = true;
  end_bytes_ = bytes;
  for (Link* const link : open_) {
    link->end();
    link->send_copy(FrameKind::Ended, 0, bytes);
    if (link->state() == Link::State::Up) drive(*link, true);
  }
}

bool TcpTransport::flushed() {
  const Lock lock(mutex_);
  for (Link* const link : open_) {
    if (link->state() != Link::State::Lost && !link->idle()) return false;
  }
  return true;
}

void TcpTransport::leave() {
  const Lock lock(mutex_);
  if (left_) return;
  left_ = true;
  for (Link* const link : open_) {
    if (link->state() != Link::State::Up) continue;
    link->send_copy(FrameKind::Leaving, 0, "");
    link->flush();
    link->read(events_);  // closing a socket with unread bytes would discard what was sent
    link->lose("this rank has left");
  }
  attempts_.clear();
  acceptor_.reset();
}

// --- driving ---

void TcpTransport::watch_fd(int fd, std::uint32_t events, std::uint64_t key, bool is_new) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  ::epoll_ctl(epoll_.get(), is_new ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event);
}

void TcpTransport::watch(Link& link) {
  if (link.state() != Link::State::Up) return;
  std::uint32_t wanted = 0;
  if (link.wants_read()) wanted |= EPOLLIN;
  if (link.wants_write()) wanted |= EPOLLOUT;
  if (wanted == link.watched) return;
  // A link whose bytes have to wait is not watched at all, since epoll would report its end repeatedly.
  if (wanted == 0) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.fd(), nullptr);
  } else {
    watch_fd(link.fd(), wanted, key_of(link), link.watched == 0);
  }
  link.watched = wanted;
}

/// Sends and reads on this link without blocking.
bool TcpTransport::drive(Link& link, bool readable) {
  bool any = false;
  if (readable) any = link.read(events_);
  any = link.flush() || any;
  if (link.holds_more()) again_.push_back(&link);
  watch(link);
  return any;
}

bool TcpTransport::handle(std::uint64_t key) {
  const auto which = static_cast<std::uint32_t>(key);
  switch (key & ~std::uint64_t{0xFFFFFFFF}) {
    case kOfLink: {
      const auto& link = links_[which];
      return link && link->state() == Link::State::Up && drive(*link, true);
    }
    case kOfAttempt: advance(which); return true;
    case kOfAcceptor:
      if (acceptor_) accept_all();
      return true;
    default: {
      std::uint64_t count = 0;
      static_cast<void>(::read(bell_.get(), &count, sizeof count));
      return false;
    }
  }
}

bool TcpTransport::progress() {
  const Lock lock(mutex_);
  std::array<epoll_event, 32> events;
  const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  bool any = false;
  const std::vector<Link*> again = std::exchange(again_, {});
  for (int i = 0; i < ready; ++i) any = handle(events[static_cast<std::size_t>(i)].data.u64) || any;
  for (Link* const link : again) {
    if (link->holds_more()) any = drive(*link, true) || any;
  }
  look_for_silence();
  if (connecting_ || !attempts_.empty()) any = look_after_connecting() || any;
  return any;
}

/// Marks links as lost if their hosts no longer answer.
void TcpTransport::look_for_silence() {
  const auto now = Clock::now();
  if (now - listened_ < kListen) return;
  listened_ = now;
  for (Link* const link : open_) link->look_for_silence(now);
}

void TcpTransport::sleep(std::chrono::milliseconds longest) {
  {
    const Lock lock(mutex_);
    if (connecting_) {
      longest = std::min<std::chrono::milliseconds>(longest, kLook);
    } else if (!attempts_.empty()) {
      longest = std::min<std::chrono::milliseconds>(longest, kLookAtAttempts);
    }
    if (!again_.empty()) longest = 0ms;
  }
  epoll_event event;
  ::epoll_wait(epoll_.get(), &event, 1, static_cast<int>(longest.count()));
  progress();
}

void TcpTransport::wake() noexcept {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(bell_.get(), &one, sizeof one));
}

}  // namespace cohort::transport::tcp
