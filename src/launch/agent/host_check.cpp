#include "launch/agent/host_check.h"

#include "launch/record/run_folder.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

namespace cohort::launch {

Result<bool> check_host(const StartJob& job) {
  std::error_code error;
  if (!std::filesystem::is_directory(job.folder, error)) {
    return fail(ErrorCode::Unavailable,
                "there is no folder {} -- the job's working folder has to be at the same path on every host: a shared "
                "file system, or a copy",
                job.folder);
  }
  const std::string program = (std::filesystem::path(job.folder) / job.path).string();
  if (::access(program.c_str(), X_OK) != 0) {
    return fail(ErrorCode::Unavailable, "{}: {} -- the program has to be at the same path on every host", program,
                errno_text(errno));
  }
  if (job.run_folder.empty()) return false;
  const auto own = make_own_folder(job.run_folder, Existing::Taken);
  if (!own) return fail(ErrorCode::Io, "the run's folder {}: {}", job.run_folder, own.error().what());
  return own->made;
}

}  // namespace cohort::launch
