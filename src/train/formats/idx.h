// IDX, the format of MNIST's files: two zero bytes, a type, the number of dimensions, the dimensions as big-endian
// 32-bit numbers, then the elements, big-endian, row-major; often inside gzip. Format: Yann LeCun's page on MNIST.
// Pure functions over values: any thread may call.
#pragma once

#include "base/result.h"

#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cohort::formats {

/// An array in memory: row-major, elements in the host's byte order.
struct IdxArray {
  DType dtype = DType::UInt8;       ///< UInt8, Int8, Int16, Int32, Float32 or Float64
  std::vector<std::int64_t> shape;  ///< at most 8 dimensions, each below 2^32; MNIST's images: {60000, 28, 28}
  std::vector<std::byte> data;      ///< elements() * size_of(dtype) bytes

  std::int64_t elements() const noexcept;
};

struct ReadIdxOptions {
  std::uint64_t max_bytes = std::uint64_t{4} << 30;  ///< limit after decompression
};

/// Reads a plain or gzip file, told apart by content, exactly as long as its header says. Unavailable if it
/// does not exist, Io if it cannot be read, Corrupt (naming the file and the fault) otherwise.
Result<IdxArray> read_idx(const std::string& path, const ReadIdxOptions& options = {});
/// Like read_idx, from memory; `name` is for messages.
Result<IdxArray> parse_idx(std::span<const std::byte> bytes, const std::string& name,
                           const ReadIdxOptions& options = {});

}  // namespace cohort::formats
