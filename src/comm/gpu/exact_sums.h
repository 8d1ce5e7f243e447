// Plans reductions of GPU memory with the same bits as on the CPU: which data is exchanged and folded in each step.
// Each element is folded in the order of the CPU's planes: over the ranks of each host by ascending number, rounded to
// the element's type, then over the hosts. Pure; one object for one group of requests, in the thread that runs it.
#pragma once

#include "comm/api/request.h"
#include "comm/kernels/fold.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace cohort::comm::cuda {

/// Placement of all ranks on hosts, and this rank's place among them.
struct ExactWorld {
  /// `hosts` has each rank's host, numbered from 0 without gaps; empty if all ranks are on one host.
  ExactWorld(int own, int ranks, std::vector<int> hosts);

  int rank;
  int size;
  std::vector<int> hosts;
  std::vector<std::vector<int>> on;  ///< ranks by host, if there are several hosts
  int local = 0;                     ///< this rank's number on its host
  /// Number of ranks on each host, if it is more than one and the same for all hosts; else 0. Ranks with the same local
  /// number form a column, which reduces traffic between hosts.
  int columns = 0;
};

/// A FoldJob that owns its lists.
struct ExactFold {
  FoldJob job;
  std::vector<const void*> inputs;
  std::vector<double> scales;
  void* output = nullptr;

  FoldJob bound() const noexcept;
};

/// Messages exchanged in one group of NCCL operations, and the folds that follow them.
struct ExactStep {
  struct Message {
    std::byte* memory;
    std::size_t bytes;
    int peer;
  };
  /// An all-gather of `bytes` bytes per rank.
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
  /// Most bytes of scratch memory of one step. Two steps alternate, so they use at most twice as many in all, aligned
  /// to kAlignment.
  static constexpr std::size_t kMostAtOnce = std::size_t{64} << 20;
  static constexpr std::size_t kAlignment = 64;

  /// True if this class supports the reduction. The same on all ranks.
  static bool has(const Request& request) noexcept;
  /// Returns the bytes of scratch memory needed for these requests; the same on all ranks.
  static std::size_t scratch_of(std::span<const Request> requests, const ExactWorld& world,
                                std::size_t most_at_once = kMostAtOnce);

  ExactSums(const ExactWorld& world, const Round& round, std::size_t most_at_once = kMostAtOnce)
      : world_(world), round_(round), most_at_once_(most_at_once) {}
  /// Returns the steps of all these requests; `scratch` has `scratch_of` bytes.
  std::vector<ExactStep> plan(std::span<const Request> requests, std::byte* scratch);

 private:
  using Inputs = std::vector<const std::byte*>;
  using Rooms = std::vector<std::byte*>;

  void add_small(const Request& request);
  void add_slices(const Request& request);
  void add_parts(const Request& request);
  /// Adds the steps by columns: first over the ranks of each host, then between hosts.
  void add_columns(const Request& request);
  void add_parts_of_columns(const Request& request);
  bool goes_by_columns(const Request& request) const noexcept;
  /// Takes a part of the scratch memory of `current_`, the step in which pieces are exchanged. The part is in use until
  /// the next step is over.
  std::byte* take(std::size_t bytes);
  ExactStep& step(std::size_t number);
  void send(ExactStep& in, const std::byte* from, std::size_t bytes, int peer) const;
  void receive(ExactStep& in, std::byte* to, std::size_t bytes, int peer) const;
  bool counts(int rank) const noexcept;
  /// Adds the folds of the ranks' inputs. `inputs` is by rank; `rooms` is scratch memory that can also hold hosts'
  /// sums.
  void fold(const Request& request, const Inputs& inputs, const Rooms& rooms, std::byte* output, std::int64_t count);
  /// Returns the single fold of all ranks' inputs on one host.
  ExactFold fold_of_all(const Request& request, const Inputs& inputs, std::byte* output, std::int64_t count) const;
  /// Returns the fold of these ranks, which are all on the same one of several hosts.
  ExactFold sum_of(const Request& request, const std::vector<int>& ranks, const Inputs& inputs, std::byte* output,
                   std::int64_t count) const;
  /// Returns the fold of the hosts' sums into the result.
  ExactFold sum_of_hosts(const Request& request, std::byte* output, std::int64_t count) const;
  bool is_scaled(const Request& request) const noexcept { return !round_.fractions.empty() || request.prescale != 1; }

  const ExactWorld& world_;
  const Round& round_;
  const std::size_t most_at_once_;
  std::byte* scratch_ = nullptr;
  std::vector<ExactStep> steps_;
  std::size_t current_ = 0;  // the step in which pieces are exchanged
  std::size_t used_ = 0;     // bytes used of that step's scratch memory
};

}  // namespace cohort::comm::cuda
