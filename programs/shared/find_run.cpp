#include "shared/find_run.h"

#include "base/result.h"
#include "launch/output/live_run.h"

#include <system_error>

namespace fs = std::filesystem;

namespace cohort::app {

fs::path find_run(const fs::path& given) {
  if (!given.empty()) {
    const fs::path folder = given.filename() == launch::kLiveFile || given.filename() == "run.jsonl"
                                ? (given.has_parent_path() ? given.parent_path() : fs::path("."))
                                : given;
    if (fs::is_directory(folder)) return folder;
    raise(ErrorCode::Unavailable,
          "watching {} failed -- there is no such folder -- give a run's folder, or HOST:PORT of a page",
          given.string());
  }
  fs::path newest;
  fs::file_time_type newest_time;
  std::error_code error;
  for (fs::directory_iterator entry("runs", error), end; !error && entry != end; entry.increment(error)) {
    if (entry->is_symlink(error) || !entry->is_directory(error)) continue;
    std::error_code none;
    auto time = fs::last_write_time(entry->path() / launch::kLiveFile, none);
    if (none) continue;
    if (newest.empty() || time > newest_time) {
      newest = entry->path();
      newest_time = time;
    }
  }
  if (newest.empty()) {
    raise(ErrorCode::Unavailable,
          "no run to watch -- ./runs has none with a live.json -- name the run's folder: cohort watch RUN");
  }
  return newest;
}

}  // namespace cohort::app
