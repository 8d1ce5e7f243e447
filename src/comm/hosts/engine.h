// Runs one collective after the other over ranks on several hosts. Every operation begins with a round, in which all
// ranks learn what all others bring; disagreement is refused by all of them before any result is delivered. Then data
// goes by way of the local world inside hosts and of the transport between them (docs/design/hosts.md). One thread at a
// time runs operations. After a failure other than Mismatch the world has ended.
#pragma once

#include "comm/hosts/world.h"
#include "comm/kernels/fold.h"
#include "comm/local/operation.h"
#include "comm/local/slices.h"

#include <cohort/error.h>
#include <cohort/observer.h>

#include <sched.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace cohort::comm::hosts {

class Engine {
 public:
  using Clock = std::chrono::steady_clock;

  /// `attended`: how many threads wait for results; with none, waiting sleeps at once.
  Engine(World& world, const std::atomic<int>& attended, std::function<void()> meanwhile);

  /// All of an operation. Throws Mismatch (and the engine may be used again) or what ended the world.
  void run(const Request& request, Clock::time_point called, CollectiveEvent* event);
  /// Serves the others' operations until all ranks have joined; `patience` is for each of them.
  int join(std::chrono::milliseconds patience);
  /// What is under way may not wait longer than this: operations behind it have deadlines too. Any thread.
  void limit_waiting(Clock::time_point deadline) noexcept {
    limit_.store(deadline.time_since_epoch().count(), std::memory_order_relaxed);
  }

 private:
  using Descriptor = local::Descriptor;
  static constexpr auto kLook = std::chrono::milliseconds(10);       // between looks at lives and deadlines
  static constexpr auto kSpinning = std::chrono::microseconds(50);   // then the core is offered to others
  static constexpr auto kYielding = std::chrono::microseconds(300);  // then it sleeps
  using Slice = local::Slice;

  /// Steps of an operation whose frames must not be mixed up; the upper bits of their tags.
  enum class Step : std::uint32_t { Card, Raw, Folded, Chain, Block, Direct, Partial };
  static std::uint32_t tag(Step step, std::int64_t index) noexcept {
    return static_cast<std::uint32_t>(step) << 28 | (static_cast<std::uint32_t>(index) & 0x0FFFFFFF);
  }
  /// What all ranks brought to the running operation: the same on all of them, so they all decide alike.
  struct Round {
    std::vector<Descriptor> brought;  // by rank; not filled in where `uniform`
    std::vector<int> active;          // ranks that have not joined
    Descriptor agreed;                // of the lowest active rank; Joined if there is none
    int root = 0;                     // of a broadcast: who has the data
    bool uniform = false;             // all bring the same, nobody has joined, no weights
    bool delivered = false;           // the result came with the round
  };
  struct CardHeader {
    static constexpr std::uint32_t kUniform = 1;
    std::uint32_t ranks = 0;
    std::uint32_t flags = 0;
    std::uint64_t payload = 0;
  };
  /// From the leader to its host.
  struct Verdict {
    std::uint64_t uniform = 0;
    std::uint64_t unused = 0;
  };

  /// Which ranks are folded, and by what each is multiplied first.
  struct Members {
    std::vector<bool> folded;    // by rank
    std::vector<double> scales;  // by rank; empty: none
    std::int64_t count = 0;
    std::int64_t divisor = 0;  // of an average
    bool everyone = true;
  };

  /// A piece of the data that is under way.
  struct Chunk {
    std::int64_t begin = 0;  // in elements of the buffer
    std::int64_t count = 0;
    std::int64_t number = 0;
    Slice slice;                         // this column's share of it, in elements of the chunk
    const std::byte* partial = nullptr;  // this host's sum of the slice
    std::byte* result = nullptr;         // where the finished slice is put together
    std::vector<std::byte> partial_bytes, result_bytes, whole_bytes, raw_bytes;
    std::vector<std::int64_t> shares;           // by local rank, elements of the chunk
    std::vector<Outgoing> raw_out, folded_out;  // by host
    std::vector<Incoming> raw_in, folded_in;
  };

  // engine.cpp: waiting
  template <class Ready, class Missing>
  void wait(Ready ready, Missing missing);
  void look_after(const std::function<std::vector<int>()>& missing);
  void wait_for(Incoming& frame);
  void wait_for(Outgoing& frame);
  void run_local(Request request);
  Clock::time_point deadline() const noexcept;
  Clock::time_point deadline_of(int peer) const noexcept;
  void note_away(bool away) const noexcept {
    world_.local_world().state(layout_.local).away.store(away ? 1 : 0, std::memory_order_relaxed);
  }
  std::string omission(const std::vector<int>& missing) const;
  void send(Outgoing& frame, int peer, std::uint32_t tag, const void* data, std::size_t bytes);
  void receive(Incoming& frame, int peer, std::uint32_t tag, void* to, std::size_t room);
  Request local_request(Kind kind, DType dtype) const;
  void local_broadcast(int root, void* data, std::size_t bytes);

  // engine_round.cpp
  void round(const Request* request, const Descriptor& own);
  bool beside(const Request& request) const noexcept;
  void exchange_cards(const Request* request, const Descriptor& own, const std::vector<Descriptor>& here,
                      bool agreed_here, const std::byte* payload);
  bool take_card(int host, std::string_view bytes, const Descriptor& own);
  void settle(const Descriptor& own);
  void check_agreement() const;
  void check_counts(const Request& request);
  [[noreturn]] void refuse(const std::string& why, int peer) const;
  const std::byte* small_partial(const Request& request);

  // engine_sums.cpp
  Members members_of(const Request& request) const;
  void reduce(const Request& request, bool serving);
  void reduce_columns(const Request& request, const Members& members);
  void begin_chunk(const Request& request, const Members& members, Chunk& chunk);
  void fold_chunk(const Request& request, const Members& members, Chunk& chunk);
  void deliver_chunk(const Request& request, Chunk& chunk);
  void reduce_gathered(const Request& request, const Members& members, bool serving);
  void fold_hosts(const Request& request, const std::vector<const void*>& partials, void* to, std::int64_t count,
                  std::int64_t divisor);
  void place(const Request& request, std::int64_t begin, std::int64_t count, const std::byte* result) const;
  std::byte* destination(const Request& request, std::int64_t begin) const noexcept;

  // engine_moves.cpp
  void execute(const Request& request, bool serving);
  void broadcast(const Request& request, bool serving);
  void all_gather(const void* input, void* output, const std::vector<std::int64_t>& bytes);
  void gather(const Request& request);
  void scatter(const Request& request);
  void all_to_all(const Request& request);
  std::vector<std::byte>& scratch(std::size_t which, std::size_t bytes);

  World& world_;
  const Layout& layout_;
  Transport& transport_;
  const std::atomic<int>& attended_;
  const std::function<void()> meanwhile_;
  std::size_t beside_bytes_ = 0;
  std::size_t chunk_bytes_ = 0;

  std::uint64_t sequence_ = 0;
  Clock::time_point called_{};
  std::chrono::milliseconds timeout_{0};
  std::atomic<Clock::rep> limit_{std::numeric_limits<Clock::rep>::max()};
  Clock::time_point looked_{};
  std::chrono::nanoseconds waited_{0};  // for others to come to the operation
  Round round_;
  std::vector<std::byte> card_;
  std::vector<std::vector<std::byte>> cards_;  // by host
  std::vector<std::byte> small_;               // a verdict, and the result behind it
  std::vector<std::vector<std::byte>> scratch_;
  std::vector<std::unique_ptr<Chunk>> chunks_;  // kept, so that memory is touched once
};

/// Drives the transport until `ready()`. `missing()` gives the ranks that are waited for.
template <class Ready, class Missing>
void Engine::wait(Ready ready, Missing missing) {
  if (ready()) return;
  const bool spins = attended_.load(std::memory_order_relaxed) > 0 && !world_.local_world().crowded();
  const auto since = Clock::now();
  bool away = false;  // those beside this rank can see that it waits for another host
  while (!ready()) {
    if (world_.ended()) world_.throw_ended();
    const auto now = Clock::now();
    if (spins && now - since < kYielding) {
      if (!transport_.progress() && now - since > kSpinning) ::sched_yield();
    } else if (attended_.load(std::memory_order_relaxed) > 0 && now - since < kYielding) {
      if (!transport_.progress()) ::sched_yield();
    } else {
      transport_.sleep(kLook);
    }
    if (now - looked_ >= kLook) {
      looked_ = now;
      if (!away) note_away(true);
      away = true;
      if (!ready()) look_after(missing);
    }
  }
  if (away) note_away(false);
}

}  // namespace cohort::comm::hosts
