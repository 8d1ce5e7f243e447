// Named tensors from a file: safetensors or .pt, told apart by content. One thread per object.
// Conversion for `cohort export`: weights from a checkpoint, a safetensors file or a .pt into a .pt or a safetensors
// file, without libtorch. One thread per call.
#pragma once

#include "base/files.h"
#include "base/result.h"
#include "train/formats/pt.h"
#include "train/formats/tensor.h"

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace cohort::formats {

struct Weights {
  std::vector<NamedTensor> tensors;             ///< views into the members below, or into the given bytes
  std::map<std::string, std::string> metadata;  ///< metadata of a safetensors file
  sys::FileBytes file;
  std::vector<std::vector<std::byte>> gathered;  ///< copies of tensors that are strided in the file
};

struct WeightsOptions {
  std::string key = {};  ///< in a .pt: path of the dict of tensors, "model" or "a/b"
};

/// Returns Corrupt if the bytes are damaged or in neither format; InvalidArgument (naming the existing keys) if a .pt
/// has no dict of tensors under options.key.
Result<Weights> parse_weights(std::span<const std::byte> bytes, const std::string& name,
                              const WeightsOptions& options = {});
Result<Weights> read_weights(const std::string& path, const WeightsOptions& options = {});

enum class ExportContent : std::uint8_t {
  Weights,     ///< a dict of tensors, for model.load_state_dict
  Everything,  ///< a whole checkpoint, as a .pt: the state_dicts "model", "optimizer", ..., "sampler", "step", ...
};

struct ExportOptions {
  /// A checkpoint, a folder of checkpoints (the newest that is whole is taken), a .safetensors or a .pt.
  std::string from;
  std::string to;        ///< *.pt, *.pth, *.pth.tar or *.safetensors; replaced atomically
  std::string key = {};  ///< in a .pt: path of the dict of tensors
  ExportContent content = ExportContent::Weights;
  PtFloats floats = PtFloats::Number;  ///< Tensor: for torch 1.13
};

struct ExportSummary {
  std::string from;  ///< the file or checkpoint that was read
  std::size_t tensors = 0;
  std::uint64_t bytes = 0;  ///< total size of the tensors
};

Result<ExportSummary> export_weights(const ExportOptions& options);

}  // namespace cohort::formats
