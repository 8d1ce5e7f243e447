// How the training state of a model is divided over the ranks (Rajbhandari et al. 2020, arXiv 1910.02054): what each
// rank owns of a reduction, the memory in which parameters lie, and how all learn what owners have changed. Which
// elements are whose depends on the plan of buckets and on the layout of ranks, and not on time. One thread per rank.
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

/// Divided state is cut at multiples of so many bytes from where a parameter begins. An elementwise kernel that runs on
/// whole vectors then treats each element as it would in the whole parameter, so that bits are the same.
inline constexpr std::size_t kShardUnit = 256;

/// Elements that each of `owners` has of `count`: one range after the other, as long as each other but for units.
std::vector<std::int64_t> divide(std::int64_t count, int owners, DType dtype);

/// Parameters that are reduced together, one after the other as their gradients are.
struct Region {
  Buffer values;                     ///< the parameters'
  std::vector<std::int64_t> counts;  ///< of `values`, by rank of `Shards::comm`
  std::int64_t own_begin = 0;        ///< this rank's: in `values`
  std::int64_t own_count = 0;
};

/// A range of one parameter that this rank owns.
struct Piece {
  std::size_t parameter = 0;
  std::int64_t begin = 0;  ///< in the parameter
  std::int64_t count = 0;
  std::size_t region = 0;
  std::int64_t offset = 0;  ///< in the region's own part
};

class Shards {
 public:
  /// Collective. Throws InvalidArgument for Sharding::None.
  Shards(Communicator comm, nn::Sharding sharding);

  nn::Sharding sharding() const noexcept { return sharding_; }
  /// After a backward each rank has the average of its part alone.
  bool divides_gradients() const noexcept { return sharding_ >= nn::Sharding::Gradients; }
  /// The ranks of a host have one copy of the parameters.
  bool shares_parameters() const noexcept { return sharding_ == nn::Sharding::Parameters; }

  /// All ranks, in the order of what they own: one host's first local rank, the next host's, ..., then the second
  /// local ranks. So what the ranks of one number own on all hosts lies together. Sums have the same bits as those of
  /// the communicator it was made from. Where parameters are shared and hosts have unequally many ranks, those beyond
  /// the smallest host's own nothing.
  Communicator& comm() noexcept { return comm_; }
  std::vector<std::int64_t> divide(std::int64_t count, DType dtype) const;

  /// Memory for parameters, which `gather` moves in place: the host's one, or this rank's own. Collective. Throws
  /// InvalidArgument where a GPU's is to be shared.
  Memory allocate(std::size_t bytes, const Device& device);
  /// Whether this rank is to write what all ranks of the host share.
  bool writes_shared() const noexcept { return !shares_parameters() || host_.rank() == 0; }

  /// All ranks of a host have come here: nobody reads parameters any more, or all are written.
  void meet();
  /// Gives every rank what each has changed of its own. Collective. Waits; for GPU memory it is `stream` that waits,
  /// the one in which the changes were made.
  void gather(std::span<const Region> regions, void* stream = nullptr);

 private:
  const nn::Sharding sharding_;
  Communicator comm_;
  Communicator host_;
  Communicator column_;  // the ranks of this local number, of all hosts; none where it owns nothing
  int hosts_ = 1;
  int columns_ = 1;  // local ranks that all hosts have
  int owners_ = 1;   // the first ranks of `comm_`
  int column_of_this_ = 0;
};

}  // namespace cohort::gradients
