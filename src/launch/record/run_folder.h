// The folder of one run: logs/, job.json, whatever the program adds. Files stay; nothing here is removed, and what an
// earlier run has left is put aside.
#pragma once

#include "base/result.h"
#include "sys/unique_fd.h"

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <string_view>

namespace cohort::launch {

struct RunFolderRequest {
  std::string path;  ///< empty: runs/<UTC time>-<name>-<id>, with runs/latest pointing to it
  std::string program_name;
  std::string id;
};

struct RunFolder {
  std::string path;     ///< absolute
  std::string shown;    ///< as the user would type it
  sys::UniqueFd fd;     ///< locked: no other job takes the folder while this one runs
  std::string earlier;  ///< where the record and the logs of a run before are now; empty if there were none
};

/// Makes it, readable as the umask allows and writable for this user alone; a path that was given may be there already:
/// the job.json and logs/ of a run before go to earlier-N in it. Fails with Io, naming the path, where it cannot be
/// made or written, where another user could put something else in its place (see make_own_folder), or where another
/// job runs in it.
Result<RunFolder> make_run_folder(const RunFolderRequest& request);

struct LogFolder {
  sys::UniqueFd fd;     ///< locked, as the run's
  std::string earlier;  ///< where the logs of a run before are now; empty if there were none
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

}  // namespace cohort::launch
