// The CUDA driver, loaded at run time: the build does not need it, and a machine may lack it. A Gpu object gives access
// to one of this process's GPUs: memory, marks on streams, copies. Any thread.
#pragma once

#include "base/result.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>

namespace cohort::comm::cuda {

/// A CUstream. Null: the default stream.
using Stream = void*;

/// A position in a stream, passed when all work before it is done.
class Mark {
 public:
  explicit Mark(void* event, void* context) noexcept : event_(event), context_(context) {}
  ~Mark();
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  void* event() const noexcept { return event_; }

 private:
  void* event_;
  void* context_;
};
using MarkPtr = std::shared_ptr<const Mark>;

struct Transfer {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

class Gpu {
 public:
  /// Returns the GPU with this CUDA device number, always the same object. It lives until the process ends. Throws
  /// Unavailable if there is no driver (says how to get it), InvalidArgument if there is no such GPU.
  static Gpu& at(int index);
  /// Returns the number of GPUs that this process sees; fails with Unavailable if there is no driver.
  static Result<int> count();
  /// Returns "CUDA 12.4, 2 GPUs", or why there are none.
  static Result<std::string> look();

  int index() const noexcept { return index_; }
  /// Identifies the GPU independently of its number in a process; for a part of a GPU (MIG), the part. Throws Internal.
  std::array<unsigned char, 16> uuid() const;

  /// Allocates zeroed GPU memory, until the deadline. Throws Unavailable, Timeout.
  void* allocate(std::size_t bytes, std::chrono::steady_clock::time_point deadline);
  void free(void* memory) noexcept;
  /// Pins host memory, which makes its copies fast and asynchronous. Returns false if the driver refuses; copies then
  /// still work.
  bool pin(void* host, std::size_t bytes) noexcept;
  void unpin(void* host) noexcept;

  MarkPtr mark(Stream stream);
  /// Checks a program's stream before it is marked or put after a mark: throws InvalidArgument if a CUDA graph is being
  /// captured from it, since that would destroy the graph. `doing`: "all_reduce(float32[2]) failed -- rank 0 (host)".
  void refuse_capture(Stream stream, const std::function<std::string()>& doing) const;
  /// Copies after `after`, on streams of this object, one per direction, so that both directions run concurrently.
  MarkPtr copy_to_host(void* host, const void* device, std::size_t bytes, const Mark& after);
  MarkPtr copy_to_device(void* device, const void* host, std::size_t bytes, const Mark& after);
  /// Makes several copies, after all marks in `after`; null marks are ignored.
  MarkPtr copy_to_host(std::span<const Transfer> copies, std::span<const MarkPtr> after);
  MarkPtr copy_to_device(std::span<const Transfer> copies, std::span<const MarkPtr> after);
  /// Copies within this GPU's memory, on a stream of this object.
  MarkPtr copy_on_gpu(const Transfer& copy, std::span<const MarkPtr> after);
  /// Makes a stream that does not wait for the default stream.
  Stream make_stream();
  void end_stream(Stream stream) noexcept;
  /// Copies within this GPU's memory, in the stream.
  void copy_within(void* to, const void* from, std::size_t bytes, Stream stream);
  /// Makes the memory zero, in the stream.
  void zero(void* memory, std::size_t bytes, Stream stream);
  /// Makes all later work of the stream wait for the mark.
  void put_after(Stream stream, const Mark& mark);

  /// Allocates GPU memory that is not zeroed, so it waits for no stream. Throws Unavailable.
  void* reserve(std::size_t bytes);
  /// Loads kernels from PTX, which the driver compiles for this GPU. They are never unloaded. Throws Unavailable with
  /// the driver's message.
  void* load_kernels(const char* ptx);
  void* find_kernel(void* kernels, const char* name);
  /// Launches a kernel with one argument, passed by value (the driver knows its size). `per_block`: threads of a
  /// block.
  void launch(void* kernel, unsigned blocks, unsigned per_block, const void* argument, Stream stream);
  /// Number of multiprocessors.
  unsigned processors() const noexcept { return processors_; }
  /// Returns whether the mark has passed. Throws Internal if the driver reports an error of work before the mark.
  bool passed(const Mark& mark) const;
  /// Waits for the mark. Throws Timeout, Internal. `meanwhile` is called repeatedly, and may throw too.
  void wait(const Mark& mark, std::chrono::steady_clock::time_point deadline,
            const std::function<void()>& meanwhile = {});

 private:
  friend class InGpu;
  explicit Gpu(int index);
  bool captures(Stream stream) const;
  MarkPtr new_mark();
  /// Queues copies on one of this object's streams, with `copy(transfer)`, which returns the driver's status.
  template <class Copy>
  MarkPtr give(Stream stream, std::span<const Transfer> copies, std::span<const MarkPtr> after, const Copy& copy);

  const int index_;
  int device_ = 0;
  unsigned processors_ = 1;
  void* context_ = nullptr;
  Stream to_host_ = nullptr;
  Stream to_device_ = nullptr;
};

/// The pauses of a thread that waits for a GPU; each is longer than the previous one. For the first `awake`, the thread
/// yields instead of sleeping, since many waits are over by then. Belongs to the waiting thread.
class Pauses {
 public:
  explicit Pauses(std::chrono::microseconds longest = std::chrono::microseconds(100),
                  std::chrono::microseconds awake = {}) noexcept
      : longest_(longest), awake_(awake) {}
  void take() {
    if (pause_.count() == 0) {
      std::this_thread::yield();
      if (awake_.count() > 0 && Clock::now() - begun_ < awake_) return;
    } else {
      std::this_thread::sleep_for(pause_);
    }
    pause_ = std::min(pause_ + std::chrono::microseconds(1), longest_);
  }
  void begin_again() noexcept { pause_ = {}; }

 private:
  using Clock = std::chrono::steady_clock;
  const std::chrono::microseconds longest_;
  const std::chrono::microseconds awake_;
  const Clock::time_point begun_ = Clock::now();
  std::chrono::microseconds pause_{0};
};

/// Makes the GPU's context current in this thread while this object lives: CUDA libraries then use this context, and
/// another thread's graph capture does not interfere.
class InGpu {
 public:
  /// Throws Internal.
  explicit InGpu(const Gpu& gpu);
  ~InGpu();
  InGpu(const InGpu&) = delete;
  InGpu& operator=(const InGpu&) = delete;

 private:
  friend class Gpu;
  friend class Mark;
  /// Converts to false if the context could not be made current.
  explicit InGpu(void* context) noexcept;
  explicit operator bool() const noexcept { return status_ == 0; }

  const int status_;
  int mode_ = 0;
};

}  // namespace cohort::comm::cuda
