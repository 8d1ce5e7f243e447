// Divides the training state of a model over the ranks (Rajbhandari et al. 2020, arXiv 1910.02054): decides which part
// of each reduction a rank owns, allocates the parameters' memory, and exchanges what owners have changed. Ownership
// depends on the plan of buckets and on the layout of ranks, not on timing. One thread per rank.
#pragma once

#include <cohort/buffer.h>
#include <cohort/communicator.h>
#include <cohort/dtype.h>
#include <cohort/gradients.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cohort::gradients {

/// State is divided at multiples of this many bytes from the beginning of a parameter. An elementwise kernel that runs
/// on whole vectors then treats each element as it would in the whole parameter, so the bits are the same.
inline constexpr std::size_t kShardUnit = 256;

/// Returns how many of `count` elements each owner has: consecutive ranges whose lengths differ by one unit at most.
std::vector<std::int64_t> divide(std::int64_t count, int owners, DType dtype);

/// Parameters that are reduced together, in the order of their gradients.
struct Region {
  Buffer values;                     ///< the parameters' values
  std::vector<std::int64_t> counts;  ///< elements of `values` that each rank of `Shards::comm` owns
  std::int64_t own_begin = 0;        ///< offset of this rank's part in `values`
  std::int64_t own_count = 0;
};

/// A range of one parameter that this rank owns.
struct Piece {
  std::size_t parameter = 0;
  std::int64_t begin = 0;  ///< offset in the parameter
  std::int64_t count = 0;
  std::size_t region = 0;
  std::int64_t offset = 0;  ///< offset within this rank's part of the region
};

class Shards {
 public:
  /// Collective. Throws InvalidArgument for Sharding::None.
  Shards(Communicator comm, nn::Sharding sharding);

  nn::Sharding sharding() const noexcept { return sharding_; }
  /// True if each rank has only its part of the average after a backward.
  bool divides_gradients() const noexcept { return sharding_ >= nn::Sharding::Gradients; }
  /// True if the ranks of a host share one copy of the parameters.
  bool shares_parameters() const noexcept { return sharding_ == nn::Sharding::Parameters; }

  /// All ranks, in the order of the parts they own: the first local rank of each host, then the second of each host,
  /// ... So the parts of the ranks with one local number, on all hosts, are adjacent. Sums have the same bits as those
  /// of the communicator that was passed in. If parameters are shared and hosts have different numbers of ranks, the
  /// ranks beyond the smallest host's number own nothing.
  Communicator& comm() noexcept { return comm_; }
  std::vector<std::int64_t> divide(std::int64_t count, DType dtype) const;

  /// Allocates memory for parameters, in which `gather` works in place: shared by the host, or this rank's own.
  /// Collective. Throws InvalidArgument if GPU memory would have to be shared.
  Memory allocate(std::size_t bytes, const Device& device);
  /// Returns whether this rank writes the parameters that all ranks of the host share.
  bool writes_shared() const noexcept { return !shares_parameters() || host_.rank() == 0; }

  /// Barrier of a host's ranks. After it, no rank reads old parameters any more, or all parameters are written.
  void meet();
  /// Sends every rank the changed parts of all owners. Collective. Waits; for GPU memory, `stream`, in which the
  /// changes were made, waits instead.
  void gather(std::span<const Region> regions, void* stream = nullptr);

 private:
  const nn::Sharding sharding_;
  Communicator comm_;
  Communicator host_;
  Communicator column_;  // the ranks with this local number on all hosts; empty if this rank owns nothing
  int hosts_ = 1;
  int columns_ = 1;  // number of local ranks that every host has
  int owners_ = 1;   // number of owners: the first ranks of `comm_`
  int column_of_this_ = 0;
};

}  // namespace cohort::gradients
