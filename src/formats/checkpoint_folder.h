// A folder of checkpoints on the disk, without tensors: writes one so that it is complete or not there, finds them,
// checks them, removes old ones. One writer per folder at a time (a lock says so to others); any number of readers.
#pragma once

#include "base/result.h"
#include "formats/digest.h"
#include "formats/manifest.h"
#include "formats/sink.h"
#include "sys/files.h"
#include "sys/unique_fd.h"

#include <functional>
#include <string>
#include <vector>

namespace cohort::formats {

inline constexpr const char* kManifestFile = "manifest.json";

/// A checkpoint with a sound manifest. Its files are not yet checked.
struct StoredCheckpoint {
  std::string folder;
  Manifest manifest;
};

/// One checkpoint being written. Destroyed before `commit` has returned a value: nothing has happened.
class CheckpointWriter {
 public:
  /// Makes `folder`, locks it, removes what killed writers left, and begins the next generation in a hidden folder.
  /// `manifest` says where training stands; generation, created and files are filled in here. Unavailable if another
  /// process is saving there.
  static Result<CheckpointWriter> begin(const std::string& folder, Manifest manifest);
  CheckpointWriter(CheckpointWriter&& other) noexcept;
  CheckpointWriter& operator=(CheckpointWriter&&) = delete;
  ~CheckpointWriter();

  /// Writes and syncs one file; `name` of a-z, 0-9, '_', '-', '.'.
  Result<void> add(const std::string& name, const std::function<Result<void>(const Sink&)>& write);
  /// Writes the manifest, syncs everything and renames; then removes all but the newest `keep` complete checkpoints (a
  /// failure of that is only logged). Returns once the checkpoint is on the disk.
  Result<StoredCheckpoint> commit(int keep);

 private:
  CheckpointWriter(std::string folder, Manifest manifest, sys::UniqueFd lock);
  std::string folder_, aside_;
  Manifest manifest_;
  sys::UniqueFd lock_;
};

struct CheckpointList {
  std::vector<StoredCheckpoint> sound;  ///< oldest first
  std::vector<Error> damaged;           ///< what is wrong with the others
};

/// Empty if the folder does not exist.
Result<CheckpointList> list_checkpoints(const std::string& folder);
/// One checkpoint by its own path.
Result<StoredCheckpoint> read_checkpoint(const std::string& folder);
/// One of its files, its size and SHA-256 compared: Corrupt says what differs.
Result<sys::FileBytes> read_checkpoint_file(const StoredCheckpoint& checkpoint, const std::string& name);

}  // namespace cohort::formats
