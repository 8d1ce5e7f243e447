// `.pt` files, read and written by torch itself: by the python3 in PATH, which runs python/cohort/_pt_files.py. So no
// pickle is read here, and torch's (weights_only=True) executes nothing in a file. Any thread may call.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"

#include <cstdint>
#include <string>

namespace cohort::formats {

/// True if the file begins as only a .pt does.
bool is_pt(const std::string& path);

/// Returns the tensors of a .pt as safetensors, in a file in memory. `key`: path of the dict of tensors, "a/b". Returns
/// Corrupt for a file that is damaged or holds more than tensors, numbers, text and their containers, InvalidArgument
/// (naming the existing keys) if there is no dict of tensors under the key, Unavailable if no python3 has torch.
Result<sys::UniqueFd> read_pt(const std::string& path, const std::string& key);

enum class PtContent : std::uint8_t {
  Weights,     ///< a dict of the tensors
  Everything,  ///< of the tensors of a checkpoint and the texts beside them: as _pt_files.py says
};
enum class PtFloats : std::uint8_t {
  Number,  ///< as Python floats
  Tensor,  ///< as float64 tensors without dimensions, since torch 1.13 with weights_only=True refuses floats
};

/// Writes the tensors of an open safetensors file as a .pt, which is replaced atomically. Errors are as above.
Result<void> write_pt(const std::string& path, int safetensors, PtContent content, PtFloats floats);

}  // namespace cohort::formats
