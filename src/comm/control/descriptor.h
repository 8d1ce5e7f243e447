// What a rank says of an operation before it begins. All ranks of a world compare all of them (agreement.h), so all
// come to the same decision. Plain values of one layout, which travel between the ranks of one build.
#pragma once

#include "comm/request.h"

#include <cohort/dtype.h>

#include <cstdint>

namespace cohort::comm {

/// Memory of a rank. Segment 0: not mapped by peers; then the offset is its address in that rank's process.
struct Location {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
};

/// What a rank brings to an operation; all ranks read all of them before any result is delivered.
struct Descriptor {
  Kind kind = Kind::None;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  std::uint8_t weighted : 1 = 0;
  std::uint8_t bf16_wire : 1 = 0;     ///< as in Request
  std::uint8_t check_finite : 1 = 0;  ///< somebody asks for it; ranks need not agree
  std::uint8_t device : 2 = 0;        ///< DeviceType
  std::uint8_t fast : 1 = 0;          ///< as in Request
  std::uint8_t round : 1 = 0;         ///< likewise: carried out elsewhere
  std::int32_t root = 0;
  std::int64_t count = 0;  ///< elements, of the smaller buffer where there are parts; of Joined, when (then `detail`)
  double weight = 1;
  double prescale = 1;
  double postscale = 1;
  std::uint64_t detail = 0;  ///< digest of counts or of a group, where there are any
  std::uint32_t input_segment = 0;
  std::uint32_t output_segment = 0;
  std::uint64_t input_offset = 0;
  std::uint64_t output_offset = 0;
  std::uint64_t announcements = 0;  ///< messages about segments that the rank has sent to each peer so far

  Location input() const noexcept { return {input_segment, input_offset}; }
  Location output() const noexcept { return {output_segment, output_offset}; }
};
static_assert(sizeof(Descriptor) == 80);

}  // namespace cohort::comm
