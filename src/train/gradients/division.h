// Division of training state over the ranks: regions that are reduced together, this rank's pieces of parameters, and
// the memory of parameters and averages. One thread per rank; empty without Shards.
#pragma once

#include "train/gradients/autograd.h"
#include "train/gradients/buckets.h"
#include "train/gradients/sharding.h"
#include "train/gradients/write_protection.h"
#include "train/step/ranks.h"

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace cohort::gradients {

class Division {
 public:
  explicit Division(std::shared_ptr<Shards> shards) : shards_(std::move(shards)) {}

  /// Collective; called once. Fixes which rank owns which part.
  void lay_out(std::span<const Parameter> parameters, const std::vector<Bucket>& buckets, step::Ranks& ranks,
               Autograd& autograd);

  const std::shared_ptr<Shards>& shards() const noexcept { return shards_; }
  /// True if each gradient is divided as soon as it arrives; it may then have no place in a bucket.
  bool divides_gradients() const noexcept { return shards_ != nullptr && shards_->divides_gradients(); }
  /// Regions that are reduced together, in the order of reductions. The framework moves parameters to their memory.
  const std::vector<Region>& regions() const noexcept { return regions_; }
  /// This rank's pieces, by ascending parameter.
  const std::vector<Piece>& pieces() const noexcept { return pieces_; }
  /// Place for the parameter's values.
  Buffer home_of(std::size_t parameter) const { return homes_[parameter]; }
  /// Keeps `home_of` alive.
  const Memory& homes() const noexcept { return parameter_memory_; }
  /// Returns where a piece's average lies after a backward, if gradients are divided.
  Buffer average_of(const Piece& piece) const;
  const Memory& averages() const noexcept { return average_memory_; }
  bool averages_are_finite() const;

  /// Forbids writes to parameters from now on. Called when the parameters have been moved to the regions' memory.
  void protect(std::span<const Parameter> parameters, int rank);
  /// Allows writes for a step of the optimizer.
  void allow_writes();
  void forbid_writes();

  // One backward, whose reductions come in the order of the regions.

  void begin_pass() noexcept { next_region_ = 0; }
  struct Part {
    const Region& region;
    Buffer result;  ///< buffer for this rank's part of the average
  };
  Part next();
  /// Returns memory to pass as the values of a rank without samples. The values are not read, but a pointer is needed.
  void* nothing(step::Ranks& ranks);

 private:
  void add(const Bucket& bucket, const std::vector<std::size_t>& positions, std::size_t begin, std::int64_t count);

  std::shared_ptr<Shards> shards_;
  std::vector<Region> regions_;
  std::vector<Piece> pieces_;
  std::vector<Buffer> homes_;  // places of the parameters' values
  // Offsets in bytes: of regions and parameters in parameter_memory_, and of this rank's parts in average_memory_.
  std::vector<std::size_t> region_offsets_, home_offsets_, own_averages_;
  std::size_t bytes_ = 0, average_bytes_ = 0;
  Memory parameter_memory_;
  Memory average_memory_;
  std::unique_ptr<WriteProtection> protection_;  // protects the parameters' memory
  Memory nothing_;
  std::size_t next_region_ = 0;
};

}  // namespace cohort::gradients
