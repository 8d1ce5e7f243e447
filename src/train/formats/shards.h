// Tensors that are spread over files: which file has each part (docs/reference/checkpoint-format.md, version 3), and
// reading the parts one at a time. In a checkpoint without shards, each tensor has a single part. Values; one thread
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

/// Returns a shard that is a whole tensor.
Shard whole_shard(std::vector<std::int64_t> sizes);
/// Returns the shape in which a shard is stored: its box, or one dimension if the shard is only a range of the box.
std::vector<std::int64_t> shape_of(const Shard& shard);
/// Returns what is wrong with the shard by itself; nullopt if it is valid.
std::optional<std::string> problem_of(const Shard& shard);

/// A run of elements that two shards of one tensor have in common, contiguous in both.
struct Run {
  std::int64_t from = 0;  ///< position of the first element in the `from` shard's range
  std::int64_t to = 0;    ///< position of the first element in the `to` shard's range
  std::int64_t count = 0;
};
/// Returns the common elements. Both shards have to be valid, and their tensors of the same sizes.
std::vector<Run> common_runs(const Shard& from, const Shard& to);

/// Location of a part of a tensor.
struct TensorPart {
  std::string holder;  ///< name of the file, or the rank if ranks exchange their parts
  Shard shard;
  std::uint64_t offset = 0;  ///< offset of its bytes in the file
};

struct PartedTensor {
  ElementType type = ElementType::Float32;
  std::vector<TensorPart> parts;
  const std::vector<std::int64_t>& sizes() const { return parts.front().shard.sizes; }
};

/// Tensors by name: "model/fc.weight", "optimizer/state/fc.weight/exp_avg".
using PartedTensors = std::map<std::string, PartedTensor>;

inline constexpr std::string_view kModelPrefix = "model/", kOptimizerPrefix = "optimizer/";

/// Adds a part; returns what is wrong with the part, or why it does not fit the present parts.
std::optional<std::string> add_part(PartedTensors& tensors, const std::string& name, ElementType type, TensorPart part);
/// Returns why the parts do not cover every element of the tensor exactly once; nullopt if they do.
std::optional<std::string> coverage_problem(const std::string& name, const PartedTensor& tensor);

/// A range of bytes of a file, and their destination.
struct Copy {
  std::uint64_t offset = 0, bytes = 0;
  std::byte* to = nullptr;  ///< nullptr: the destination is in another process
};
/// Adds the copies that a part of the tensor needs from a file.
void add_copies(const PartedTensor& tensor, const Shard& wanted, const std::string& file, std::byte* to,
                std::vector<Copy>& copies);

/// Return the name of a shard in its file, "shard/3/model/fc.weight", and the metadata stored under that name.
std::string shard_name(std::size_t index, const std::string& tensor);
std::string shard_text(const Shard& shard);

bool has_shards(const Manifest& manifest);
/// Returns the files with tensors: model, optimizer, and parts if there are shards.
std::vector<std::string> tensor_files(const Manifest& manifest);

/// The tensors of a checkpoint, and the headers of its files.
struct CheckpointTensors {
  PartedTensors tensors;
  std::map<std::string, SafetensorsHeader> files;
};
/// `heads`: the first bytes of tensor_files, up to the end of their headers. Returns Corrupt, naming the tensor, unless
/// every element of every tensor is present exactly once.
Result<CheckpointTensors> tensors_of(const StoredCheckpoint& checkpoint,
                                     const std::map<std::string, std::string>& heads);

/// A file of a checkpoint that is read in parts. Compares the CRC-32 of each block it reads. One block is in memory.
class CheckedFile {
 public:
  static Result<CheckedFile> open(const StoredCheckpoint& checkpoint, const std::string& name);
  using Visit = std::function<Result<void>(std::span<const std::byte>)>;
  /// Visits `bytes` bytes from `offset` on in pieces, each valid during its visit.
  Result<void> each(std::uint64_t offset, std::uint64_t bytes, const Visit& visit);
  Result<void> read(std::uint64_t offset, std::span<std::byte> bytes);
  /// Returns the bytes up to the end of the header.
  Result<std::string> head();

 private:
  CheckedFile(sys::FileReader reader, std::string path, FileDigest digest)
      : reader_(std::move(reader)), path_(std::move(path)), digest_(std::move(digest)) {}
  Result<void> load(std::uint64_t block);

  sys::FileReader reader_;
  std::string path_;
  FileDigest digest_;
  std::vector<std::byte> window_;
  std::optional<std::uint64_t> block_;  // in the window
};

/// Reads tensors of one checkpoint whose files are all on this host, and keeps the files open.
class TensorReader {
 public:
  TensorReader(const StoredCheckpoint& checkpoint, CheckpointTensors tensors)
      : checkpoint_(checkpoint), tensors_(std::move(tensors)) {}
  /// Checks the digest of each file that has tensors, then reads the headers of these files.
  static Result<TensorReader> open(const StoredCheckpoint& checkpoint, bool with_optimizer);

  const CheckpointTensors& all() const noexcept { return tensors_; }
  /// Reads a tensor. `to` has exactly the tensor's size.
  Result<void> read(const std::string& name, std::span<std::byte> to);

 private:
  StoredCheckpoint checkpoint_;
  CheckpointTensors tensors_;
  std::map<std::string, CheckedFile> open_;
};

}  // namespace cohort::formats
