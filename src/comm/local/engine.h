// Runs one collective after the other over shared memory. Every operation begins with all ranks publishing what they
// bring and reading what all others bring: disagreement is refused by all of them before any result is delivered.
//   small      every rank folds all payloads, which lie beside the announcements: one wait
//   zero-copy  each rank folds its slice out of all ranks' own memory into all ranks' own memory: two waits
//   staged     memory that peers cannot map goes through double buffers, chunk by chunk
// One thread at a time runs operations; `abort` may come from any thread. After a failure other than Mismatch the
// world has ended and every further operation fails with the same first cause.
#pragma once

#include "comm/communicator_impl.h"
#include "comm/kernels/fold.h"
#include "comm/local/control.h"
#include "comm/local/mesh.h"
#include "comm/local/operation.h"
#include "sys/shared_memory.h"

#include <cohort/error.h>
#include <cohort/observer.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm::local {

class Engine {
 public:
  /// Meets the other ranks. See `meet` for what it throws.
  explicit Engine(const FormOptions& options);
  /// Tells the peers that this rank has left.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Throws Mismatch (and may be used again) or what ended the world. `event`, if any, gets sequence, begin, waiting
  /// time and whether staging copies were needed.
  void run(const Operation& operation, CollectiveEvent* event);
  /// Serves the others' operations until all ranks have joined; `patience` is for each of them.
  int join(std::chrono::milliseconds patience);
  /// Any thread. The first reason of all ranks stays.
  void abort(std::string_view reason) noexcept;

  /// True if what each rank brings fits beside its announcement. The same on all ranks that agree.
  bool is_small(const Operation& operation) const noexcept { return operation.input_bytes <= layout_.inline_bytes(); }
  /// True if the operation takes less time than waking a thread for it, once all ranks have come.
  static bool is_quick(const Operation& operation) noexcept { return operation.input_bytes <= std::size_t{64} << 10; }
  const std::shared_ptr<Mesh>& mesh() const noexcept { return mesh_; }
  /// Somebody waits for the running operation: then waiting for peers may spin. Any thread.
  std::atomic<int>& attended() noexcept { return attended_; }
  /// The running operation may not wait longer than this either (operations behind it have deadlines too). Any thread.
  void limit_waiting(std::chrono::steady_clock::time_point deadline) noexcept {
    waiting_limit_.store(deadline.time_since_epoch().count(), std::memory_order_relaxed);
  }

 private:
  using Clock = std::chrono::steady_clock;
  using CounterOf = Counter RankState::*;

  /// What all ranks brought to the running operation: the same on all of them, so they all decide alike.
  struct Round {
    std::vector<Descriptor> brought;  // by rank
    std::vector<int> active;          // ranks that have not joined
    Descriptor agreed;                // of the lowest active rank; Joined if there is none
    int root = 0;                     // of a broadcast: who has the data
  };

  // engine.cpp: rounds and how they fail
  Descriptor describe(const Operation& operation) const;
  void begin(const Descriptor& own, const void* payload, std::size_t bytes);
  void gather();
  void check_agreement() const;
  [[noreturn]] void refuse(const std::string& why, int peer) const;
  std::string doing() const;
  void judge(const std::vector<int>& missing);
  std::optional<std::string> lost(int rank);
  [[noreturn]] void end_world(ErrorCode code, int peer, const std::string& text);
  void throw_if_ended() const;
  Error recorded() const;
  bool record(ErrorCode code, int peer, std::string_view text) noexcept;
  void ring() noexcept;
  void note_cores();

  // engine_operations.cpp: what is done once all agree
  void execute(const Operation& operation, CollectiveEvent* event);
  void all_reduce_small(const Operation& operation);
  void all_reduce_zero_copy(const Operation& operation);
  void all_reduce_staged(const Operation& operation);
  void reduce_scatter_small(const Operation& operation);
  void reduce_scatter_zero_copy(const Operation& operation);
  void reduce_scatter_staged(const Operation& operation);
  void all_gather_small(const Operation& operation);
  void all_gather_zero_copy(const Operation& operation);
  void all_gather_staged(const Operation& operation);
  void broadcast_small(const Operation& operation);
  void broadcast_zero_copy(const Operation& operation);
  void broadcast_staged(const Operation& operation);
  void run_alone(const Operation& operation);

  Weighting members() const;
  bool serving() const noexcept { return round_.brought[static_cast<std::size_t>(rank_)].kind == Kind::Joined; }
  bool mapped(int rank) const noexcept { return round_.brought[static_cast<std::size_t>(rank)].input_segment != 0; }
  bool all_mapped(bool outputs_too) const noexcept;
  const std::byte* input_of(int rank, const Operation& operation);
  std::byte* output_of(int rank, const Operation& operation);
  std::byte* remote(int rank, const Location& location, std::size_t bytes);
  const std::byte* payload_of(int rank) const noexcept;
  void fold_pieces(FoldJob job);
  void copy_pieces(std::byte* to, const std::byte* from, std::size_t bytes);

  // waiting.h
  template <class Reached>
  void wait_for_all(Reached reached);
  void wait_for_counters(CounterOf counter, std::uint64_t target);
  void post(CounterOf counter, std::uint64_t value) noexcept;

  Header& header() const noexcept { return ControlLayout::header(control_.data()); }
  RankState& state(int rank) const noexcept { return layout_.state(control_.data(), rank); }

  const int rank_;
  const int size_;
  const std::string host_;
  const ControlLayout layout_;
  sys::Mapping control_;
  std::shared_ptr<Mesh> mesh_;
  std::vector<sys::PeerProcess> processes_;
  bool crowded_ = false;  // more ranks than cores
  int spins_ = 2000;      // how long to spin before yielding; adapts (waiting.h)

  std::atomic<int> attended_{0};
  std::atomic<std::int64_t> waiting_limit_{std::numeric_limits<std::int64_t>::max()};  // as Clock's ticks

  // Of the running operation.
  std::uint64_t sequence_ = 0;
  std::uint64_t chunks_ = 0;  // staged chunks of all operations before it
  Round round_;
  Clock::time_point deadline_{};
  std::chrono::milliseconds timeout_{0};
  std::vector<const void*> fold_inputs_;  // kept, so that operations do not allocate
  std::vector<void*> fold_outputs_;
};

}  // namespace cohort::comm::local
