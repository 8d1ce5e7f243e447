// Named tensors from a file: safetensors, or a .pt, which torch itself reads (pt.h), told apart by content. And `cohort
// export`: weights from a checkpoint, a safetensors file or a .pt into a .pt or a safetensors file. One thread per
// call.
#pragma once

#include "base/files.h"
#include "base/result.h"
#include "train/formats/pt.h"
#include "train/formats/tensor.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cohort::formats {

struct Weights {
  std::vector<NamedTensor> tensors;             ///< views into `file`
  std::map<std::string, std::string> metadata;  ///< metadata of a safetensors file
  sys::FileBytes file;
};

struct WeightsOptions {
  std::string key = {};  ///< in a .pt: path of the dict of tensors, "model" or "a/b"
};

/// Returns Corrupt if the file is damaged or in neither format; otherwise errors of read_pt.
Result<Weights> read_weights(const std::string& path, const WeightsOptions& options = {});

struct ExportOptions {
  /// A checkpoint, a folder of checkpoints (the newest that is whole is taken), a .safetensors or a .pt.
  std::string from;
  std::string to;        ///< *.pt, *.pth, *.pth.tar or *.safetensors; replaced atomically
  std::string key = {};  ///< in a .pt: path of the dict of tensors
  /// Everything: all of a checkpoint, to a .pt: {"model", "optimizer", ...}, state_dicts, "sampler", "step", ...
  PtContent content = PtContent::Weights;
  PtFloats floats = PtFloats::Number;  ///< Tensor: for torch 1.13
};

struct ExportSummary {
  std::string from;  ///< the file or checkpoint that was read
  std::size_t tensors = 0;
  std::uint64_t bytes = 0;  ///< total size of the tensors
};

Result<ExportSummary> export_weights(const ExportOptions& options);

}  // namespace cohort::formats
