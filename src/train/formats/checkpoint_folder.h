// A folder of checkpoints on the disk, without tensors: writes one so that it is complete or not there, finds them,
// checks them, removes old ones. One writer per folder at a time (a lock says so to others); any number of readers.
#pragma once

#include "base/files.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "train/formats/manifest.h"
#include "train/formats/tensor.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace cohort::formats {

inline constexpr const char* kManifestFile = "manifest.json";

/// A checkpoint with a sound manifest. Its files are not yet checked.
struct StoredCheckpoint {
  std::string folder;
  Manifest manifest;
};

/// A file of a checkpoint, in the hidden folder where it is being made: written, synced, and what it then has to be.
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
  /// Of the files; nobody looks there but writers.
  const std::string& hidden() const noexcept { return hidden_; }
  /// Writes the manifest, compares the sizes of those files that are here, and syncs the folder. `is_here` says of
  /// which files that is.
  Result<void> seal(const Manifest& manifest, const std::function<bool(const std::string&)>& is_here);
  /// The rename: from now on the checkpoint exists. Returns once it is on the disk.
  Result<StoredCheckpoint> publish();
  /// Takes back what was published, for where others could not.
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
  std::vector<Error> damaged;                         ///< what is wrong with the others
  std::vector<std::pair<std::int64_t, Error>> newer;  ///< of a newer Cohort: generation, and what to say of it
};

/// Empty if the folder does not exist.
Result<CheckpointList> list_checkpoints(const std::string& folder);
/// One checkpoint by its own path.
Result<StoredCheckpoint> read_checkpoint(const std::string& folder);
/// One of its files, its size and SHA-256 compared: Corrupt says what differs, and which bytes.
Result<sys::FileBytes> read_checkpoint_file(const StoredCheckpoint& checkpoint, const std::string& name);
/// The same, a block at a time.
Result<void> check_checkpoint_file(const StoredCheckpoint& checkpoint, const std::string& name);
/// Reads all of them: the first that is not as it was written.
Result<void> check_checkpoint_files(const StoredCheckpoint& checkpoint);
/// Older checkpoints that stay: the newest `count` of a step below this one.
struct Spared {
  std::int64_t below_step = std::numeric_limits<std::int64_t>::min();
  int count = 0;
};
/// Removes the checkpoints older than this generation, whole or not; a failure is only logged.
void remove_older_checkpoints(const std::string& folder, std::int64_t generation, Spared spared = {});
/// All but the newest `keep` complete ones.
void keep_newest_checkpoints(const std::string& folder, int keep, Spared spared = {});

}  // namespace cohort::formats
