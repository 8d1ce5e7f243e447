// For tests: communicator memory as numbers.
#pragma once

#include <cohort/communicator.h>

#include <span>

namespace cohort::comm::testing {

inline std::span<float> floats(Memory& memory) {
  return {static_cast<float*>(memory.data()), memory.bytes() / sizeof(float)};
}

}  // namespace cohort::comm::testing
