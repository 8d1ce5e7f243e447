// Tensors that are spread over files: the file of each part (docs/reference/checkpoint-format.md, version 3), and their
// bytes a part at a time. A checkpoint without shards is one whose tensors have a single part each. Values; one thread
// per CheckedFile.
#pragma once

#include "base/files.h"
#include "base/result.h"
#include "train/formats/checkpoint_folder.h"
#include "train/formats/safetensors.h"
#include "train/formats/tensor.h"

#include <cohort/shard.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort {

void visit_fields(auto& m, auto& archive, const Shard*) { archive(m.sizes, m.start, m.extent, m.begin, m.count); }

}  // namespace cohort

namespace cohort::formats {

/// All of a tensor.
Shard whole_shard(std::vector<std::int64_t> sizes);
/// Shape in which a shard is stored: its box, or one dimension if it is only a range of the box.
std::vector<std::int64_t> shape_of(const Shard& shard);
/// Returns what is wrong with the shard by itself; nullopt: nothing.
std::optional<std::string> problem_of(const Shard& shard);

/// Elements that two shards of one tensor have in common and that follow each other in both.
struct Run {
  std::int64_t from = 0;  ///< the first, in the one's range
  std::int64_t to = 0;    ///< the first, in the other's range
  std::int64_t count = 0;
};
/// Both have to be sound, and of tensors of the same sizes.
std::vector<Run> common_runs(const Shard& from, const Shard& to);

/// Location of a part of a tensor.
struct TensorPart {
  std::string holder;  ///< a file's name; when ranks exchange their parts, the rank
  Shard shard;
  std::uint64_t offset = 0;  ///< of its bytes in the file
};

struct PartedTensor {
  ElementType type = ElementType::Float32;
  std::vector<TensorPart> parts;
  const std::vector<std::int64_t>& sizes() const { return parts.front().shard.sizes; }
};

/// By name: "model/fc.weight", "optimizer/state/fc.weight/exp_avg".
using PartedTensors = std::map<std::string, PartedTensor>;

inline constexpr std::string_view kModelPrefix = "model/", kOptimizerPrefix = "optimizer/";

/// Adds a part; returns what is wrong with it, or that it does not fit the present ones.
std::optional<std::string> add_part(PartedTensors& tensors, const std::string& name, ElementType type, TensorPart part);
/// Returns why the parts do not cover every element of the tensor exactly once; nullopt: they do.
std::optional<std::string> coverage_problem(const std::string& name, const PartedTensor& tensor);

/// Bytes of a file, and where they belong.
struct Copy {
  std::uint64_t offset = 0, bytes = 0;
  std::byte* to = nullptr;  ///< nullptr: in another process
};
/// Adds the copies that a part of the tensor needs from a file.
void add_copies(const PartedTensor& tensor, const Shard& wanted, const std::string& file, std::byte* to,
                std::vector<Copy>& copies);

/// The name of a shard in its file, "shard/3/model/fc.weight", and what that file's metadata say of it by that name.
std::string shard_name(std::size_t index, const std::string& tensor);
std::string shard_text(const Shard& shard);

bool has_shards(const Manifest& manifest);
/// Model, optimizer, and parts where there are shards.
std::vector<std::string> tensor_files(const Manifest& manifest);

/// Contents of a checkpoint's files.
struct CheckpointTensors {
  PartedTensors tensors;
  std::map<std::string, SafetensorsHeader> files;
};
/// `heads`: the first bytes of tensor_files, up to the end of their headers. Corrupt, naming the tensor, unless every
/// element of every tensor is there once.
Result<CheckpointTensors> tensors_of(const StoredCheckpoint& checkpoint,
                                     const std::map<std::string, std::string>& heads);

/// A file of a checkpoint, read in places; of each block that is read the CRC-32 is compared. One block is in memory.
class CheckedFile {
 public:
  static Result<CheckedFile> open(const StoredCheckpoint& checkpoint, const std::string& name);
  using Visit = std::function<Result<void>(std::span<const std::byte>)>;
  /// Bytes from `offset` on, in pieces that are good until the next.
  Result<void> each(std::uint64_t offset, std::uint64_t bytes, const Visit& visit);
  Result<void> read(std::uint64_t offset, std::span<std::byte> bytes);
  /// All up to the end of its header.
  Result<std::string> head();

 private:
  CheckedFile(sys::FileReader reader, std::string path, FileDigest digest)
      : reader_(std::move(reader)), path_(std::move(path)), digest_(std::move(digest)) {}
  Result<void> load(std::uint64_t block);

  sys::FileReader reader_;
  std::string path_;
  FileDigest digest_;
  std::vector<std::byte> window_;
  std::optional<std::uint64_t> block_;  // that is in it
};

/// Reads tensors of one checkpoint whose files are all here, and keeps the files open.
class TensorReader {
 public:
  TensorReader(const StoredCheckpoint& checkpoint, CheckpointTensors tensors)
      : checkpoint_(checkpoint), tensors_(std::move(tensors)) {}
  /// Reads headers, after all files in which tensors are have been compared with their digests.
  static Result<TensorReader> open(const StoredCheckpoint& checkpoint, bool with_optimizer);

  const CheckpointTensors& all() const noexcept { return tensors_; }
  /// `to`: as many bytes as it has.
  Result<void> read(const std::string& name, std::span<std::byte> to);

 private:
  StoredCheckpoint checkpoint_;
  CheckpointTensors tensors_;
  std::map<std::string, CheckedFile> open_;
};

}  // namespace cohort::formats
