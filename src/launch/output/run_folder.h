// The folder of one run: logs/, job.json, whatever the program adds. Files stay; nothing here is removed, and what an
// earlier run has left is put aside. Its folders and files are made so that no other user of the host can lead them
// somewhere else by links: what is in a folder is reached through its descriptor. Errors (Io) of these functions hold
// the reason only; the caller names what it was for. Any thread.
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

/// A folder to reach names below it. A link is followed if it is this user's or root's.
Result<sys::UniqueFd> open_folder(const std::string& path);

struct OwnFolder {
  sys::UniqueFd parent;
  sys::UniqueFd folder;
  bool made = false;  ///< it was not there before
};
enum class Existing { Taken, Refused };

/// Makes a folder (0755 at most) and those above it, or takes one that is there. Refused are a folder, and a folder
/// that it is in, which are neither this user's nor root's, or to which everybody may write and remove what others have
/// made.
Result<OwnFolder> make_own_folder(const std::string& path, Existing existing);

/// A new file in the place of whatever has this name.
Result<sys::UniqueFd> make_file(int folder, const std::string& name, mode_t mode);
/// The file of this name, to be written at its end; made where there is none. A link is refused.
Result<sys::UniqueFd> continue_file(int folder, const std::string& name, mode_t mode);

/// False where not all could be written: then the file is closed, and errno says why. A closed one takes nothing.
bool write_or_close(sys::UniqueFd& file, std::string_view bytes);

/// In a run's folder: locked while a job runs there. Only this user can open it, so nobody else can lock it.
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
  std::string earlier;  ///< where the record and the logs of a run before are now; empty if there were none
  sys::UniqueFd lock;   ///< of kLockFile: no other job takes the folder while this one runs
};

/// Makes it, readable as the umask allows and writable for this user alone; a path that was given may be there already:
/// the job.json and logs/ of a run before go to earlier-N in it. Fails with Io, naming the path, where it cannot be
/// made or written, where another user could put something else in its place (see make_own_folder), or where another
/// job runs in it.
Result<RunFolder> make_run_folder(const RunFolderRequest& request);

struct LogFolder {
  sys::UniqueFd fd;
  std::string earlier;  ///< where the logs of a run before are now; empty if there were none
  sys::UniqueFd lock;   ///< as the run's; closed: that one is it
};

/// A folder for the logs alone, with all that is above it (agents make the last folder of a path only). Logs of a run
/// before go to earlier-N in it. Fails with Io, for the caller to name the path.
Result<LogFolder> make_log_folder(const std::string& path, const RunFolder& run);

/// Replaces a file in it as a whole. Only this user may read it. Any thread.
Result<void> replace_file(const RunFolder& folder, const std::string& name, std::string_view text);
/// Likewise job.json.
Result<void> write_job_record(const RunFolder& folder, const nlohmann::ordered_json& record);

/// "2026-11-21T09:15:02.123Z" of the wall clock now.
std::string utc_now();

struct DiskRoom {
  std::uint64_t size = 0, free = 0;  ///< bytes; `free` for this user
};

/// Nearly full: a twentieth is left, and less than 10 GiB.
bool nearly_full(const DiskRoom& room) noexcept;

/// Appends to warnings.jsonl and usage.jsonl in the run's folder while the job runs, and watches the space left on the
/// file system. Works on a thread of its own, since a network file system may be slow. Methods belong to one thread.
class WarningsFile {
 public:
  /// `folder` outlives this.
  explicit WarningsFile(const RunFolder& folder);
  /// Writes what it was given.
  ~WarningsFile();
  WarningsFile(const WarningsFile&) = delete;
  WarningsFile& operator=(const WarningsFile&) = delete;

  /// Whole lines, to a file of this name.
  void append(const std::string& file, const std::string& lines);
  /// The space seen last, looked at every few seconds; nullopt: nothing yet.
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
