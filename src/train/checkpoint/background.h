// Saves that go on while the program trains: the bundle is copied into memory that is used again for the next one, and
// a thread of low priority does the rest, over a communicator of its own, so that its collectives cannot meet the
// program's. One save at a time. One thread calls a BackgroundSaver; a PendingSave may be asked from any. Nothing here
// knows torch.
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

/// A save under way, or over.
class PendingSave {
 public:
  bool done() const;
  /// False if it is not over after `limit`.
  bool wait_for(std::chrono::nanoseconds limit) const;
  /// Waits for its end; throws its error, every time. Its collectives have deadlines; the disk has none.
  formats::StoredCheckpoint wait();

 private:
  friend class BackgroundSaver;
  void finish(std::optional<formats::StoredCheckpoint> stored, std::optional<Error> error);
  /// The error, if nobody has been told of it.
  std::optional<Error> untold();

  mutable std::mutex mutex_;
  mutable std::condition_variable over_;
  bool done_ = false, told_ = false;
  std::optional<formats::StoredCheckpoint> stored_;
  std::optional<Error> error_;
};

/// Waits for the saves into this folder that this rank has begun in the background before: of several objects too, the
/// one that is called last is to be the newest. (Ranks may be threads of one process.) Nothing to wait for in the
/// thread of such a save.
void wait_for_earlier_saves(const std::string& folder, int rank);

/// Bytes of a bundle, in memory of their own.
class BundleCopy {
 public:
  /// The same bundle over copies of its bytes. The memory grows, and stays.
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
  /// Waits, and throws the error of the last save unless `wait` of its PendingSave has. Collective over the program's
  /// communicator, so that all throw or none does.
  void settle(Communicator& comm);
  /// As settle, not collective: throws on this rank.
  void close();

  /// Whether `adopt` has to be called before `start`: collective, as split is.
  bool needs_communicator(Communicator& comm) const;
  /// A communicator of the same ranks that nobody else uses.
  void adopt(Communicator side) { side_ = std::move(side); }
  /// After settle. Returns once the bundle has been copied; throws on all ranks if one has no memory for it.
  std::shared_ptr<PendingSave> start(Communicator& comm, const Bundle& bundle);
  /// Ends the save under way with an error on all ranks.
  void abort(std::string_view reason);
  /// Gives its communicator up, once nothing is under way.
  void leave();

 private:
  void run(const std::shared_ptr<PendingSave>& pending, const std::shared_ptr<PendingSave>& earlier,
           const Bundle& bundle);

  const FolderOptions options_;
  Communicator side_;
  BundleCopy copy_;
  std::shared_ptr<PendingSave> last_;
  std::thread thread_;
  pid_t home_ = 0;  // of the process that has the thread
  std::atomic<bool> side_broken_{false};
};

}  // namespace cohort::checkpoint
