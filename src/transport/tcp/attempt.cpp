#include "transport/tcp/attempt.h"

#include "net/resolve.h"
#include "net/socket.h"
#include "sys/unique_fd.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace cohort::transport::tcp {

Attempt Attempt::open(const net::Secret& secret, const Hello& hello, const net::Address& address) {
  Attempt made(hello, static_cast<int>(hello.to), true);
  made.secret_ = &secret;
  made.address_ = address;
  // Numbers only: nobody is asked.
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
  // A forked child would keep the connection open, and in the epoll set of its parent.
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

}  // namespace cohort::transport::tcp
