// Bounds what strangers at a TCP listener cost: whoever fails to prove the job's secret is looked at as fast as he
// comes a few thousand times, then a few times a second; sources that fail again and again are not answered by the
// kernel at all for a while. Without descriptors it waits instead of spinning. Addresses from which somebody has proved
// himself are never shut out, and whoever comes over loopback is not even slowed down. Does not own the listener:
// `close` before that is closed. One thread at a time.
#pragma once

#include "sys/unique_fd.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>

struct sockaddr_storage;

namespace cohort::net {

/// Where a connection comes from: an IPv6 address, an IPv4 one (mapped into IPv6), or, over a Unix socket, nothing.
struct Source {
  std::array<std::uint8_t, 16> bytes{};
  bool network = false;  ///< all IPv6 addresses that begin with these 64 bits
  auto operator<=>(const Source&) const = default;
  bool v4() const noexcept;
  bool loopback() const noexcept;
  static Source of(const sockaddr_storage& address) noexcept;
  Source network_of() const noexcept;
};

/// Which of those that wait has to go, in the order in which they came; at least one does. The first that has not said
/// anything `credible`, else the first: who has the secret is done within moments. Never the one that has just come,
/// who may not have been heard yet, before another.
template <class Waiting, class Credible>
auto who_has_to_go(Waiting& waiting, Credible credible) {
  const auto newest = std::prev(waiting.end());
  const auto worthless = std::find_if(waiting.begin(), newest, [&](const auto& each) { return !credible(each); });
  return worthless != newest ? worthless : waiting.begin();
}

class Door {
 public:
  using Clock = std::chrono::steady_clock;
  struct Limits {
    int burst = 5000;                            ///< strangers in a row,
    int per_second = 50;                         ///< and so many a second in the long run
    int suspicious = 64;                         ///< failures of one source in `memory`, from which it is shut out,
    std::chrono::milliseconds shut_out{10'000};  ///< for so long
    std::chrono::milliseconds memory{10'000};
    std::chrono::milliseconds pause{100};  ///< between looks, while too many have come
  };
  struct Visitor {
    sys::UniqueFd socket;
    Source source;
  };

  explicit Door(int listener) : Door(listener, Limits()) {}
  Door(int listener, const Limits& limits);

  /// The next connection. Nullopt: there is none, or none should be taken before `shut_until`. Each one that is taken
  /// is to be followed by one of the two below.
  std::optional<Visitor> next(Clock::time_point now = Clock::now());
  /// He has proved himself.
  void let_in(const Source& source);
  /// He has failed, or has taken too long.
  void turn_away(const Source& source, Clock::time_point now = Clock::now());

  /// The listener is not touched any more.
  void close() noexcept { listener_ = -1; }

  /// Until then the listener is not worth watching, although it may be readable.
  std::optional<Clock::time_point> shut_until(Clock::time_point now = Clock::now()) const noexcept;
  /// Addresses, or networks of many, that the kernel does not answer at present.
  std::size_t shut_out() const noexcept { return denied_.size(); }

 private:
  void refill(Clock::time_point now);
  /// As what a source is counted. Of an IPv6 network one has as many addresses as he likes; but where this host is in
  /// it itself, or a peer has come from it, others of the job live there too: then each address for itself.
  Source counted(const Source& source) const;
  bool is_denied(const Source& source) const;
  void shut_out_the_worst(Clock::time_point now);
  bool tell_kernel();

  int listener_;
  const Limits limits_;
  double tokens_;
  Clock::time_point refilled_{};
  Clock::time_point shut_until_{};
  Clock::time_point remembered_since_{};
  Clock::time_point denied_until_{};
  Clock::time_point complained_{};
  std::map<Source, int> failures_;
  std::set<Source> proven_;
  std::set<Source> shared_;  ///< networks in which this host is or from which a peer has come
  std::set<Source> denied_;
};

}  // namespace cohort::net
