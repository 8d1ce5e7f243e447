// safetensors: a JSON header of names, types, shapes and offsets, then the tensors' bytes. A file contains no
// executable code. Format and limits: huggingface/safetensors, README "Format". Values; views are valid as long as the
// bytes from which they were parsed. Any thread may call.
#pragma once

#include "base/result.h"
#include "train/formats/tensor.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::formats {

struct Safetensors {
  std::vector<NamedTensor> tensors;             ///< ordered by their positions in the file
  std::map<std::string, std::string> metadata;  ///< "__metadata__"

  const TensorView* find(std::string_view name) const noexcept;
};

/// Returns views into `bytes`; `name` is for messages. Returns Corrupt, naming the entry, unless the header has at most
/// 100 MB, names are unique, types are known, and the tensors fill the rest without gaps or overlaps, each as long as
/// its type and shape say.
Result<Safetensors> parse_safetensors(std::span<const std::byte> bytes, const std::string& name);

struct SafetensorsEntry {
  std::string name;
  ElementType type = ElementType::Float32;
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  ///< offset of its bytes in the file
  std::uint64_t bytes = 0;
};
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;        ///< ordered by their positions in the file
  std::map<std::string, std::string> metadata;  ///< "__metadata__"
};
/// Parses the header of a file from `head`, its beginning with the whole header; as strict as parse_safetensors.
Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_bytes,
                                                   const std::string& name);
/// Returns the number of bytes up to the end of the header, given the file's first 8 bytes. Corrupt as above.
Result<std::uint64_t> safetensors_head_bytes(std::span<const std::byte> first, std::uint64_t file_bytes,
                                             const std::string& name);

/// Bytes before the tensors' bytes in a file, and the order in which the tensors follow, as indexes into `tensors`. The
/// tensors' bytes are not read. Errors are those of write_safetensors.
struct SafetensorsLayout {
  std::string head;
  std::vector<std::size_t> order;
};
Result<SafetensorsLayout> lay_out_safetensors(std::span<const NamedTensor> tensors,
                                              const std::map<std::string, std::string>& metadata = {});

/// Writes tensors with larger elements first, so that all are aligned; the same input gives the same bytes. Returns
/// InvalidArgument for a name that is not UTF-8 or is not unique, or a tensor whose bytes do not agree with its shape.
Result<void> write_safetensors(const Sink& sink, std::span<const NamedTensor> tensors,
                               const std::map<std::string, std::string>& metadata = {});
/// Like the above, to a file, which is replaced atomically.
Result<void> write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                               const std::map<std::string, std::string>& metadata = {});

}  // namespace cohort::formats
