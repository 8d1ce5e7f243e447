// Named tensors out of whatever file holds them: safetensors or .pt, told apart by content. One thread per object.
#pragma once

#include "base/result.h"
#include "formats/tensor.h"
#include "sys/files.h"

#include <map>
#include <span>
#include <string>
#include <vector>

namespace cohort::formats {

struct Weights {
  std::vector<NamedTensor> tensors;             ///< views into what the members below own, or into the bytes given
  std::map<std::string, std::string> metadata;  ///< of safetensors
  sys::FileBytes file;
  std::vector<std::vector<std::byte>> gathered;  ///< tensors that lay strided in the file
};

struct WeightsOptions {
  std::string key = {};  ///< in a .pt: where the dict of tensors is, "model" or "a/b"
};

/// Corrupt if the bytes are damaged or neither format; InvalidArgument (naming the keys that are there) if a .pt does
/// not hold a dict of tensors under options.key.
Result<Weights> parse_weights(std::span<const std::byte> bytes, const std::string& name,
                              const WeightsOptions& options = {});
Result<Weights> read_weights(const std::string& path, const WeightsOptions& options = {});

}  // namespace cohort::formats
