#include "transport/tcp/attempt.h"

#include "net/resolve.h"
#include "net/socket.h"
#include "sys/close_on_fork.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace cohort::transport::tcp {

Attempt Attempt::open(const WorldKey& key, int own, int peer, int lane, const net::Address& address) {
  Attempt made(key, own, 0, true);
  made.peer_ = peer;
  made.lane_ = lane;
  made.address_ = address;
  // Numbers only: nobody is asked.
  const auto resolved = net::resolve(address, net::deadline_in(std::chrono::seconds(1)));
  if (!resolved || resolved->empty()) {
    made.fail_with("this is no address");
    return made;
  }
  const net::SocketAddress& to = resolved->front();
  made.own_socket(sys::UniqueFd(::socket(to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
  if (!made.socket_) {
    made.fail_with(errno_text(errno));
    return made;
  }
  const int on = 1;
  ::setsockopt(made.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (::connect(made.fd(), reinterpret_cast<const sockaddr*>(&to.storage), to.size) != 0 && errno != EINPROGRESS) {
    made.refused_ = errno == ECONNREFUSED;
    made.fail_with(errno_text(errno));
  }
  return made;
}

Attempt Attempt::accept(const WorldKey& key, int own, int size, net::Door::Visitor visitor) {
  Attempt made(key, own, size, false);
  made.own_socket(std::move(visitor.socket));
  made.source_ = visitor.source;
  made.connected_ = true;
  return made;
}

// A forked child would keep the connection open, and in the epoll set of its parent.
void Attempt::own_socket(sys::UniqueFd socket) {
  socket_ = std::move(socket);
  if (socket_) sys::close_on_fork(fd());
}

Attempt::~Attempt() { take(); }

sys::UniqueFd Attempt::take() noexcept {
  if (socket_) sys::forget_on_fork(fd());
  return std::move(socket_);
}

std::uint32_t Attempt::events() const noexcept { return connected_ ? EPOLLIN : EPOLLOUT; }

Attempt::State Attempt::fail_with(std::string why) {
  why_ = opens_ ? fmt::format("{}: {}", net::to_string(address_), why) : std::move(why);
  return state_ = State::Failed;
}

bool Attempt::send_all(const void* data, std::size_t bytes) {
  // A fresh socket takes these few bytes at once.
  const ssize_t sent = ::send(fd(), data, bytes, MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(bytes)) return true;
  fail_with(sent < 0 ? errno_text(errno) : "it took only a part of the handshake");
  return false;
}

bool Attempt::read_up_to(std::size_t bytes) {
  while (buffer_.size() < bytes) {
    char room[128];
    const ssize_t got = ::recv(fd(), room, std::min(sizeof room, bytes - buffer_.size()), 0);
    if (got > 0) {
      buffer_.append(room, static_cast<std::size_t>(got));
    } else if (got < 0 && errno == EINTR) {
      continue;
    } else if (got < 0 && errno == EAGAIN) {
      return false;
    } else {
      fail_with(got == 0 ? "it closed the connection -- is the secret the same on all hosts?" : errno_text(errno));
      return false;
    }
  }
  return true;
}

Attempt::State Attempt::advance(const Welcome& welcome) {
  if (state_ != State::Going) return state_;
  return opens_ ? advance_opening() : advance_accepted(welcome);
}

Attempt::State Attempt::advance_opening() {
  if (!connected_) {
    int error = 0;
    socklen_t size = sizeof error;
    if (::getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error != 0) {
      refused_ = error == ECONNREFUSED;
      return fail_with(errno_text(error));
    }
    hello_.world = key_->world;
    hello_.from = static_cast<std::uint32_t>(own_);
    hello_.to = static_cast<std::uint32_t>(peer_);
    hello_.lane = static_cast<std::uint32_t>(lane_);
    hello_.nonce = random_bytes();
    hello_.proof = hello_proof(*key_, hello_);
    if (!send_all(&hello_, sizeof hello_)) return state_;
    connected_ = true;
  }
  if (!read_up_to(sizeof answer_)) return state_;
  std::memcpy(&answer_, buffer_.data(), sizeof answer_);
  if (!net::same(answer_.proof, answer_proof(*key_, hello_, answer_))) {
    return fail_with("whoever answers there does not know the secret of this world");
  }
  if (answer_.verdict != Answer::kWelcome) return state_ = State::UseOther;
  const Finish finish{finish_proof(*key_, hello_, answer_)};
  if (!send_all(&finish, sizeof finish)) return state_;
  return state_ = State::Proven;
}

Attempt::State Attempt::advance_accepted(const Welcome& welcome) {
  if (!answered_) {
    if (!read_up_to(sizeof hello_)) return state_;
    const Hello expected;
    std::memcpy(&hello_, buffer_.data(), sizeof hello_);
    buffer_.clear();
    const bool ours = std::memcmp(hello_.magic, expected.magic, sizeof hello_.magic) == 0 &&
                      hello_.world == key_->world && hello_.to == static_cast<std::uint32_t>(own_) &&
                      hello_.from < static_cast<std::uint32_t>(size_) && hello_.from != hello_.to &&
                      hello_.lane < static_cast<std::uint32_t>(kMostLanes) &&
                      net::same(hello_.proof, hello_proof(*key_, hello_));
    if (!ours) return fail_with("it belongs to another world");
    const Verdict verdict = welcome(hello_);
    if (verdict == Verdict::Unknown) return fail_with("it repeats what was said before, or wants what is not there");
    credible_ = true;
    answer_.verdict = verdict == Verdict::Welcome ? Answer::kWelcome : Answer::kUseMine;
    lane_ = static_cast<int>(hello_.lane);
    if (answer_.verdict == Answer::kWelcome) peer_ = static_cast<int>(hello_.from);
    answer_.nonce = random_bytes();
    answer_.proof = answer_proof(*key_, hello_, answer_);
    if (!send_all(&answer_, sizeof answer_)) return state_;
    if (peer_ < 0) return fail_with("it is to use this rank's connection");
    answered_ = true;
  }
  if (!read_up_to(sizeof(Finish))) return state_;
  Finish finish;
  std::memcpy(&finish, buffer_.data(), sizeof finish);
  if (!net::same(finish.proof, finish_proof(*key_, hello_, answer_))) {
    return fail_with("it does not know the secret of this world");
  }
  return state_ = State::Proven;
}

}  // namespace cohort::transport::tcp
