// Reports events as they happen: components call an Observer, `track/` and tests implement one. Methods are called on
// the thread where the event happened, often the progress thread: be quick, do not throw, do not call the communicator.
// An Observer must outlive the objects it observes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cohort {

/// One finished collective. Times are of the steady clock.
struct CollectiveEvent {
  std::string_view operation;  ///< "all_reduce", ...
  std::uint64_t sequence = 0;  ///< number of the operation on its communicator, from 1
  std::size_t bytes = 0;       ///< size of this rank's payload
  std::chrono::steady_clock::time_point called, begun, ended;
  std::chrono::nanoseconds waited{0};  ///< time until all peers had arrived
  std::chrono::nanoseconds wire{0};    ///< time of the exchange with other hosts after that
  std::size_t wire_bytes = 0;          ///< bytes that this rank sent to other hosts
  bool zero_copy = false;              ///< all buffers were in communicator memory
  bool failed = false;
  std::uint64_t group = 0;  ///< number of the group of ranks, the same on all of them; 0 if there is none
};

/// A gradient bucket of a DistributedDataParallel, reported when its last gradient is ready.
struct BucketEvent {
  int index = 0;
  std::size_t bytes = 0;
  std::chrono::steady_clock::time_point ready;
};

/// One optimizer step as the training loop saw it.
struct StepEvent {
  std::int64_t step = 0;
  std::int64_t samples = 0;  ///< over all ranks
  double seconds = 0;
  double exposed_communication_seconds = 0;  ///< waiting for reductions after backward had ended
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_collective(const CollectiveEvent&) {}
  virtual void on_bucket_ready(const BucketEvent&) {}
  virtual void on_step(const StepEvent&) {}
};

}  // namespace cohort
