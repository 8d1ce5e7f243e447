// Reductions of GPU memory with the CPU's bits: what is exchanged, and what is folded of it, step by step. Each element
// is folded as the planes do it: over the ranks of each host by ascending number, to the element's type, then over the
// hosts. Pure; one object for one group of requests, in the thread that runs it.
#pragma once

#include "comm/api/request.h"
#include "comm/kernels/fold.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace cohort::comm::cuda {

/// Placement of the ranks, and of this one among them.
struct ExactWorld {
  /// `hosts`: by rank, numbered from 0 without gaps; empty: all on one.
  ExactWorld(int own, int ranks, std::vector<int> hosts);

  int rank;
  int size;
  std::vector<int> hosts;
  std::vector<std::vector<int>> on;  ///< ranks by host, where there are several
  int local = 0;                     ///< own number on the own host
  /// Number of ranks on each host, if it is the same for all and more than one: ranks with one number on all hosts are
  /// a column, and less goes between hosts. Else 0.
  int columns = 0;
};

/// A FoldJob that has its own lists.
struct ExactFold {
  FoldJob job;
  std::vector<const void*> inputs;
  std::vector<double> scales;
  void* output = nullptr;

  FoldJob bound() const noexcept;
};

/// Messages that are exchanged at once, in one group of NCCL's operations, and the folds that follow them.
struct ExactStep {
  struct Message {
    std::byte* memory;
    std::size_t bytes;
    int peer;
  };
  /// All ranks' `bytes`, by rank.
  struct Gather {
    const std::byte* from;
    std::byte* to;
    std::size_t bytes;
  };
  std::vector<Message> sends;
  std::vector<Message> receives;
  std::vector<Gather> gathers;
  std::vector<ExactFold> folds;
};

class ExactSums {
 public:
  /// Received data lies in scratch memory of at most twice so many bytes, aligned to kAlignment.
  static constexpr std::size_t kMostAtOnce = std::size_t{64} << 20;
  static constexpr std::size_t kAlignment = 64;

  /// True if it has this reduction. The same on all ranks.
  static bool has(const Request& request) noexcept;
  /// Bytes of scratch memory for these requests, the same on all ranks.
  static std::size_t scratch_of(std::span<const Request> requests, const ExactWorld& world,
                                std::size_t most_at_once = kMostAtOnce);

  ExactSums(const ExactWorld& world, const Round& round, std::size_t most_at_once = kMostAtOnce)
      : world_(world), round_(round), most_at_once_(most_at_once) {}
  /// The steps of all these requests, with so much scratch memory.
  std::vector<ExactStep> plan(std::span<const Request> requests, std::byte* scratch);
  using Inputs = std::vector<const std::byte*>;
  /// The one fold of all ranks' inputs on one host, all of which this rank reads where they lie.
  ExactFold fold_of_all(const Request& request, const Inputs& inputs, std::byte* output, std::int64_t count) const;

 private:
  using Rooms = std::vector<std::byte*>;

  void add_small(const Request& request);
  void add_slices(const Request& request);
  void add_parts(const Request& request);
  /// The same by columns: over the ranks of each host first, then between hosts.
  void add_columns(const Request& request);
  void add_parts_of_columns(const Request& request);
  bool goes_by_columns(const Request& request) const noexcept;
  /// Part of the scratch memory of a step, in which pieces are exchanged; it is used until the next one is over.
  std::byte* take(std::size_t bytes);
  ExactStep& step(std::size_t number);
  void send(ExactStep& in, const std::byte* from, std::size_t bytes, int peer) const;
  void receive(ExactStep& in, std::byte* to, std::size_t bytes, int peer) const;
  bool counts(int rank) const noexcept;
  /// Folds the ranks' inputs, by rank; where they were received, hosts' sums fit, too.
  void fold(const Request& request, const Inputs& inputs, const Rooms& rooms, std::byte* output, std::int64_t count);
  /// The sum of these ranks, of one host among several.
  ExactFold sum_of(const Request& request, const std::vector<int>& ranks, const Inputs& inputs, std::byte* output,
                   std::int64_t count) const;
  /// The sum of hosts' sums, which is the result.
  ExactFold sum_of_hosts(const Request& request, std::byte* output, std::int64_t count) const;
  bool is_scaled(const Request& request) const noexcept { return !round_.fractions.empty() || request.prescale != 1; }

  const ExactWorld& world_;
  const Round& round_;
  const std::size_t most_at_once_;
  std::byte* scratch_ = nullptr;
  std::vector<ExactStep> steps_;
  std::size_t current_ = 0;  // the step in which pieces are exchanged
  std::size_t used_ = 0;     // of its scratch memory
};

}  // namespace cohort::comm::cuda
