// The folder of one run: logs/, job.json, and any files of the program. Nothing here is removed; files of an earlier
// run are moved aside. Folders and files are made so that no other user of the host can redirect them by links: the
// contents of a folder are reached through its descriptor. Errors (Io) of these functions give only the reason; the
// caller names the file or folder. Any thread.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"

#include <sys/types.h>
#include <nlohmann/json_fwd.hpp>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace cohort::launch {

/// Opens a folder whose contents are then reached by name. A link is followed if it is this user's or root's.
Result<sys::UniqueFd> open_folder(const std::string& path);

struct OwnFolder {
  sys::UniqueFd parent;
  sys::UniqueFd folder;
  bool made = false;  ///< the folder did not exist before
};
enum class Existing { Taken, Refused };

/// Makes a folder (0755 at most) and those above it, or takes an existing one. Refuses a folder if it, or one above it,
/// belongs to neither this user nor root, or lets everybody write and remove other users' files; and the folder itself
/// if it lets everybody write.
Result<OwnFolder> make_own_folder(const std::string& path, Existing existing);

/// Makes a new file of this name, replacing an existing one.
Result<sys::UniqueFd> make_file(int folder, const std::string& name, mode_t mode);
/// Opens a file for writing at its end, or makes it. A link is refused.
Result<sys::UniqueFd> continue_file(int folder, const std::string& name, mode_t mode);

/// Returns false if not all could be written: then the file is closed, and errno says why. A closed file takes nothing.
bool write_or_close(sys::UniqueFd& file, std::string_view bytes);

/// Lock of a run's folder while a job runs there. Only this user can open the file, so nobody else can lock it.
inline constexpr const char* kLockFile = ".lock";

struct RunFolderRequest {
  std::string path;  ///< empty: runs/<UTC time>-<name>-<id>, with runs/latest pointing to it
  std::string program_name;
  std::string id;
};

struct RunFolder {
  std::string path;   ///< absolute
  std::string shown;  ///< as the user would type it
  sys::UniqueFd fd;
  std::string earlier;  ///< folder of an earlier run's record and logs; empty: there were none
  sys::UniqueFd lock;   ///< lock on kLockFile: no other job takes the folder during this run
};

/// Makes the folder, readable as the umask allows and writable only for this user. A given path may exist: job.json and
/// logs/ of an earlier run are moved to earlier-N in it. Fails with Io, naming the path, if it cannot be made or
/// written, if another user could replace it (see make_own_folder), or if another job runs in it.
Result<RunFolder> make_run_folder(const RunFolderRequest& request);

/// Replaces a file in the folder as a whole (on a full disk, in place). Only this user may read it. Any thread.
Result<void> replace_file(const RunFolder& folder, const std::string& name, std::string_view text);
/// Replaces job.json as a whole.
Result<void> write_job_record(const RunFolder& folder, const nlohmann::ordered_json& record);

/// Returns the wall clock's time as "2026-11-21T09:15:02.123Z".
std::string utc_now();

struct DiskRoom {
  std::uint64_t size = 0, free = 0;  ///< bytes; `free` for this user
};

/// Returns true if at most a twentieth is left, and less than 10 GiB.
bool nearly_full(const DiskRoom& room) noexcept;

/// Appends to warnings.jsonl and usage.jsonl in the run's folder while the job runs, and watches the space left on the
/// file system. Works on a thread of its own, since a network file system may be slow. Methods belong to one thread.
class WarningsFile {
 public:
  /// `folder` outlives this.
  explicit WarningsFile(const RunFolder& folder);
  /// Writes the lines that are still waiting.
  ~WarningsFile();
  WarningsFile(const WarningsFile&) = delete;
  WarningsFile& operator=(const WarningsFile&) = delete;

  /// Appends whole lines to a file of this name.
  void append(const std::string& file, const std::string& lines);
  /// Returns the space seen last, updated every few seconds; nullopt: not known yet.
  std::optional<DiskRoom> room();

 private:
  void work();

  const RunFolder& folder_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> waiting_;  ///< by file
  std::optional<DiskRoom> room_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace cohort::launch
