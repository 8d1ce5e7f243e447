// Virtual ranks: gradients are summed over V parts of a step in the order of one binary tree, so that the sum has the
// same bits for every number of ranks. The functions are pure. VirtualRanks keeps a rank's partial sums and exchanges
// them; one thread at a time. The tree over [0, V) is that of FoldOrder::Tree: a range is divided at the largest power
// of two below its length.
#pragma once

#include "train/gradients/buckets.h"
#include "train/step/ranks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace cohort::gradients {

/// Consecutive virtual ranks.
struct VirtualRange {
  int begin = 0;
  int end = 0;
  int count() const noexcept { return end - begin; }
  friend bool operator==(const VirtualRange&, const VirtualRange&) = default;
};

/// The virtual ranks of a rank: the first ranks hold one more if the number does not divide evenly.
constexpr VirtualRange block_of(int virtual_ranks, int ranks, int rank) noexcept {
  const int each = virtual_ranks / ranks, more = virtual_ranks % ranks;
  const int begin = rank * each + (rank < more ? rank : more);
  return {begin, begin + each + (rank < more ? 1 : 0)};
}
/// True if the tree adds exactly these two ranges, of which the second follows the first.
bool are_added(int virtual_ranks, VirtualRange left, VirtualRange right);
/// The largest subtrees that cover a block, ascending.
std::vector<VirtualRange> subtrees_of(int virtual_ranks, VirtualRange block);
/// True if a sum over ranks, in the order of a Communicator, adds the ranks' blocks in the order of the tree. `hosts`:
/// the number of each rank's host.
bool sum_has_order_of_tree(int virtual_ranks, std::span<const int> hosts);
/// The seed of torch's random numbers for a virtual rank's part of a step. `cursor` is the step's place in the epoch.
std::uint64_t virtual_seed(std::uint64_t seed, std::int64_t epoch, std::int64_t cursor, int virtual_rank) noexcept;

// Both conversions keep denormals in every floating-point mode; any NaN becomes the one NaN, and rounding is to even.
float widen_float16(std::uint16_t bits) noexcept;
std::uint16_t narrow_to_float16(float value) noexcept;

/// A sum over a range of virtual ranks. All sums have equally many elements.
struct PartialSum {
  VirtualRange range;
  const void* values = nullptr;  ///< of the type in which sums are accumulated: float32 or float64
};
/// Adds partial sums, which cover all virtual ranks in ascending order, in the order of the tree; multiplies the total
/// by `postscale` and rounds it to `dtype`.
void fold_partial_sums(int virtual_ranks, std::span<const PartialSum> sums, void* to, std::int64_t count, DType dtype,
                       double postscale);
/// Mean of the virtual ranks' values, weighted, folded by the tree. NaN if no weight is above 0.
double weighted_mean(std::span<const double> values, std::span<const double> weights);

class VirtualRanks {
 public:
  /// Throws InvalidArgument if there are more ranks than virtual ranks.
  VirtualRanks(int virtual_ranks, std::shared_ptr<step::Ranks> ranks);
  /// Drops the step under way, frees the memory of partial sums, and sets the number of buckets.
  void lay_out(std::size_t buckets);

  int count() const noexcept { return count_; }
  VirtualRange block() const noexcept { return block_; }
  /// The virtual rank whose part of the step is under way, or comes next.
  int due() const noexcept { return complete_ ? block_.begin : block_.begin + static_cast<int>(weights_.size()); }
  bool is_last() const noexcept { return due() + 1 == block_.end; }
  /// True from `begin_step` to the end of this rank's last virtual rank.
  bool in_step() const noexcept { return begun_; }
  /// True from the end of the last virtual rank to the next step.
  bool complete() const noexcept { return complete_; }

  /// Begins a step if none is under way.
  void begin_step();
  /// Adds the bucket's values, times `weight`, to the partial sums. Weight 0: they count as zeros, and are not read.
  void add(std::size_t number, const Bucket& bucket, double weight);
  /// Does the same for the last virtual rank, and starts the exchange that leaves the average in the bucket. `total`:
  /// the sum of all weights.
  std::unique_ptr<step::Pending> exchange(std::size_t number, const Bucket& bucket, double weight, double total);
  /// Begins the second half of all exchanges that have one, so that they overlap. Called before they are waited for.
  void advance();
  /// Ends the part of the virtual rank that is due.
  void end_part(double weight);
  /// Takes back the loss of a part that begins anew.
  void restart_part() { losses_.resize(std::min(losses_.size(), weights_.size())); }
  /// Drops what the step has left, because it was refused or lost.
  void drop();

  /// Notes the loss of the virtual rank under way, or of the last one that ended; see DataParallelCore::mean_loss.
  /// `coming`: the weight of a part that has not ended. Collective for the last virtual rank.
  std::optional<double> mean_loss(double loss, std::optional<double> coming);

 private:
  /// A partial sum of a bucket, in memory of its own.
  struct Sum {
    VirtualRange range;
    std::shared_ptr<std::byte[]> memory;
  };
  class Exchange;

  void set_aside_sums();
  std::size_t merges(const std::vector<Sum>& sums) const;
  void fold_in(std::size_t number, const Bucket& bucket, double weight, void* to, double postscale);
  std::shared_ptr<Exchange> sum_over_ranks(const Bucket& bucket, Memory wide, double postscale);
  std::shared_ptr<Exchange> exchange_slices(std::size_t number, const Bucket& bucket, double postscale);

  const int count_;
  const std::shared_ptr<step::Ranks> ranks_;
  VirtualRange block_;
  bool sums_in_order_ = false;  // a plain sum over ranks has the order of the tree, and each rank has one partial sum
  std::vector<std::vector<Sum>> sums_;                            // by bucket: like a binary counter, largest first
  std::vector<std::vector<std::shared_ptr<std::byte[]>>> spare_;  // by bucket: memory of earlier sums
  std::vector<Memory> sent_, received_;                           // by bucket: memory of exchanges
  std::vector<std::shared_ptr<Exchange>> open_;
  std::vector<double> weights_;  // of the parts that have ended in this step, or in the last one
  std::vector<double> losses_;
  bool begun_ = false;
  bool complete_ = false;
};

}  // namespace cohort::gradients
