// manifest.json, the last file of a checkpoint to be written: the state of training, and every other file's size and
// digests. The manifest contains its own digest and has exactly one form, so that any changed byte is noticed. Versions
// 1 to 3 can be read, and keep their version if written again; new manifests are of version 2, or 3 if there are
// shards. Values; any thread.
// A folder of checkpoints on disk, without their tensors: writes a checkpoint so that it is either complete or absent,
// finds and checks checkpoints, and removes old ones. One writer per folder at a time (by a lock); many readers.
#pragma once

#include "base/files.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "train/formats/tensor.h"

#include <cohort/early_stopping.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace cohort::formats {

/// SHA-256, by OpenSSL, of data that is added in pieces. Shows whether a file still has the bytes that were written.
/// The CRC-32 of each block, by zlib, shows where they differ. Not thread-safe.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  void update(std::span<const std::byte> bytes);
  /// Returns 64 hexadecimal digits. Nothing may be added afterwards.
  std::string finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

std::string sha256(std::span<const std::byte> bytes);

/// Size of a block, which has its own CRC-32; a file's last block may be shorter.
inline constexpr std::size_t kBlockBytes = std::size_t{1} << 20;

struct FileDigest {
  std::uint64_t bytes = 0;
  std::string sha256;  ///< 64 hexadecimal digits
  std::string crc32;   ///< 8 hexadecimal digits for each block; empty in checkpoints of version 1

  bool operator==(const FileDigest&) const = default;
};

/// Computes a FileDigest from bytes that are added in pieces.
class FileDigester {
 public:
  void update(std::span<const std::byte> bytes);
  /// Nothing may be added afterwards.
  FileDigest finish();

 private:
  void end_block();
  Sha256 sha256_;
  std::string blocks_;
  std::uint64_t size_ = 0;
  std::uint32_t crc_ = 0;
  std::size_t in_block_ = 0;
};

FileDigest digest_of(std::span<const std::byte> bytes);

/// Describes the blocks whose CRC-32 differs: "bytes 1048576 to 2097151 and 2 more places". Empty if no block differs,
/// or if one of the digests has no blocks. Both files have to have the same number of bytes.
std::string differing_bytes(const FileDigest& written, const FileDigest& found);

/// The same type as cohort::CheckpointValue.
using ManifestValue = std::variant<bool, std::int64_t, double, std::string>;

struct SamplerPosition {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
  std::int64_t cursor = 0;
  std::int64_t size = 0;
};

/// Newest known version, which is that of checkpoints with shards. Other checkpoints have the previous version.
inline constexpr int kManifestVersion = 3;

struct Manifest {
  int version = kManifestVersion - 1;
  std::int64_t generation = 0;
  std::int64_t step = 0;
  std::int64_t epoch = 0;
  int world_size = 1;
  std::string created;  ///< "2026-11-21T09:00:00Z"
  std::string program;  ///< "cohort 0.1.0, libtorch 2.13.0"
  std::optional<SamplerPosition> sampler;
  std::map<std::string, ManifestValue> values;
  std::string place;               ///< "rank0", "shared" or "local": the CheckpointPlace; empty in version 1
  std::vector<std::string> hosts;  ///< by rank, the host that has the rank's part; only if the place is "local"
  std::map<std::string, FileDigest> files;
};

/// Returns the present time in the format of `created`.
std::string utc_now();
/// Returns InvalidArgument for text that is not UTF-8.
Result<std::string> to_json(const Manifest& manifest);
/// Returns Corrupt, naming `name`, if a byte is not as to_json wrote it, or a field is missing or of another type;
/// InvalidArgument if a newer Cohort wrote the manifest.
Result<Manifest> parse_manifest(std::string_view text, const std::string& name);

// The files of a checkpoint: docs/reference/checkpoint-format.md.
inline constexpr const char* kManifestFile = "manifest.json";
inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kOptimizerFile = "optimizer.safetensors";
/// Prefix of the file of each rank's part, "rank-00003.safetensors".
inline constexpr std::string_view kPartPrefix = "rank-";

/// A checkpoint with a sound manifest, whose other files are not checked yet.
struct StoredCheckpoint {
  std::string folder;
  Manifest manifest;
};

/// Writes and syncs a file of a checkpoint in its hidden folder; returns the file's digest.
Result<FileDigest> write_checkpoint_file(const std::string& hidden, const std::string& name,
                                         const std::function<Result<void>(const Sink&)>& write);

/// One checkpoint being written. If it is destroyed before `publish` has returned a value, or withdrawn later, the
/// folder is as before.
class CheckpointWriter {
 public:
  /// Makes and locks `folder`, and removes files of killed writers. Returns Unavailable if another process saves there.
  static Result<CheckpointWriter> open(const std::string& folder);
  CheckpointWriter(CheckpointWriter&& other) noexcept;
  CheckpointWriter& operator=(CheckpointWriter&&) = delete;
  ~CheckpointWriter();

  /// Returns the highest generation in the folder, including damaged checkpoints; 0 if there is no checkpoint.
  std::int64_t newest() const noexcept { return newest_; }
  /// Makes the hidden folder. Its name has the generation, the step and a random part, so that a writer that was
  /// suspended cannot change another writer's checkpoint.
  Result<void> begin(std::int64_t generation, std::int64_t step);
  /// Returns the folder in which the files are written, and which only writers read.
  const std::string& hidden() const noexcept { return hidden_; }
  /// Writes the manifest, compares the sizes of the files for which `is_here` returns true, and syncs the folder.
  Result<void> seal(const Manifest& manifest, const std::function<bool(const std::string&)>& is_here);
  /// Makes the checkpoint exist, by a rename. Returns when the rename is on disk.
  Result<StoredCheckpoint> publish();
  /// Removes the published checkpoint again, if other ranks failed.
  void withdraw();

 private:
  CheckpointWriter(std::string folder, sys::UniqueFd lock);
  std::string folder_, hidden_, published_;
  Manifest manifest_;
  sys::UniqueFd lock_;
  std::int64_t newest_ = 0;
};

struct CheckpointList {
  std::vector<StoredCheckpoint> sound;                ///< oldest first
  std::vector<Error> damaged;                         ///< errors of damaged checkpoints
  std::vector<std::pair<std::int64_t, Error>> newer;  ///< saved by a newer Cohort: generation, and error to report
  /// Checkpoints that cannot be read now (permissions, a failing file system), but may be sound.
  std::vector<std::pair<std::int64_t, Error>> unreadable;
  std::int64_t newest = 0;  ///< the highest generation of all of these; 0: there is none

  /// Returns the error of the newest checkpoint that cannot be judged (`newer`, `unreadable`), if that checkpoint is
  /// newer than `generation`. Loading `generation` would then silently go back.
  std::optional<Error> unjudged_above(std::int64_t generation) const;
};

/// Lists the checkpoints of a folder; the list is empty if the folder does not exist.
Result<CheckpointList> list_checkpoints(const std::string& folder);
/// Reads one checkpoint's manifest, by the checkpoint's own path.
Result<StoredCheckpoint> read_checkpoint(const std::string& folder);
/// Reads one file of a checkpoint, and compares its size and SHA-256. Corrupt says what differs, and in which bytes, or
/// that the file is missing. Io: the file could not be read now, and may be whole.
Result<sys::FileBytes> read_checkpoint_file(const StoredCheckpoint& checkpoint, const std::string& name);
/// Checks one file in the same way, reading a block at a time.
Result<void> check_checkpoint_file(const StoredCheckpoint& checkpoint, const std::string& name);
/// Checks all files; returns the error of the first file that is not as it was written.
Result<void> check_checkpoint_files(const StoredCheckpoint& checkpoint);
/// Selects the checkpoints with the best number named `value` among their values. A checkpoint without such a number,
/// or with NaN or an infinity, is never selected; of equal checkpoints the older one is better.
struct BestBy {
  std::string value;  ///< empty: no checkpoint is selected
  BestMode mode = BestMode::Min;
  int keep = 0;  ///< number of best checkpoints to keep; 0: one
};
/// Returns the number by which checkpoints are ordered, the lowest first; nullopt if it has none.
std::optional<double> standing(const Manifest& manifest, const BestBy& best);

/// Older checkpoints to keep: the newest `count` below `below_step`, the best ones, and those that cannot be judged.
struct Spared {
  std::int64_t below_step = std::numeric_limits<std::int64_t>::min();
  int count = 0;
  std::set<std::int64_t> best = {};      ///< by generation
  std::set<std::int64_t> unjudged = {};  ///< by generation
};
/// Records whether a load found the checkpoint damaged: this process's saves then neither keep it nor count it among
/// the best. `folder`: the checkpoint's own; any thread.
void remember_damage(const std::string& folder, bool is_damaged);
/// Records that this process's training has saved or loaded in the folder, which then had `newest` as newest
/// generation. Any thread.
void remember_own(const std::string& folder, std::int64_t newest);
/// Returns the last recorded checkpoint, "checkpoint 7 in /folder", for messages; empty if there is none. Any thread.
std::string last_own_checkpoint();
/// Returns the generations that another job has saved in the folder since `remember_own`; none before it. Any thread.
std::set<std::int64_t> checkpoints_of_others(const std::string& folder);
/// Returns a character for each file of the manifest: '1' if the file is here with the right size, '?' if this user
/// cannot read it now. Empty if a load has found the checkpoint damaged.
std::string whole_at_a_glance(const StoredCheckpoint& checkpoint);
/// Result of whole_at_a_glance for a checkpoint.
enum class Glance { Whole, Damaged, Unreadable };
Glance glance_of(const std::string& files);
/// Returns the generations of the best checkpoints of `among`.
std::set<std::int64_t> best_checkpoints(const std::vector<StoredCheckpoint>& among, const BestBy& best);
/// Removes the checkpoints older than this generation, whole or not; a failure is only logged.
void remove_older_checkpoints(const std::string& folder, std::int64_t generation, Spared spared = {});
/// Removes old checkpoints, except the newest `keep` of those that are whole at a glance, the best of them, and those
/// that cannot be judged.
void keep_newest_checkpoints(const std::string& folder, int keep, Spared spared = {}, const BestBy& best = {});

}  // namespace cohort::formats
