// Interface of a framework to data-parallel training: gradients as it knows them, over their places in the buckets.
// Called from within the core's functions only, on the thread that calls those; may throw.
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
  /// There are new buckets: gradients that exist are put into their places.
  virtual void take_places() = 0;
  /// Puts the gradient into its place, if there is one and it lies elsewhere. False: there is none.
  virtual bool put_in_place(std::size_t parameter) = 0;
  /// The parameter's gradient is what lies in its place. Of divided gradients: that of its pieces is what lies in
  /// theirs (and is added to what they have), and it has none itself.
  virtual void give(std::size_t parameter) = 0;
  /// No parameter has a gradient any more.
  virtual void drop_all() = 0;
  /// Zeroes the gradient's place.
  virtual void clear(std::size_t parameter) = 0;
  /// Remembers what lies in its place, for `put_back`, until `drop_kept`.
  virtual void keep(std::size_t parameter) = 0;
  virtual void put_back(std::size_t parameter) = 0;
  virtual void drop_kept() = 0;
  /// Keeps the gradients of pieces from the reductions that come, which write to where they lie.
  virtual void put_aside() {}
  /// Calls Reducer::finish at the end of the backward under way. `pass` is let go then, or where the backward fails.
  virtual void call_at_end(std::shared_ptr<void> pass) = 0;

  // Values of parameters, which are compared over the ranks.

  /// The values of these, each in one piece of memory; empty where the host cannot read them so.
  virtual std::vector<std::span<const std::byte>> values_of(std::span<const int> parameters) = 0;
  /// Collective: throws Mismatch on every rank if the values of these differ, as `require_same_parameters`.
  virtual void compare(std::span<const int> parameters, std::int64_t step) = 0;

  // Memory of a GPU.

  /// Zeroed.
  virtual Memory allocate(const Device& gpu, std::size_t bytes) = 0;
  /// The stream for the work of what is called from here.
  virtual void* stream_of(const Device& gpu) = 0;
  /// Returns whether the gradients in these places are finite.
  virtual bool are_finite(std::span<const int> parameters) = 0;
  /// Copies the bytes of the gradient's place, as they lie.
  virtual std::vector<std::byte> copy_to_host(std::size_t parameter) = 0;
};

}  // namespace cohort::gradients
