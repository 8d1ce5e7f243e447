// Saves in the background while the program trains. The bundle is copied into memory that is reused for the next save,
// and a low-priority thread does the rest. The thread has its own communicator, so that its collectives cannot be
// matched with the program's. One save at a time. One thread calls a BackgroundSaver; any thread may query a
// PendingSave. Independent of torch.
#pragma once

#include "base/files.h"
#include "train/checkpoint/checkpoint.h"
#include "train/formats/checkpoint_folder.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace cohort::checkpoint {

/// A save that is under way or over.
class PendingSave {
 public:
  bool done() const;
  /// Waits for the end of the save; returns false if the save is not over after `limit`.
  bool wait_for(std::chrono::nanoseconds limit) const;
  /// Waits for the end of the save; every call throws its error. Collectives have deadlines; disk writes have none.
  formats::StoredCheckpoint wait();

 private:
  friend class BackgroundSaver;
  void finish(std::optional<formats::StoredCheckpoint> stored, std::optional<Error> error);
  /// Returns the error, if it has not been reported yet.
  std::optional<Error> untold();

  mutable std::mutex mutex_;
  mutable std::condition_variable over_;
  bool done_ = false, told_ = false;
  std::optional<formats::StoredCheckpoint> stored_;
  std::optional<Error> error_;
};

/// Waits for the background saves into this folder that this rank began earlier, through any object, so that the save
/// called last is the newest checkpoint. (Ranks may be threads of one process.) Returns immediately in the thread of a
/// background save.
void wait_for_earlier_saves(const std::string& folder, int rank);

/// A copy of a bundle's bytes.
class BundleCopy {
 public:
  /// Returns a bundle of views of the copied bytes. The memory grows as needed, and is reused.
  const Bundle& copy(const Bundle& from);

 private:
  sys::FileBytes memory_;
  Bundle bundle_;
};

class BackgroundSaver {
 public:
  explicit BackgroundSaver(FolderOptions options) : options_(std::move(options)) {}
  BackgroundSaver(const BackgroundSaver&) = delete;
  BackgroundSaver& operator=(const BackgroundSaver&) = delete;
  /// Waits for the save under way.
  ~BackgroundSaver();

  /// Waits for the save under way. Not collective; throws nothing.
  void wait();
  /// Waits, and throws the error of the last save unless its PendingSave has thrown it. Collective over the program's
  /// communicator, so that either all ranks throw or none.
  void settle(Communicator& comm);
  /// Like settle, but not collective: throws on this rank only.
  void close();

  /// Returns whether `adopt` has to be called before `start`. Collective, like the split that makes the communicator.
  bool needs_communicator(Communicator& comm) const;
  /// Sets the communicator to use, which has the same ranks, and which nobody else uses.
  void adopt(Communicator side) { side_ = std::move(side); }
  /// Starts a save, after settle. Returns when the bundle has been copied; throws on all ranks if any lacks the memory.
  std::shared_ptr<PendingSave> start(Communicator& comm, const Bundle& bundle);
  /// Ends the save under way with an error on all ranks.
  void abort(std::string_view reason);
  /// Releases the communicator, when no save is under way.
  void leave();

 private:
  void run(const std::shared_ptr<PendingSave>& pending, const std::shared_ptr<PendingSave>& earlier,
           const Bundle& bundle);

  const FolderOptions options_;
  Communicator side_;
  BundleCopy copy_;
  std::shared_ptr<PendingSave> last_;
  std::thread thread_;
  pid_t home_ = 0;  // id of the process that has the thread
  std::atomic<bool> side_broken_{false};
};

}  // namespace cohort::checkpoint
