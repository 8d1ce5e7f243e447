// For tests: memory of every kind that a collective may be given, with guards around it. One thread at a time. With
// COHORT_TEST_DEVICE=cuda all memory is on a GPU (see comm/gpu/fake), so that the same tests check collectives there.
#pragma once

#include "comm/gpu/driver.h"
#include "comm/testing/naive.h"
#include "comm/testing/reference_fold.h"

#include <cohort/communicator.h>

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm::testing {

enum class Place {
  Arena,
  Heap,
  Mixed,     ///< differs from rank to rank, and from input to output
  OddArena,  ///< aligned only as the type demands
  OddHeap,
  Fenced,  ///< not registered; the next byte cannot be read or written
};
inline constexpr int kPlaceCount = 6;

constexpr std::string_view to_string(Place place) noexcept {
  constexpr std::string_view kNames[] = {"arena", "heap", "mixed", "odd arena", "odd heap", "fenced"};
  return kNames[static_cast<int>(place)];
}

/// The device of the memory that the tests of this process give to collectives.
inline Device tested_device() {
  static const bool cuda = std::getenv("COHORT_TEST_DEVICE") != nullptr;
  return cuda ? Device{DeviceType::CUDA, 0} : Device{};
}

/// `bytes` bytes at `data()`; `intact()` looks for the pattern before and behind them.
class GuardedMemory {
 public:
  /// `turn` is 0 for inputs and 1 for outputs; `dtype` decides which odd alignments are possible.
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
  /// Index of the first byte from `at` on that differs from `value`, or -1.
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
    gpu.wait(*gpu.copy_to_device(to, from, bytes, *gpu.mark(nullptr)), std::chrono::steady_clock::time_point::max());
  }
  void read(std::byte* to, const std::byte* from, std::size_t bytes) const {
    if (!on_gpu_) {
      std::memcpy(to, from, bytes);
      return;
    }
    cuda::Gpu& gpu = cuda::Gpu::at(tested_device().index);
    gpu.wait(*gpu.copy_to_host(to, from, bytes, *gpu.mark(nullptr)), std::chrono::steady_clock::time_point::max());
  }

  static constexpr std::size_t kGuard = 64;
  static inline const auto kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
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

// For tests: carries out a `Call` on a communicator, in guarded memory, and compares the result with that of `naive`.
// Used by worlds of threads and of processes alike. One thread per communicator.

/// Sets COHORT_PLAN while it lives, for worlds that are formed meanwhile. An empty text: the default plan.
class ForcedPlan {
 public:
  explicit ForcedPlan(std::string text) {
    // Under qemu, a process cannot even read itself through the kernel.
    if (const auto at = text.find("cross=on"); at != std::string::npos && !kernel_reads())
      text.replace(at, 8, "cross=off");
    if (const char* const before = std::getenv("COHORT_PLAN")) before_ = before;
    ::setenv("COHORT_PLAN", text.c_str(), 1);
  }
  ~ForcedPlan() {
    if (before_) {
      ::setenv("COHORT_PLAN", before_->c_str(), 1);
    } else {
      ::unsetenv("COHORT_PLAN");
    }
  }
  ForcedPlan(const ForcedPlan&) = delete;
  ForcedPlan& operator=(const ForcedPlan&) = delete;

 private:
  static bool kernel_reads() noexcept {
    char from = 1, to = 0;
    const iovec source{&from, 1}, target{&to, 1};
    return ::process_vm_readv(::getpid(), &target, 1, &source, 1, 0) == 1;
  }
  std::optional<std::string> before_;
};

inline AllReduceOptions all_reduce_options(const Call& call, int rank) {
  AllReduceOptions options;
  options.op = call.op;
  options.prescale = call.prescale;
  options.postscale = call.postscale;
  if (!call.weights.empty()) {
    options.weight = call.weights[static_cast<std::size_t>(rank)];
    options.gpu_sums = GpuSums::Exact;  // NCCL also sums shares for equal weights beside a 0, with other bits
  }
  return options;
}

inline ReduceScatterOptions reduce_scatter_options(const Call& call, int rank) {
  const AllReduceOptions common = all_reduce_options(call, rank);
  ReduceScatterOptions options;
  options.op = common.op;
  options.weight = common.weight;
  options.prescale = common.prescale;
  options.postscale = common.postscale;
  options.gpu_sums = common.gpu_sums;
  return options;
}

/// Starts the call with this memory. If a rank has no input or receives nothing, an empty buffer is passed.
inline Work start(Communicator& comm, const Call& call, const void* input, void* output) {
  const int rank = comm.rank();
  const int size = comm.size();
  const ConstBuffer in(input, elements_in(call, size, rank), call.dtype, tested_device());
  const Buffer out(output, elements_out(call, size, rank), call.dtype, tested_device());
  switch (call.kind) {
    case Kind::AllReduce: return comm.all_reduce(in, out, all_reduce_options(call, rank));
    case Kind::Reduce: {
      const AllReduceOptions common = all_reduce_options(call, rank);
      return comm.reduce(in, out,
                         {.root = call.root,
                          .op = common.op,
                          .weight = common.weight,
                          .prescale = common.prescale,
                          .postscale = common.postscale});
    }
    case Kind::ReduceScatter: return comm.reduce_scatter(in, out, reduce_scatter_options(call, rank));
    case Kind::ReduceScatterV: return comm.reduce_scatter_v(in, out, call.counts, reduce_scatter_options(call, rank));
    case Kind::Broadcast:
      return comm.broadcast(Buffer(output, call.count, call.dtype, tested_device()), {.root = call.root});
    case Kind::AllGather: return comm.all_gather(in, out);
    case Kind::AllGatherV: return comm.all_gather_v(in, out, call.counts);
    case Kind::Gather: return comm.gather(in, out, {.root = call.root});
    case Kind::GatherV: return comm.gather_v(in, out, call.counts, {.root = call.root});
    case Kind::ScatterV: return comm.scatter_v(in, out, call.counts, {.root = call.root});
    case Kind::Scatter: return comm.scatter(in, out, {.root = call.root});
    case Kind::AllToAll: return comm.all_to_all(in, out);
    case Kind::AllToAllV: {
      std::vector<std::int64_t> to;
      std::vector<std::int64_t> from;
      for (int other = 0; other < size; ++other) {
        to.push_back(sent(call, size, rank, other));
        from.push_back(sent(call, size, other, rank));
      }
      return comm.all_to_all_v(in, to, out, from);
    }
    default: return comm.barrier();
  }
}

/// The memory of one rank in one call: input and output, apart or in place.
class CallMemory {
 public:
  /// A broadcast is always in place, all_to_all never.
  CallMemory(Communicator& comm, const Call& call, Place place, bool in_place_wanted, const Bytes& input)
      : call_(call), rank_(comm.rank()), given_(input) {
    const std::size_t element = size_of(call.dtype);
    const std::size_t out_bytes = static_cast<std::size_t>(elements_out(call, comm.size(), rank_)) * element;
    const bool moves = call.kind == Kind::AllToAll || call.kind == Kind::AllToAllV;
    in_place_ = call.kind == Kind::Broadcast || (in_place_wanted && !moves);
    if (in_place_) {
      const InPlace where = in_place(call, rank_);
      input_at_ = static_cast<std::size_t>(where.input) * element;
      output_at_ = static_cast<std::size_t>(where.output) * element;
      const std::size_t bytes = std::max(input_at_ + input.size(), output_at_ + out_bytes);
      input_ = std::make_unique<GuardedMemory>(comm, place, bytes, call.dtype);
    } else {
      input_ = std::make_unique<GuardedMemory>(comm, place, input.size(), call.dtype);
      output_ = std::make_unique<GuardedMemory>(comm, place, out_bytes, call.dtype, 1);
    }
    input_->put(input_at_, input);
  }
  const void* input() const { return input_->data() + input_at_; }
  void* output() const { return (output_ ? output_->data() : input_->data()) + output_at_; }

  /// Empty if the output is as expected, the input unchanged (unless in place), and nothing else was written.
  std::string decision(const Bytes& expected) const {
    const GuardedMemory& out = output_ ? *output_ : *input_;
    if (const auto at = out.differs(output_at_, expected); at >= 0) {
      const auto element = static_cast<std::ptrdiff_t>(size_of(call_.dtype));
      std::string bytes;
      const Bytes is = out.get(output_at_, expected.size());
      for (std::ptrdiff_t i = at / element * element; i < at / element * element + element; ++i) {
        bytes += fmt::format(" {:02x}/{:02x}", static_cast<int>(is[static_cast<std::size_t>(i)]),
                             static_cast<int>(expected[static_cast<std::size_t>(i)]));
      }
      return fmt::format("{}: rank {}: element {} is wrong (bytes, is/should be:{})", describe(call_), rank_,
                         at / element, bytes);
    }
    const bool kept = !in_place_ || expected.empty();
    if (kept && input_->differs(input_at_, given_) >= 0) {
      return fmt::format("{}: rank {}: the input was written to", describe(call_), rank_);
    }
    if (!input_->intact() || !out.intact()) {
      return fmt::format("{}: rank {}: memory around the buffers was written to", describe(call_), rank_);
    }
    return "";
  }

 private:
  const Call& call_;
  const int rank_;
  const Bytes& given_;
  bool in_place_ = false;
  std::size_t input_at_ = 0;
  std::size_t output_at_ = 0;
  std::unique_ptr<GuardedMemory> input_;
  std::unique_ptr<GuardedMemory> output_;  // null: in place
};

/// All ranks' inputs of a call, and the expected outputs.
struct Prepared {
  std::vector<Bytes> inputs;
  std::vector<Bytes> outputs;
};
inline Prepared prepare(const Call& call, int size, std::uint64_t seed) {
  Prepared made;
  for (int rank = 0; rank < size; ++rank) {
    made.inputs.push_back(
        interesting(call.dtype, elements_in(call, size, rank), seed * 1000 + static_cast<std::uint64_t>(rank)));
  }
  made.outputs = naive(call, made.inputs);
  return made;
}

/// Starts the grouped form of calls that differ only in dtype and count.
inline Work start_grouped(Communicator& comm, const Call& first, std::span<const ConstBuffer> inputs,
                          std::span<const Buffer> outputs) {
  switch (first.kind) {
    case Kind::AllReduce: return comm.all_reduce(outputs, all_reduce_options(first, comm.rank()));
    case Kind::Broadcast: return comm.broadcast(outputs, {.root = first.root});
    case Kind::AllGather: return comm.all_gather(inputs, outputs);
    default: return comm.reduce_scatter(inputs, outputs, reduce_scatter_options(first, comm.rank()));
  }
}

/// Starts one call, or several as a group, each in its own memory.
inline Work start(Communicator& comm, const std::vector<Call>& calls,
                  const std::vector<std::unique_ptr<CallMemory>>& memories) {
  if (calls.size() == 1) return start(comm, calls[0], memories[0]->input(), memories[0]->output());
  std::vector<ConstBuffer> inputs;
  std::vector<Buffer> outputs;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    inputs.emplace_back(memories[i]->input(), elements_in(calls[i], comm.size(), comm.rank()), calls[i].dtype,
                        tested_device());
    outputs.emplace_back(memories[i]->output(), elements_out(calls[i], comm.size(), comm.rank()), calls[i].dtype,
                         tested_device());
  }
  return start_grouped(comm, calls.front(), inputs, outputs);
}

}  // namespace cohort::comm::testing
