// safetensors: a JSON header of names, types, shapes and offsets, then the tensors' bytes. Nothing in it can be
// executed. Format and limits: huggingface/safetensors, README "Format". Values; the views are good for as long as the
// bytes they were parsed from. Any thread may call.
#pragma once

#include "base/result.h"
#include "train/formats/tensor.h"

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::formats {

struct Safetensors {
  std::vector<NamedTensor> tensors;             ///< in the order of their bytes
  std::map<std::string, std::string> metadata;  ///< "__metadata__"

  const TensorView* find(std::string_view name) const noexcept;
};

/// Views into `bytes`; `name` is for messages. Corrupt, naming the entry, unless: the header has at most 100 MB, names
/// stand there once, types are known, and the tensors fill the rest without gaps or overlaps, each as long as its type
/// and shape say.
Result<Safetensors> parse_safetensors(std::span<const std::byte> bytes, const std::string& name);

/// Larger elements first, so that all tensors are aligned; the same bytes for the same input. InvalidArgument for a
/// name that is not UTF-8 or stands there twice, or a tensor whose bytes do not agree with its shape.
Result<void> write_safetensors(const Sink& sink, std::span<const NamedTensor> tensors,
                               const std::map<std::string, std::string>& metadata = {});
/// Replaces the file as a whole.
Result<void> write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                               const std::map<std::string, std::string>& metadata = {});

}  // namespace cohort::formats
