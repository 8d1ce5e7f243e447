// For tests: memory of every kind that a collective may be given, with guards around it. One thread at a time. With
// COHORT_TEST_DEVICE=cuda it is all a GPU's (see comm/cuda/fake): the same tests are of collectives there.
#pragma once

#include "comm/cuda/driver.h"
#include "comm/kernels/reference_fold.h"

#include <cohort/communicator.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace cohort::comm::testing {

enum class Place {
  Arena,
  Heap,
  Mixed,     ///< differs from rank to rank, and from input to output
  OddArena,  ///< aligned as the type demands and no more
  OddHeap,
  Fenced,  ///< not registered; the next byte cannot be read or written
};
inline constexpr int kPlaceCount = 6;

constexpr std::string_view to_string(Place place) noexcept {
  constexpr std::string_view kNames[] = {"arena", "heap", "mixed", "odd arena", "odd heap", "fenced"};
  return kNames[static_cast<int>(place)];
}

/// What the tests of this process give to collectives.
inline Device tested_device() {
  static const bool cuda = std::getenv("COHORT_TEST_DEVICE") != nullptr;
  return cuda ? Device{DeviceType::CUDA, 0} : Device{};
}

/// `bytes` bytes at `data()`; a pattern lies before and behind them, which `intact()` looks for.
class GuardedMemory {
 public:
  /// `turn` is 0 for inputs and 1 for outputs; `dtype` decides how odd an odd alignment may be.
  GuardedMemory(Communicator& comm, Place place, std::size_t bytes, DType dtype, int turn = 0) : bytes_(bytes) {
    if (place == Place::Mixed) place = (comm.rank() + 1) % (turn + 2) == 0 ? Place::Heap : Place::Arena;
    const std::size_t odd = place == Place::OddArena || place == Place::OddHeap
                                ? (is_complex(dtype) ? size_of(dtype) / 2 : size_of(dtype))
                                : 0;
    const std::size_t whole = 2 * kGuard + bytes + 64;
    if (on_gpu_) {
      arena_ = comm.allocate(whole, tested_device());
      data_ = static_cast<std::byte*>(arena_.data()) + kGuard + odd;
      const Bytes pattern(kGuard + bytes + behind_, std::byte{kPattern});
      write(data_ - kGuard, pattern.data(), pattern.size());
      return;
    }
    if (place == Place::Fenced) {
      const std::size_t pages = (kGuard + bytes + kPage - 1) / kPage * kPage;
      fence_bytes_ = pages + kPage;
      fence_ = ::mmap(nullptr, fence_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (fence_ == MAP_FAILED) throw std::runtime_error("mmap");
      if (::mprotect(static_cast<std::byte*>(fence_) + pages, kPage, PROT_NONE) != 0) {
        throw std::runtime_error("mprotect");
      }
      data_ = static_cast<std::byte*>(fence_) + pages - bytes;
      behind_ = 0;
    } else if (place == Place::Arena || place == Place::OddArena) {
      arena_ = comm.allocate(whole);
      data_ = static_cast<std::byte*>(arena_.data()) + kGuard + odd;
    } else {
      heap_.resize(whole + 64);
      std::byte* begin = heap_.data();
      begin += 64 - reinterpret_cast<std::uintptr_t>(begin) % 64;
      data_ = begin + kGuard + odd;
    }
    std::memset(data_ - kGuard, kPattern, kGuard + bytes + behind_);
  }
  ~GuardedMemory() {
    if (fence_ != nullptr) ::munmap(fence_, fence_bytes_);
  }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  std::byte* data() const noexcept { return data_; }
  void put(std::size_t at, const Bytes& value) const {
    if (!value.empty()) write(data_ + at, value.data(), value.size());
  }
  Bytes get(std::size_t at, std::size_t bytes) const {
    Bytes all(kGuard + bytes_ + behind_);
    read(all.data(), data_ - kGuard, all.size());
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(kGuard + at);
    return Bytes(begin, begin + static_cast<std::ptrdiff_t>(bytes));
  }
  /// Index of the first byte from `at` on that is not as in `value`, or -1.
  std::ptrdiff_t differs(std::size_t at, const Bytes& value) const {
    if (value.empty()) return -1;
    const Bytes here = get(at, value.size());
    if (here == value) return -1;
    return std::mismatch(value.begin(), value.end(), here.begin()).first - value.begin();
  }
  bool intact() const {
    Bytes all(kGuard + bytes_ + behind_);
    read(all.data(), data_ - kGuard, all.size());
    const auto good = [](std::byte value) { return value == std::byte{kPattern}; };
    return std::all_of(all.begin(), all.begin() + kGuard, good) &&
           std::all_of(all.begin() + static_cast<std::ptrdiff_t>(kGuard + bytes_), all.end(), good);
  }

 private:
  void write(std::byte* to, const std::byte* from, std::size_t bytes) const {
    if (!on_gpu_) {
      std::memcpy(to, from, bytes);
      return;
    }
    cuda::Gpu& gpu = cuda::Gpu::at(tested_device().index);
    gpu.wait(*gpu.copy_to_device(to, from, bytes, *gpu.mark(nullptr)), Staging::Clock::time_point::max());
  }
  void read(std::byte* to, const std::byte* from, std::size_t bytes) const {
    if (!on_gpu_) {
      std::memcpy(to, from, bytes);
      return;
    }
    cuda::Gpu& gpu = cuda::Gpu::at(tested_device().index);
    gpu.wait(*gpu.copy_to_host(to, from, bytes, *gpu.mark(nullptr)), Staging::Clock::time_point::max());
  }

  static constexpr std::size_t kGuard = 64;
  static constexpr std::size_t kPage = 4096;
  static constexpr int kPattern = 0xA5;

  const bool on_gpu_ = tested_device().type == DeviceType::CUDA;
  const std::size_t bytes_;
  std::size_t behind_ = kGuard - 16;  // an odd place shifts everything by up to 16
  Memory arena_;
  Bytes heap_;
  void* fence_ = nullptr;
  std::size_t fence_bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace cohort::comm::testing
