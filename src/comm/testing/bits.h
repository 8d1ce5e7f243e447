// For tests: a long program of reductions whose results are boiled down to one number per rank. Worlds that go other
// ways, or whose ranks come in another order, have to give the same numbers.
#pragma once

#include "comm/kernels/reference_fold.h"

#include <cohort/communicator.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>

namespace cohort::comm::testing {

/// FNV-1a over words (Fowler, Noll, Vo).
inline std::uint64_t digest(std::uint64_t before, const std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + i, std::min<std::size_t>(8, bytes - i));
    before = (before ^ word) * 0x100000001B3ull;
  }
  return before;
}

/// Makes `calls` reductions of seeded types, sizes and memory; before each, this rank delays itself as `jitter` has it.
/// Returns the digest of all results of this rank.
inline std::uint64_t bits_of(Communicator& comm, int calls, std::uint64_t jitter) {
  constexpr std::array<DType, 5> kTypes = {DType::Float32, DType::BFloat16, DType::Float16, DType::Float64,
                                           DType::Complex64};
  constexpr std::array<ReduceOp, 3> kOps = {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Product};
  constexpr std::int64_t kMost = 40000;
  constexpr std::size_t kMostBytes = kMost * 8;
  std::array<Bytes, kTypes.size()> inputs;
  for (std::size_t i = 0; i < kTypes.size(); ++i) {
    inputs[i] = interesting(kTypes[i], kMost, 77 + static_cast<std::uint64_t>(comm.rank()));
  }
  Memory arena = comm.allocate(kMostBytes);
  Bytes heap(kMostBytes);
  std::mt19937_64 program(5);  // the same on all ranks
  std::mt19937_64 delays(jitter * 1000 + static_cast<std::uint64_t>(comm.rank()));
  std::uint64_t result = 0xCBF29CE484222325ull;
  for (int call = 0; call < calls; ++call) {
    const std::size_t which = program() % kTypes.size();
    const DType dtype = kTypes[which];
    const ReduceOp op = kOps[program() % kOps.size()];
    const std::uint64_t size_class = program() % 400;
    const std::uint64_t most = size_class == 0 ? kMost : size_class < 20 ? 3000 : size_class < 120 ? 100 : 12;
    const auto count = static_cast<std::int64_t>(1 + program() % most);
    const auto begin = static_cast<std::int64_t>(program() % static_cast<std::uint64_t>(kMost - count + 1));
    const bool registered = program() % 2 == 0;
    const bool apart = program() % 4 == 0;
    const auto delay = delays() % 1024;
    if (delay < 200) std::this_thread::yield();
    if (delay == 1023) std::this_thread::sleep_for(std::chrono::microseconds(50));
    const std::size_t element = size_of(dtype);
    const std::size_t bytes = static_cast<std::size_t>(count) * element;
    const std::byte* const from = inputs[which].data() + static_cast<std::size_t>(begin) * element;
    std::byte* const to = registered ? static_cast<std::byte*>(arena.data()) : heap.data();
    if (apart) {
      comm.all_reduce(ConstBuffer(from, count, dtype), Buffer(to, count, dtype), {.op = op}).wait();
    } else {
      std::memcpy(to, from, bytes);
      comm.all_reduce(Buffer(to, count, dtype), {.op = op}).wait();
    }
    result = digest(result, to, bytes);
  }
  return result;
}

}  // namespace cohort::comm::testing
