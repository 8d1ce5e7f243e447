// Decides which gradients are reduced together (pure), and places them in buckets, in communicator or GPU memory. A
// bucket is [large gradients | small gradients], all of one type and device, each gradient aligned. Each large gradient
// is reduced on its own. The reduction reads it where autograd made it and writes the average to its place in the
// bucket, so that most of the gradient is never copied. Small gradients are first written to their places, and are
// reduced together. A bucket and the tensors over it share its memory. One thread at a time.
#pragma once

#include <cohort/buffer.h>
#include <cohort/communicator.h>
#include <cohort/dtype.h>
#include <cohort/observer.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace cohort::gradients {

/// The properties of a parameter that matter for its gradient. Every gradient is dense, and its strides give the order
/// of dimensions in memory.
struct Parameter {
  std::string name;
  DType dtype = DType::Float32;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  Device device = {};  ///< device of the parameter; without a stream

  std::int64_t count() const noexcept;
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count()) * size_of(dtype); }
};

/// One bucket of a plan: numbers of parameters, in their order within the bucket.
using BucketPlan = std::vector<std::vector<int>>;

struct PlanOptions {
  std::size_t first_bucket_bytes = 0;
  std::size_t bucket_bytes = 0;
};

/// Fills buckets with the parameters in the order in which their gradients are expected. The parameter with which a
/// bucket reaches its size is its last. The first bucket of each type and device is smaller. Buckets are ordered by the
/// time at which they are complete.
BucketPlan plan_buckets(std::span<const Parameter> parameters, std::span<const int> order, const PlanOptions& options);

struct BucketLayout {
  std::size_t alignment = 64;  ///< alignment of each gradient: a cache line, since kernels run on whole vectors
  /// Size from which a separate operation, with its waits, costs less than the copy that it saves (1 MiB would do for
  /// few gradients, but not for convolutional networks).
  std::size_t large_bytes = std::size_t{8} << 20;
  bool holds_large = true;  ///< false: a large gradient has no place in the bucket, and stays where autograd made it
};

/// Wraps memory of a framework, which stays valid for as long as `owner` lives.
Memory memory_of(void* data, std::size_t bytes, std::shared_ptr<const void> owner);

class Bucket {
 public:
  /// `members`: the numbers of this bucket's parameters, in order.
  Bucket(std::span<const Parameter> parameters, std::vector<int> members, const BucketLayout& layout = {});
  /// Sets the bucket's memory; called once, before any other function.
  void use(Memory memory) { memory_ = std::move(memory); }

  const std::vector<int>& members() const noexcept { return members_; }
  const Memory& memory() const noexcept { return memory_; }
  DType dtype() const noexcept { return dtype_; }
  const Device& device() const noexcept { return device_; }
  bool on_gpu() const noexcept { return device_.type != DeviceType::CPU; }
  std::size_t bytes() const noexcept { return bytes_; }

  /// Returns the offset, in bytes, of the gradient at a position.
  std::size_t offset(std::size_t position) const { return offsets_[position]; }
  Buffer place(std::size_t position) const;  ///< null data if the gradient has no place in the bucket
  /// Positions of the large gradients, in the order of their reductions.
  const std::vector<std::size_t>& large() const noexcept { return large_; }
  bool is_large(std::size_t position) const { return is_large_[position]; }
  /// Returns the small gradients with the gaps between them, which are zero. Empty if there are no small gradients.
  Buffer small() const;
  /// Zeroes the gaps between gradients, in the host's memory.
  void clear_gaps() const;
  /// Returns the position of the small gradient that holds this element of `small()`.
  std::size_t position_of(std::int64_t element) const;

 private:
  Memory memory_;
  DType dtype_;
  Device device_;
  std::vector<int> members_;
  bool holds_large_;
  std::vector<std::size_t> large_;
  std::vector<bool> is_large_;
  std::vector<std::int64_t> counts_;
  std::vector<std::size_t> offsets_;
  std::size_t small_begin_ = 0;
  std::size_t bytes_ = 0;
};

/// Reports buckets to the observer when they are full, and to the rank's timeline from then until they are reduced.
class BucketTimes {
 public:
  explicit BucketTimes(Observer* observer) : observer_(observer) {}
  void note_ready(std::size_t number, const std::vector<Bucket>& buckets);
  /// `work`: a started reduction of `bytes` bytes of the bucket.
  void note_reduction(Work& work, std::size_t number, std::size_t bytes) const;

 private:
  Observer* const observer_;                                     // may be null
  std::vector<std::chrono::steady_clock::time_point> ready_at_;  // by bucket; empty without a timeline
};

}  // namespace cohort::gradients
