#include "net/acceptor.h"

#include "base/log.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "net/interfaces.h"
#include "net/socket.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace cohort::net {
namespace {

constexpr std::size_t kMostDenied = 64;
constexpr std::size_t kMostRemembered = 4096;
/// Number of tokens that a proof adds, so that unauthenticated clients do not delay the ranks of a world that forms.
constexpr double kWorthOfProof = 100;
/// Most connections closed unread in one pass, before the loop does other work.
constexpr int kMostSwept = 512;
constexpr auto kBetweenComplaints = std::chrono::seconds(10);

constexpr std::array<std::uint8_t, 12> kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};

std::uint32_t word(const Source& source, std::size_t at) {
  return static_cast<std::uint32_t>(source.bytes[at]) << 24 | static_cast<std::uint32_t>(source.bytes[at + 1]) << 16 |
         static_cast<std::uint32_t>(source.bytes[at + 2]) << 8 | static_cast<std::uint32_t>(source.bytes[at + 3]);
}

std::string to_text(const Source& source) {
  char text[INET6_ADDRSTRLEN] = "";
  if (source.v4()) return ::inet_ntop(AF_INET, &source.bytes[12], text, sizeof text) == nullptr ? "?" : text;
  if (::inet_ntop(AF_INET6, source.bytes.data(), text, sizeof text) == nullptr) return "?";
  return source.network ? std::string(text) + "/64" : text;
}

/// Returns a filter program that drops packets of these sources and accepts all others. (On a listener the kernel runs
/// it on the packets that open a connection; loads from SKF_NET_OFF on are relative to the IP header.)
std::vector<sock_filter> program(const std::set<Source>& denied) {
  constexpr auto kIp = static_cast<std::uint32_t>(SKF_NET_OFF);
  constexpr std::uint32_t kAll = 0xFFFFFFFF;
  std::vector<sock_filter> v4, v6;
  for (const Source& source : denied) {
    if (source.v4()) {
      v4.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, word(source, 12), 0, 1));
      v4.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
    } else {
      const std::uint32_t words = source.network ? 2 : 4;
      for (std::uint32_t at = 0; at < words; ++at) {
        v6.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kIp + 8 + 4 * at));
        const auto rest = static_cast<std::uint8_t>(2 * (words - at) - 1);
        v6.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, word(source, 4 * at), 0, rest));
      }
      v6.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
    }
  }
  v6.push_back(BPF_STMT(BPF_RET | BPF_K, kAll));
  std::vector<sock_filter> all = {
      BPF_STMT(BPF_LD | BPF_B | BPF_ABS, kIp),
      BPF_STMT(BPF_ALU | BPF_RSH | BPF_K, 4),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 4, 1, 0),
      BPF_STMT(BPF_JMP | BPF_JA, static_cast<std::uint32_t>(v4.size()) + 2),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kIp + 12),
  };
  all.insert(all.end(), v4.begin(), v4.end());
  all.push_back(BPF_STMT(BPF_RET | BPF_K, kAll));
  all.insert(all.end(), v6.begin(), v6.end());
  return all;
}

}  // namespace

bool Source::v4() const noexcept { return std::equal(kMapped.begin(), kMapped.end(), bytes.begin()); }

bool Source::loopback() const noexcept {
  if (v4()) return bytes[12] == 127;
  // ::1, and the all-zero source of a Unix socket.
  return std::all_of(bytes.begin(), bytes.end() - 1, [](std::uint8_t byte) { return byte == 0; }) && bytes[15] <= 1;
}

Source Source::network_of() const noexcept {
  if (v4()) return *this;
  Source whole;
  std::copy_n(bytes.begin(), 8, whole.bytes.begin());
  whole.network = true;
  return whole;
}

Source Source::of(const sockaddr_storage& address) noexcept {
  Source source;
  if (address.ss_family == AF_INET) {
    std::copy(kMapped.begin(), kMapped.end(), source.bytes.begin());
    std::memcpy(&source.bytes[12], &reinterpret_cast<const sockaddr_in&>(address).sin_addr, 4);
  } else if (address.ss_family == AF_INET6) {
    const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    std::memcpy(source.bytes.data(), &v6, 16);
  }
  return source;
}

RateLimiter::RateLimiter(int listener, const Limits& limits)
    : listener_(listener), limits_(limits), tokens_(limits.burst) {
  const auto here = interface_addresses();
  if (!here) return;
  for (const InterfaceAddress& address : *here) {
    if (address.length == 16) shared_.insert(Source{address.bytes}.network_of());
  }
}

Source RateLimiter::counted(const Source& source) const {
  if (source.v4() || source.network) return source;
  const Source network = source.network_of();
  return shared_.contains(network) ? source : network;
}

bool RateLimiter::is_blocked(const Source& source) const {
  return blocked_.contains(source) || blocked_.contains(source.network_of());
}

void RateLimiter::refill(Clock::time_point now) {
  const std::chrono::duration<double> since = now - refilled_;
  refilled_ = now;
  tokens_ = std::min<double>(limits_.burst, tokens_ + since.count() * limits_.per_second);
  if (now - remembered_since_ > limits_.memory) {
    remembered_since_ = now;
    failures_.clear();
  }
  if (!blocked_.empty() && now >= blocked_until_) {
    blocked_.clear();
    update_kernel_filter();
  }
}

std::optional<RateLimiter::PendingConnection> RateLimiter::next(Clock::time_point now) {
  refill(now);
  if (listener_ < 0 || now < paused_until_) return std::nullopt;
  if (tokens_ < 1) {
    paused_until_ = now + limits_.pause;
    return std::nullopt;
  }
  for (int swept = 0; swept < kMostSwept;) {
    sockaddr_storage from{};
    socklen_t size = sizeof from;
    auto socket = accept_one(listener_, from, size);
    if (!socket) {  // out of descriptors or memory: try again later
      paused_until_ = now + limits_.pause;
      if (now - complained_ > kBetweenComplaints) {
        complained_ = now;
        log::warn("net", "{}; it is tried again", socket.error().what());
      }
      return std::nullopt;
    }
    if (!*socket) return std::nullopt;
    PendingConnection incoming{std::move(**socket), Source::of(from)};
    if (blocked_.empty()) return incoming;
    if (!is_blocked(incoming.source)) {
      const int unused = 0;  // an accepted socket inherits the listener's filter
      ::setsockopt(incoming.socket.get(), SOL_SOCKET, SO_DETACH_FILTER, &unused, sizeof unused);
      return incoming;
    }
    ++swept;  // the connection was in the queue before its source was blocked
  }
  return std::nullopt;
}

void RateLimiter::record_success(const Source& source) {
  tokens_ = std::min<double>(limits_.burst, tokens_ + kWorthOfProof);
  if (proven_.size() < kMostRemembered) {
    proven_.insert(source);
    if (!source.v4()) shared_.insert(source.network_of());
  }
  std::size_t freed = 0;
  for (const Source& each : {source, source.network_of()}) {
    failures_.erase(each);
    freed += blocked_.erase(each);
  }
  if (freed > 0) update_kernel_filter();
}

void RateLimiter::record_failure(const Source& source, Clock::time_point now) {
  // Connections are accepted in order of arrival, so a limit for loopback would make this host's own ranks wait.
  // Besides, flooding from this host costs the flooding process as much as the listener.
  if (source.loopback()) return;
  refill(now);
  tokens_ = std::max(-1.0, tokens_ - 1);
  const Source one = counted(source);
  if (failures_.size() < kMostRemembered || failures_.contains(one)) ++failures_[one];
  if (tokens_ < 1) block_the_worst(now);
}

void RateLimiter::block_the_worst(Clock::time_point now) {
  const std::size_t before = blocked_.size();
  std::string names;
  for (const auto& [source, count] : failures_) {
    if (count < limits_.failures_to_block || blocked_.size() >= kMostDenied) continue;
    if (proven_.contains(source) || !blocked_.insert(source).second) continue;
    names += (names.empty() ? "" : ", ") + to_text(source);
  }
  if (blocked_.size() == before) return;
  blocked_until_ = now + limits_.blocked;
  if (!update_kernel_filter()) {
    blocked_.clear();
    return;
  }
  tokens_ = limits_.burst / 4.0;  // clients that were waiting can connect now
  if (now - complained_ <= kBetweenComplaints) return;
  complained_ = now;
  log::warn(
      "net",
      "more than {} connections failed to prove the job's secret; nothing that comes from {} is answered for {} s",
      limits_.burst, names, std::chrono::duration_cast<std::chrono::seconds>(limits_.blocked).count());
}

bool RateLimiter::update_kernel_filter() {
  if (listener_ < 0) return false;
  if (blocked_.empty()) {
    const int unused = 0;
    return ::setsockopt(listener_, SOL_SOCKET, SO_DETACH_FILTER, &unused, sizeof unused) == 0;
  }
  std::vector<sock_filter> code = program(blocked_);
  const sock_fprog filter{static_cast<unsigned short>(code.size()), code.data()};
  if (::setsockopt(listener_, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0) return true;
  log::debug("net", "no filter for a listener: {}", errno_text(errno));
  return false;
}

std::optional<RateLimiter::Clock::time_point> RateLimiter::paused_until(Clock::time_point now) const noexcept {
  if (now >= paused_until_) return std::nullopt;
  return paused_until_;
}

namespace {

// An event's number has its kind in the upper half, and a number within that kind in the lower half.
constexpr std::uint64_t kOfListener = std::uint64_t{1} << 32;
constexpr std::uint64_t kOfPending = std::uint64_t{2} << 32;
constexpr std::uint64_t kOfClock = std::uint64_t{3} << 32;
constexpr int kAtOnce = 64;  // most connections accepted before waiting ones have their turn

}  // namespace

Acceptor::Acceptor(std::vector<sys::UniqueFd> listeners, Options options)
    : options_(std::move(options)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      clock_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  options_.secure.heard = &heard_;
  for (sys::UniqueFd& listener : listeners) {
    const int fd = listener.get();
    entrances_.push_back({std::move(listener), RateLimiter(fd), {}});
    sys::close_on_fork(fd);
  }
  // Otherwise a forked child would keep the sockets in the epoll set alive.
  if (epoll_) sys::close_on_fork(epoll_.get());
  bool good = epoll_ && clock_ && watch(clock_.get(), EPOLLIN, kOfClock, true);
  for (std::size_t i = 0; i < entrances_.size() && good; ++i)
    good = watch(entrances_[i].listener.get(), EPOLLIN, kOfListener | i, true);
  if (!good) raise(ErrorCode::Unavailable, "no descriptor left to watch a port: {}", errno_text(errno));
}

Acceptor::~Acceptor() {
  for (const Entrance& each : entrances_) sys::forget_on_fork(each.listener.get());
  for (const auto& [number, pending] : waiting_) sys::forget_on_fork(pending.connection.fd());
  sys::forget_on_fork(epoll_.get());
}

bool Acceptor::watch(int fd, std::uint32_t events, std::uint64_t what, bool is_new) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = what;
  return ::epoll_ctl(epoll_.get(), is_new ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) == 0;
}

std::optional<Acceptor::Accepted> Acceptor::next() {
  if (accepted_.empty()) turn();
  if (accepted_.empty()) return std::nullopt;
  Accepted first = std::move(accepted_.front());
  accepted_.pop_front();
  return first;
}

void Acceptor::judge(const Source& source, bool proof) {
  if (!options_.public_secret) return;
  for (Entrance& each : entrances_) {
    if (proof)
      each.limiter.record_success(source);
    else
      each.limiter.record_failure(source);
  }
}

void Acceptor::turn() {
  std::array<epoll_event, 64> events;
  const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < ready; ++i) {
    const std::uint64_t what = events[static_cast<std::size_t>(i)].data.u64;
    const auto which = static_cast<std::uint32_t>(what);
    switch (what - which) {
      case kOfListener: accept_all(entrances_[which], which); break;
      case kOfPending:
        if (const auto at = waiting_.find(which); at != waiting_.end()) advance(at);
        break;
      default: look_at_clock();
    }
  }
  arm();
}

void Acceptor::accept_all(Entrance& entrance, std::uint32_t which) {
  for (int i = 0; i < kAtOnce; ++i) {
    auto incoming = entrance.limiter.next();
    if (!incoming) break;
    take(*std::move(incoming));
  }
  entrance.paused_until = entrance.limiter.paused_until();
  if (entrance.paused_until) watch(entrance.listener.get(), 0, kOfListener | which, false);
}

void Acceptor::take(RateLimiter::PendingConnection incoming) {
  auto connection =
      options_.secret
          ? SecureConnection::with_secret(std::move(incoming.socket), Role::Server, *options_.secret, options_.secure)
          : SecureConnection::same_user(std::move(incoming.socket), Role::Server, options_.secure);
  if (!connection) {
    for (Entrance& each : entrances_) each.limiter.record_failure(incoming.source);
    if (options_.on_refused) options_.on_refused({"somebody", connection.error(), false});
    return;
  }
  const std::uint32_t number = ++last_;
  const auto at =
      waiting_.emplace(number, Pending{*std::move(connection), incoming.source, Clock::now() + options_.patience})
          .first;
  const int fd = at->second.connection.fd();
  sys::close_on_fork(fd);
  if (!watch(fd, EPOLLIN, kOfPending | number, true)) return refuse(at, Error(ErrorCode::Io, errno_text(errno)));
  advance(at);  // the peer has often sent bytes already
  if (waiting_.size() <= options_.most_pending) return;
  const auto last = pick_eviction(waiting_, [](const auto& each) { return each.second.connection.credible(); });
  refuse(last, Error(ErrorCode::Timeout, fmt::format("{} did not prove the secret before too many others came",
                                                     last->second.connection.peer())));
}

void Acceptor::advance(Waiting::iterator at) {
  Pending& pending = at->second;
  const auto moved = pending.connection.advance();
  if (!pending.proven && !options_.public_secret && pending.connection.established()) {
    pending.proven = true;
    for (Entrance& each : entrances_) each.limiter.record_success(pending.source);
  }
  if (auto first = pending.connection.next_message()) {
    const Source source = pending.source;
    accepted_.push_back({give_away(at), *std::move(first), source});
    return;
  }
  if (!moved) return refuse(at, moved.error());
  // A client tries several of the offered addresses, and closes the others when one has answered.
  if (pending.connection.at_end()) return refuse(at, Error(ErrorCode::Unavailable, "it went without a word"));
  const bool writes = pending.connection.wants_write();
  if (writes == pending.writes) return;
  pending.writes = writes;
  watch(pending.connection.fd(), writes ? EPOLLIN | EPOLLOUT : EPOLLIN, kOfPending | at->first, false);
}

void Acceptor::refuse(Waiting::iterator at, const Error& why) {
  const Pending pending = std::move(at->second);
  waiting_.erase(at);
  sys::forget_on_fork(pending.connection.fd());
  if (!pending.proven) {
    for (Entrance& each : entrances_) each.limiter.record_failure(pending.source);
  }
  if (options_.on_refused) options_.on_refused({pending.connection.peer(), why, pending.proven});
}

SecureConnection Acceptor::give_away(Waiting::iterator at) {
  SecureConnection connection = std::move(at->second.connection);
  waiting_.erase(at);
  sys::forget_on_fork(connection.fd());
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.fd(), nullptr);
  return connection;
}

void Acceptor::look_at_clock() {
  std::uint64_t times = 0;
  static_cast<void>(!::read(clock_.get(), &times, sizeof times));
  armed_ = Clock::time_point::max();
  const auto now = Clock::now();
  // All connections have the same time limit, so the first ones expire first.
  while (!waiting_.empty() && waiting_.begin()->second.until <= now) {
    refuse(waiting_.begin(), Error(ErrorCode::Timeout, fmt::format("{} did not prove the secret in time",
                                                                   waiting_.begin()->second.connection.peer())));
  }
  for (std::size_t i = 0; i < entrances_.size(); ++i) {
    Entrance& each = entrances_[i];
    if (!each.paused_until || *each.paused_until > now) continue;
    each.paused_until.reset();
    watch(each.listener.get(), EPOLLIN, kOfListener | i, false);
  }
}

/// Sets the timer to the next time at which there is something to do.
void Acceptor::arm() {
  Clock::time_point wake = waiting_.empty() ? Clock::time_point::max() : waiting_.begin()->second.until;
  for (const Entrance& each : entrances_) {
    if (each.paused_until) wake = std::min(wake, *each.paused_until);
  }
  // A timer that fires too early is harmless.
  if (wake >= armed_) return;
  armed_ = wake;
  const auto since = std::chrono::nanoseconds(wake.time_since_epoch()).count() + 1;
  itimerspec when{};
  when.it_value.tv_sec = since / 1'000'000'000;
  when.it_value.tv_nsec = since % 1'000'000'000;
  ::timerfd_settime(clock_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
}

}  // namespace cohort::net
