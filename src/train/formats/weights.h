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

enum class ExportContent : std::uint8_t {
  Weights,     ///< a dict of tensors, for model.load_state_dict
  Everything,  ///< of a checkpoint, into a .pt: {"model", "optimizer", ...}, state_dicts, "sampler", "step", ...
};

struct ExportOptions {
  /// A checkpoint, a folder of checkpoints (the newest that is whole is taken), a .safetensors or a .pt.
  std::string from;
  std::string to;        ///< *.pt, *.pth, *.pth.tar or *.safetensors; replaced as a whole
  std::string key = {};  ///< in a .pt: where the dict of tensors is
  ExportContent content = ExportContent::Weights;
  PtFloats floats = PtFloats::Number;  ///< Tensor: for torch 1.13
};

struct ExportSummary {
  std::string from;  ///< the file or checkpoint that was read
  std::size_t tensors = 0;
  std::uint64_t bytes = 0;  ///< of the tensors
};

Result<ExportSummary> export_weights(const ExportOptions& options);

}  // namespace cohort::formats
