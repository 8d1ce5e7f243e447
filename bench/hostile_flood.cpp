// Many unauthenticated connections to a port: so many connections a second, of five kinds in turn, and how each of them
// ended; or so many at once, each of which repeats what somebody has recorded and is replaced when it has been closed.
// One thread, so that it takes no more than one core. tools/soak/hostile-flood drives it; its last line is a JSON
// object.
//
//   hostile_flood HOST PORT [--rate N] [--seconds S] [--kinds garbage,silent,half,secret,slow] [--from ADDRESS]
//                 [--repeat FILE --hold N]
//
// garbage: an HTTP request; silent: nothing; half: the beginning of a TLS handshake; secret: a whole ClientHello with
// another secret's proof; slow: a byte of one every 50 ms. A client that is not answered or not closed within a second
// goes.
#include "base/parse.h"
#include "net/socket.h"
#include "net/tls.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using cohort::net::SocketAddress;

constexpr std::size_t kMostAtOnce = 8000;
constexpr auto kPatience = 1s;
constexpr auto kSlowly = 50ms;

enum class Kind { Garbage, Silent, Half, Secret, Slow };
constexpr std::array<std::string_view, 5> kNames = {"garbage", "silent", "half", "secret", "slow"};

struct Options {
  SocketAddress to;
  std::optional<SocketAddress> from;
  double rate = 10'000;
  double seconds = 5;
  std::vector<Kind> kinds = {Kind::Garbage, Kind::Silent, Kind::Half, Kind::Secret, Kind::Slow};
  std::string repeated;  ///< in place of a hello with another secret
  std::size_t hold = 0;  ///< at once, for as long as they are let; 0: each for a second
};

SocketAddress address_of(const std::string& host, std::uint16_t port) {
  const auto all = cohort::value_or_throw(cohort::net::resolve({host, port}, cohort::net::deadline_in(5s)));
  return all.front();
}

Options read(int argc, char** arguments) {
  if (argc < 3) throw std::invalid_argument("usage: hostile_flood HOST PORT [--rate N] [--seconds S] ...");
  Options options;
  options.to = address_of(arguments[1], cohort::parse_integer<std::uint16_t>(arguments[2]).value());
  for (int i = 3; i + 1 < argc; i += 2) {
    const std::string_view name = arguments[i];
    std::string value = arguments[i + 1];
    if (name == "--rate") {
      options.rate = std::atof(value.c_str());
    } else if (name == "--seconds") {
      options.seconds = std::atof(value.c_str());
    } else if (name == "--from") {
      options.from = address_of(value, 0);
    } else if (name == "--repeat") {
      std::ifstream file(value, std::ios::binary);
      options.repeated.assign(std::istreambuf_iterator<char>(file), {});
      options.kinds = {Kind::Secret};
    } else if (name == "--hold") {
      options.hold = static_cast<std::size_t>(std::atoi(value.c_str()));
    } else if (name == "--kinds") {
      options.kinds.clear();
      for (std::size_t k = 0; k < kNames.size(); ++k) {
        if (value.find(kNames[k]) != std::string::npos) options.kinds.push_back(static_cast<Kind>(k));
      }
    } else {
      throw std::invalid_argument("hostile_flood: what is " + std::string(name) + "?");
    }
  }
  return options;
}

/// The first message of a client with another secret.
std::string client_hello() {
  const auto secret = cohort::value_or_throw(cohort::net::Secret::generate());
  const auto session = cohort::value_or_throw(cohort::net::TlsSession::make(false, secret, "store"));
  static_cast<void>(session->handshake());
  return session->take_output();
}

class Flood {
 public:
  explicit Flood(const Options& options)
      : options_(options),
        hello_(options.repeated.empty() ? client_hello() : options.repeated),
        epoll_(::epoll_create1(0)) {}

  void run() {
    const auto begun = Clock::now();
    const auto end =
        begun + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.seconds));
    for (auto now = begun; now < end; now = Clock::now()) {
      const auto due = static_cast<std::uint64_t>(std::chrono::duration<double>(now - begun).count() * options_.rate);
      // After being held up, it does not catch up at once: that would be another flood.
      if (due > tried_ + 200) skipped_ += due - tried_ - skipped_ > 200 ? due - tried_ - skipped_ - 200 : 0;
      while (tried_ + skipped_ < due) {
        if (options_.hold > 0 && attempts_.size() >= options_.hold) {
          skipped_ = due - tried_;
          say_once("held");
        } else {
          open_one(now);
        }
      }
      listen(1);
      look_after(now);
    }
    seconds_ = std::chrono::duration<double>(Clock::now() - begun).count();
  }

  void report() const {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    const auto of = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    };
    fmt::print(
        "{{\"tried\":{},\"per_second\":{:.0f},\"connected\":{},\"refused\":{},\"closed_by_peer\":{},\"given_up\":{},"
        "\"not_answered\":{},\"failed\":{},\"cpu\":{:.3f}}}\n",
        tried_, static_cast<double>(tried_) / seconds_, connected_, refused_, closed_, given_up_, unanswered_, failed_,
        (of(usage.ru_utime) + of(usage.ru_stime)) / seconds_);
  }

 private:
  struct Attempt {
    Kind kind = Kind::Garbage;
    std::uint64_t number = 0;
    Clock::time_point begun;
    bool connected = false;
    std::size_t said = 0;
  };

  void open_one(Clock::time_point now) {
    ++tried_;
    while (attempts_.size() >= kMostAtOnce) send_off_the_oldest();
    const int fd = ::socket(options_.to.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      ++failed_;
      return;
    }
    // Closed by a reset: a flood that waited for its old connections would soon be out of ports.
    const linger at_once{1, 0};
    ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    if (options_.from) {
      const int on = 1;
      ::setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
      if (::bind(fd, reinterpret_cast<const sockaddr*>(&options_.from->storage), options_.from->size) != 0) ++failed_;
    }
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&options_.to.storage), options_.to.size) != 0 &&
        errno != EINPROGRESS) {
      ++(errno == ECONNREFUSED ? refused_ : failed_);
      ::close(fd);
      return;
    }
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLET;
    event.data.fd = fd;
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
    attempts_[fd] = {options_.kinds[tried_ % options_.kinds.size()], tried_, now, false, 0};
    oldest_.push_back({fd, tried_});
  }

  void listen(int milliseconds) {
    std::array<epoll_event, 256> events;
    const int ready = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), milliseconds);
    for (int i = 0; i < ready; ++i) {
      const int fd = events[static_cast<std::size_t>(i)].data.fd;
      const auto found = attempts_.find(fd);
      if (found == attempts_.end()) continue;
      int error = 0;
      socklen_t size = sizeof error;
      ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
      if (!found->second.connected && error == ECONNREFUSED) {
        ++refused_;
        drop(fd);
      } else if (error != 0) {
        ++closed_;
        drop(fd);
      } else {
        speak(fd, found->second);
      }
    }
  }

  void speak(int fd, Attempt& attempt) {
    if (!attempt.connected) {
      attempt.connected = true;
      ++connected_;
      std::string_view words;
      if (attempt.kind == Kind::Garbage) words = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
      if (attempt.kind == Kind::Half) words = std::string_view(hello_).substr(0, hello_.size() / 2);
      if (attempt.kind == Kind::Secret) words = hello_;
      if (!words.empty()) static_cast<void>(!::send(fd, words.data(), words.size(), MSG_NOSIGNAL));
    }
    char bytes[512];
    ssize_t got = 0;
    while ((got = ::recv(fd, bytes, sizeof bytes, 0)) > 0) continue;
    if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      ++closed_;
      drop(fd);
    }
  }

  void say_once(const char* word) {
    if (std::exchange(said_, true)) return;
    fmt::print("{}\n", word);
    std::fflush(stdout);
  }

  void look_after(Clock::time_point now) {
    while (!oldest_.empty() && options_.hold == 0) {
      const auto found = find_oldest();
      if (found != attempts_.end() && now - found->second.begun < kPatience) break;
      send_off_the_oldest();
    }
    if (now - slowly_ < kSlowly) return;
    slowly_ = now;
    for (auto& [fd, attempt] : attempts_) {
      if (attempt.kind != Kind::Slow || !attempt.connected || attempt.said >= hello_.size()) continue;
      static_cast<void>(!::send(fd, hello_.data() + attempt.said++, 1, MSG_NOSIGNAL));
    }
  }

  /// Nobody, if he has gone already; the descriptor may be another's by now.
  auto find_oldest() -> std::unordered_map<int, Attempt>::iterator {
    const auto found = attempts_.find(oldest_.front().fd);
    return found != attempts_.end() && found->second.number == oldest_.front().number ? found : attempts_.end();
  }
  void send_off_the_oldest() {
    const auto found = find_oldest();
    oldest_.pop_front();
    if (found == attempts_.end()) return;
    ++(found->second.connected ? given_up_ : unanswered_);
    drop(found->first);
  }
  void drop(int fd) {  // by value: `fd` may be the map's own
    attempts_.erase(fd);
    ::close(fd);
  }

  struct InLine {
    int fd;
    std::uint64_t number;
  };
  const Options options_;
  const std::string hello_;
  const int epoll_;
  std::unordered_map<int, Attempt> attempts_;
  std::deque<InLine> oldest_;
  Clock::time_point slowly_{};
  bool said_ = false;
  double seconds_ = 1;
  std::uint64_t tried_ = 0, skipped_ = 0, connected_ = 0, refused_ = 0, closed_ = 0, given_up_ = 0, unanswered_ = 0,
                failed_ = 0;
};

}  // namespace

int main(int argc, char** arguments) {
  try {
    rlimit files{};
    ::getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
    Flood flood(read(argc, arguments));
    flood.run();
    flood.report();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 2;
  }
}
