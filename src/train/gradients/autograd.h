// A framework's part of data-parallel training: moves gradients between the framework's tensors and their places in the
// buckets. Called only from within the core's functions, on the thread that calls them; may throw.
#pragma once

#include <cohort/buffer.h>
#include <cohort/communicator.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace cohort::gradients {

class Autograd {
 public:
  virtual ~Autograd() = default;
  /// Moves existing gradients to their places in new buckets.
  virtual void take_places() = 0;
  /// Puts the parameter's gradient into its place if it lies elsewhere. Returns false if the parameter has no gradient.
  virtual bool put_in_place(std::size_t parameter) = 0;
  /// Makes the values in the parameter's place its gradient. If gradients are divided, the values in the places of the
  /// parameter's pieces are added to the pieces' gradients, and the parameter itself has none.
  virtual void give(std::size_t parameter) = 0;
  /// Removes the parameter's gradient; its place keeps the values.
  virtual void drop(std::size_t parameter) = 0;
  /// Removes the gradients of all parameters.
  virtual void drop_all() = 0;
  /// Zeroes the gradient's place.
  virtual void clear(std::size_t parameter) = 0;
  /// Saves the values in the parameter's place for `put_back`, until `drop_kept`.
  virtual void keep(std::size_t parameter) = 0;
  virtual void put_back(std::size_t parameter) = 0;
  virtual void drop_kept() = 0;
  /// Moves the gradients of pieces aside, since the next reductions write to their memory.
  virtual void put_aside() {}
  /// Calls Reducer::finish at the end of the backward under way. Releases `pass` then, or when the backward fails.
  virtual void call_at_end(std::shared_ptr<void> pass) = 0;

  // Parameter values, which are compared over the ranks.

  /// Returns the values of these parameters, each contiguous; empty for values that the host cannot read that way.
  virtual std::vector<std::span<const std::byte>> values_of(std::span<const int> parameters) = 0;
  /// Collective. Throws Mismatch on every rank if these parameters differ, as `require_same_parameters` does.
  virtual void compare(std::span<const int> parameters, std::int64_t step) = 0;

  // GPU memory.

  /// Allocates zeroed memory.
  virtual Memory allocate(const Device& gpu, std::size_t bytes) = 0;
  /// Returns the stream for the work of the functions below.
  virtual void* stream_of(const Device& gpu) = 0;
  /// Returns whether the gradients in these places are finite.
  virtual bool are_finite(std::span<const int> parameters) = 0;
  /// Copies the bytes of the gradient's place, in the order in which they lie in memory.
  virtual std::vector<std::byte> copy_to_host(std::size_t parameter) = 0;
};

}  // namespace cohort::gradients
