// Which gradients are reduced together (pure), and where they lie: buckets of several gradients each, in communicator
// memory, or in a GPU's. A bucket is [large gradients | small ones], all of one type and device, each gradient aligned.
// A large gradient is a reduction of its own, which reads it where autograd made it and writes the average to its place
// here, so that most of it is never copied. The small ones are written to their places first, and are reduced together.
// A bucket shares its memory with whoever keeps tensors over it. One thread at a time.
#pragma once

#include <cohort/buffer.h>
#include <cohort/communicator.h>
#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace cohort::gradients {

/// A parameter, as far as its gradient is concerned. Every gradient is dense: its strides say in which order of
/// dimensions it lies.
struct Parameter {
  std::string name;
  DType dtype = DType::Float32;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  Device device = {};  ///< without its stream

  std::int64_t count() const noexcept;
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count()) * size_of(dtype); }
};

/// One bucket of a plan: numbers of parameters, in their order within the bucket.
using BucketPlan = std::vector<std::vector<int>>;

struct PlanOptions {
  std::size_t first_bucket_bytes = 0;
  std::size_t bucket_bytes = 0;
};

/// Fills buckets with the parameters in the order in which their gradients are expected; a bucket is closed by the
/// parameter that brings it to its size. The first bucket of each type and device is the small one. Buckets are ordered
/// by when they are complete.
BucketPlan plan_buckets(std::span<const Parameter> parameters, std::span<const int> order, const PlanOptions& options);

struct BucketLayout {
  std::size_t alignment = 64;  ///< of a gradient: a cache line, since kernels run on whole vectors
  /// From here on an operation of its own, and the waits that come with it, cost less than the copy that it saves (at 1
  /// MiB already where gradients are few, but not in convolutional networks).
  std::size_t large_bytes = std::size_t{8} << 20;
  bool holds_large = true;  ///< false: a large gradient is nowhere but where autograd made it
};

/// Memory that a framework has, for as long as `owner` lives.
Memory memory_of(void* data, std::size_t bytes, std::shared_ptr<const void> owner);

class Bucket {
 public:
  /// `members`: the numbers of those of this bucket, in order.
  Bucket(std::span<const Parameter> parameters, std::vector<int> members, const BucketLayout& layout = {});
  /// Its memory, once; to be done before anything else.
  void use(Memory memory) { memory_ = std::move(memory); }

  const std::vector<int>& members() const noexcept { return members_; }
  const Memory& memory() const noexcept { return memory_; }
  DType dtype() const noexcept { return dtype_; }
  const Device& device() const noexcept { return device_; }
  bool on_gpu() const noexcept { return device_.type != DeviceType::CPU; }
  std::size_t bytes() const noexcept { return bytes_; }

  /// In bytes, of the gradient at a position.
  std::size_t offset(std::size_t position) const { return offsets_[position]; }
  Buffer place(std::size_t position) const;  ///< of no memory if it is nowhere
  /// Positions of the large gradients, in the order of their reductions.
  const std::vector<std::size_t>& large() const noexcept { return large_; }
  bool is_large(std::size_t position) const { return is_large_[position]; }
  /// The small gradients with what lies between them, which is zero. Empty if there are none.
  Buffer small() const;
  /// Zeroes the gaps between gradients, in the host's memory.
  void clear_gaps() const;
  /// The position of the small gradient that holds this element of `small()`.
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

}  // namespace cohort::gradients
