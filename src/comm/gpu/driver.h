// The CUDA driver, loaded at run time: nothing of it is needed to build, and a machine may lack it. A Gpu is one of
// this process's GPUs as the host sees it: its memory, marks on its streams, copies. Any thread.
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

/// A place in a stream: passed once all work before it is done.
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

/// Handle by which another process of the host finds memory of a GPU (CUipcMemHandle).
struct IpcHandle {
  char bytes[64] = {};
};

struct Transfer {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

class Gpu {
 public:
  /// The GPU of CUDA's number among those that this process sees. The same object for the same number, until the
  /// process ends. Throws Unavailable (there is no driver: how to get it), InvalidArgument (there is no such GPU).
  static Gpu& at(int index);
  /// How many this process sees; Unavailable where there is no driver.
  static Result<int> count();
  /// "CUDA 12.4, 2 GPUs", or why there are none.
  static Result<std::string> look();

  int index() const noexcept { return index_; }
  /// Identifies it, whatever number it has for a process. For a part of a GPU (MIG), the part's. Throws Internal.
  std::array<unsigned char, 16> uuid() const;

  /// Zeroed by the deadline. Throws Unavailable, Timeout.
  void* allocate(std::size_t bytes, std::chrono::steady_clock::time_point deadline);
  void free(void* memory) noexcept;
  /// Makes copies of this host memory fast, and asynchronous. False if the driver does not: they work all the same.
  bool pin(void* host, std::size_t bytes) noexcept;
  void unpin(void* host) noexcept;

  MarkPtr mark(Stream stream);
  /// Checks a program's stream before it is marked or put after a mark: throws InvalidArgument if a CUDA graph is being
  /// captured from it, which would destroy the graph. `doing`: "all_reduce(float32[2]) failed -- rank 0 (host)".
  void refuse_capture(Stream stream, const std::function<std::string()>& doing) const;
  /// Copies on streams of the GPU's own, so that both directions go on at once; after `after`.
  MarkPtr copy_to_host(void* host, const void* device, std::size_t bytes, const Mark& after);
  MarkPtr copy_to_device(void* device, const void* host, std::size_t bytes, const Mark& after);
  /// Several, after all of these marks; null ones do not count.
  MarkPtr copy_to_host(std::span<const Transfer> copies, std::span<const MarkPtr> after);
  MarkPtr copy_to_device(std::span<const Transfer> copies, std::span<const MarkPtr> after);
  /// Copies from this GPU's memory into this GPU's, on one of those streams.
  MarkPtr copy_on_gpu(const Transfer& copy, std::span<const MarkPtr> after);
  /// Makes a stream that does not wait for the default stream.
  Stream make_stream();
  void end_stream(Stream stream) noexcept;
  /// Copies from this GPU's memory into this GPU's, in the stream.
  void copy_within(void* to, const void* from, std::size_t bytes, Stream stream);
  /// Makes the memory zero, in the stream.
  void zero(void* memory, std::size_t bytes, Stream stream);
  /// Puts everything that the stream is given from now on after the mark.
  void put_after(Stream stream, const Mark& mark);

  /// Not zeroed, so that no stream is waited for. Throws Unavailable.
  void* reserve(std::size_t bytes);
  /// For other processes of the host, which open it as long as it is there: what `reserve` gave. Throws Unavailable.
  IpcHandle share(void* memory) const;
  /// Opens memory that another process shares, of this GPU or of one whose memory this one reads. Throws Unavailable.
  void* open_shared(const IpcHandle& handle) const;
  void close_shared(void* memory) noexcept;
  /// Kernels, from PTX, which the driver compiles for this GPU. They stay. Throws Unavailable: what it says of them.
  void* load_kernels(const char* ptx);
  void* find_kernel(void* kernels, const char* name);
  /// Launches with one argument by value, of which the driver knows the size; threads in blocks of so many.
  void launch(void* kernel, unsigned blocks, unsigned per_block, const void* argument, Stream stream);
  /// Multiprocessors.
  unsigned processors() const noexcept { return processors_; }
  /// Throws Internal: what the driver says of work before the mark.
  bool passed(const Mark& mark) const;
  /// Throws Timeout, Internal. `meanwhile` is called again and again, and may throw, too.
  void wait(const Mark& mark, std::chrono::steady_clock::time_point deadline,
            const std::function<void()>& meanwhile = {});

 private:
  friend class InGpu;
  explicit Gpu(int index);
  bool captures(Stream stream) const;
  MarkPtr new_mark();
  /// Gives one of the GPU's own streams copies, by `copy(transfer)`, which returns the driver's status.
  template <class Copy>
  MarkPtr give(Stream stream, std::span<const Transfer> copies, std::span<const MarkPtr> after, const Copy& copy);

  const int index_;
  int device_ = 0;
  unsigned processors_ = 1;
  void* context_ = nullptr;
  Stream to_host_ = nullptr;
  Stream to_device_ = nullptr;
};

/// The pauses of a wait for a GPU: longer and longer ones; none before the thread has been awake for a while, where it
/// waits for what takes no longer. Belongs to the thread that waits.
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

/// The GPU's context is this thread's while it lives: what libraries over CUDA then do is done there, and no graph that
/// another thread captures is in its way.
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
  /// False: it is not.
  explicit InGpu(void* context) noexcept;
  explicit operator bool() const noexcept { return status_ == 0; }

  const int status_;
  int mode_ = 0;
};

}  // namespace cohort::comm::cuda
