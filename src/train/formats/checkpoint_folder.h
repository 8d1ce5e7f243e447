// manifest.json, the last file of a checkpoint to be written: where training stood, and every other file's size and
// digests. It carries its own digest and has exactly one form, so that no byte of it can change unnoticed. Versions 1
// to 3 are read, and written again as they were; new ones are of version 2, or 3 where there are shards. Values; any
// thread.
// A folder of checkpoints on the disk, without tensors: writes one so that it is complete or not there, finds them,
// checks them, removes old ones. One writer per folder at a time (a lock says so to others); any number of readers.
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

/// Digests that tell whether a file's bytes are those that were written: SHA-256 by OpenSSL, and zlib's CRC-32 of each
/// block, which says where they are not. Data is added in pieces. Not thread-safe.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  void update(std::span<const std::byte> bytes);
  /// 64 hexadecimal digits. Nothing may be added afterwards.
  std::string finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

std::string sha256(std::span<const std::byte> bytes);

/// Bytes that have a CRC-32 of their own; a file's last block may be shorter.
inline constexpr std::size_t kBlockBytes = std::size_t{1} << 20;

struct FileDigest {
  std::uint64_t bytes = 0;
  std::string sha256;  ///< 64 hexadecimal digits
  std::string crc32;   ///< 8 hexadecimal digits for each block; empty in checkpoints of version 1

  bool operator==(const FileDigest&) const = default;
};

/// A FileDigest of bytes as they come.
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

/// "bytes 1048576 to 2097151 and 2 more places": the blocks whose CRC-32 differs. Empty if there are none, or if one of
/// the two has no blocks. Both are of the same number of bytes.
std::string differing_bytes(const FileDigest& written, const FileDigest& found);

/// The same type as cohort::CheckpointValue.
using ManifestValue = std::variant<bool, std::int64_t, double, std::string>;

struct SamplerPosition {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
  std::int64_t cursor = 0;
  std::int64_t size = 0;
};

/// The newest that is known, of checkpoints with shards; others are of the version before.
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
  std::string place;               ///< "rank0", "shared" or "local": who wrote the files where; empty in version 1
  std::vector<std::string> hosts;  ///< by rank, the host that has its part; only where the place is "local"
  std::map<std::string, FileDigest> files;
};

/// The present time, as `created` has it.
std::string utc_now();
/// InvalidArgument for text that is not UTF-8.
Result<std::string> to_json(const Manifest& manifest);
/// Corrupt, naming `name`, if one byte is not as to_json wrote it, or a field is missing or of another type;
/// InvalidArgument if a newer Cohort wrote it.
Result<Manifest> parse_manifest(std::string_view text, const std::string& name);

// The files of a checkpoint: docs/reference/checkpoint-format.md.
inline constexpr const char* kManifestFile = "manifest.json";
inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kOptimizerFile = "optimizer.safetensors";
/// And, of each rank, "rank-00003.safetensors".
inline constexpr std::string_view kPartPrefix = "rank-";

/// A checkpoint with a sound manifest. Its files are not yet checked.
struct StoredCheckpoint {
  std::string folder;
  Manifest manifest;
};

/// Writes and syncs a file of a checkpoint, in the hidden folder where it is being made; returns its digest.
Result<FileDigest> write_checkpoint_file(const std::string& hidden, const std::string& name,
                                         const std::function<Result<void>(const Sink&)>& write);

/// One checkpoint being written. Destroyed before `publish` has returned a value, or withdrawn after: nothing has
/// happened.
class CheckpointWriter {
 public:
  /// Makes `folder`, locks it, and removes what killed writers left. Unavailable if another process is saving there.
  static Result<CheckpointWriter> open(const std::string& folder);
  CheckpointWriter(CheckpointWriter&& other) noexcept;
  CheckpointWriter& operator=(CheckpointWriter&&) = delete;
  ~CheckpointWriter();

  /// The highest generation in the folder, damaged ones too; 0 if there is none.
  std::int64_t newest() const noexcept { return newest_; }
  /// Makes the hidden folder, whose name says the generation and step, and holds something random: a writer that was
  /// stopped for long cannot meddle with the checkpoint of another.
  Result<void> begin(std::int64_t generation, std::int64_t step);
  /// Folder in which the files are written; only writers look there.
  const std::string& hidden() const noexcept { return hidden_; }
  /// Writes the manifest, compares the sizes of those files that are here, and syncs the folder. `is_here` says of
  /// which files that is.
  Result<void> seal(const Manifest& manifest, const std::function<bool(const std::string&)>& is_here);
  /// The rename: from now on the checkpoint exists. Returns once it is on the disk.
  Result<StoredCheckpoint> publish();
  /// Takes back the published checkpoint, if other ranks failed.
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
  std::vector<Error> damaged;                         ///< errors of damaged ones
  std::vector<std::pair<std::int64_t, Error>> newer;  ///< of a newer Cohort: generation, and what to say of it
  /// Checkpoints that could not be read now (permissions, a file system that fails); they may be sound.
  std::vector<std::pair<std::int64_t, Error>> unreadable;
  std::int64_t newest = 0;  ///< the highest generation of all of them; 0: there are none

  /// The newest of those that cannot be judged (`newer`, `unreadable`), if it is newer than this one: to take an older
  /// one would go back in silence.
  std::optional<Error> unjudged_above(std::int64_t generation) const;
};

/// Empty if the folder does not exist.
Result<CheckpointList> list_checkpoints(const std::string& folder);
/// One checkpoint by its own path.
Result<StoredCheckpoint> read_checkpoint(const std::string& folder);
/// One of its files, its size and SHA-256 compared: Corrupt says what differs, and which bytes, or that it is missing.
/// Io: it could not be read now, and may be whole.
Result<sys::FileBytes> read_checkpoint_file(const StoredCheckpoint& checkpoint, const std::string& name);
/// The same, a block at a time.
Result<void> check_checkpoint_file(const StoredCheckpoint& checkpoint, const std::string& name);
/// Reads all of them: the first that is not as it was written.
Result<void> check_checkpoint_files(const StoredCheckpoint& checkpoint);
/// Selects the best checkpoints: those with the best number of this name among their values. A checkpoint without one,
/// or with NaN or an infinity, is not among them; of equal ones the older is better.
struct BestBy {
  std::string value;  ///< empty: there are no best ones
  BestMode mode = BestMode::Min;
  int keep = 0;  ///< so many stay; 0: one
};
/// Value that checkpoints are ordered by, the lowest first.
std::optional<double> standing(const Manifest& manifest, const BestBy& best);

/// Older checkpoints that stay: the newest `count` of a step below this one, the best, and those that cannot be judged.
struct Spared {
  std::int64_t below_step = std::numeric_limits<std::int64_t>::min();
  int count = 0;
  std::set<std::int64_t> best = {};      ///< by generation
  std::set<std::int64_t> unjudged = {};  ///< likewise
};
/// Records whether a load found the checkpoint damaged: a damaged one is neither kept nor among the best for this
/// process's saves. By the checkpoint's folder; any thread.
void remember_damage(const std::string& folder, bool is_damaged);
/// Says that this process's training has saved or loaded in the folder, whose newest generation was then this one. Any
/// thread.
void remember_own(const std::string& folder, std::int64_t newest);
/// The last of these, for people: "checkpoint 7 in /folder"; empty: none. Any thread.
std::string last_own_checkpoint();
/// Generations that another job has saved there since; none before `remember_own`. Any thread.
std::set<std::int64_t> checkpoints_of_others(const std::string& folder);
/// By file of the manifest, '1' if it is here and of its size, '?' if this user cannot read it now; empty if a load has
/// found the checkpoint damaged.
std::string whole_at_a_glance(const StoredCheckpoint& checkpoint);
/// Result of whole_at_a_glance for a checkpoint.
enum class Glance { Whole, Damaged, Unreadable };
Glance glance_of(const std::string& files);
/// The generations of the best of `among`.
std::set<std::int64_t> best_checkpoints(const std::vector<StoredCheckpoint>& among, const BestBy& best);
/// Removes the checkpoints older than this generation, whole or not; a failure is only logged.
void remove_older_checkpoints(const std::string& folder, std::int64_t generation, Spared spared = {});
/// Removes all but the newest `keep` of the checkpoints that are whole at a glance, the best of them, and those that
/// cannot be judged.
void keep_newest_checkpoints(const std::string& folder, int keep, Spared spared = {}, const BestBy& best = {});

}  // namespace cohort::formats
