// One call of a collective on its way through the engine, and how operations are described in messages. Plain data.
#pragma once

#include "comm/local/control.h"

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::comm::local {

struct Operation {
  Kind kind = Kind::Barrier;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  int root = 0;
  std::int64_t count = 0;  ///< elements of the smaller buffer
  std::optional<double> weight = {};
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t input_bytes = 0;
  std::size_t output_bytes = 0;
  std::chrono::milliseconds timeout{0};
  std::chrono::steady_clock::time_point called = {};

  std::chrono::steady_clock::time_point deadline() const noexcept { return called + timeout; }
  std::size_t payload() const noexcept { return input_bytes > output_bytes ? input_bytes : output_bytes; }
};

/// "all_reduce", ...
std::string_view name_of(Kind kind) noexcept;
/// "all_reduce(float32[10], sum)".
std::string to_string(const Descriptor& descriptor);
/// True if two ranks may bring these to the same operation. (A rank that has joined goes with everything.)
bool agree(const Descriptor& a, const Descriptor& b) noexcept;

}  // namespace cohort::comm::local
