// Rows about files: the working folder of a job, on every host.
#include "doctor/check.h"

namespace cohort::doctor {
void check_folders(const Checkup& checkup, std::vector<Finding>& out) {
  for (const HostState& host : checkup.hosts) {
    if (!host.facts) continue;
    const FolderFacts& folder = host.facts->folder;
    if (!folder.error.empty()) {
      out.push_back({"folder",
                     Level::Failed,
                     {host.name},
                     {},
                     folder.error,
                     {},
                     fmt::format("on {}: mount the file system that {} is in, or make a copy of the folder", host.name,
                                 checkup.here)});
      continue;
    }
    out.push_back(
        {"folder",
         folder.writable ? Level::Ok : Level::Failed,
         {host.name},
         {},
         fmt::format("{} ({}){}", folder.path, folder.file_system, folder.writable ? "" : " cannot be written to"),
         folder.writable ? "" : "the run's folder cannot be made: the job does not start",
         folder.writable
             ? ""
             : fmt::format("--run-dir with a folder that is yours, or on {}: chmod u+w {}", host.name, folder.path)});
    const bool none = folder.free < 16 * kMiB, little = folder.free < 1024 * kMiB;
    out.push_back({"space",
                   none     ? Level::Failed
                   : little ? Level::Warning
                            : Level::Ok,
                   {host.name},
                   {},
                   size_text(folder.free),
                   {},
                   little ? fmt::format("on {}: df -h {}; remove what is not needed, or --run-dir elsewhere", host.name,
                                        folder.path)
                          : ""});
    if (host.same_folder) {
      out.push_back({"same-folder",
                     *host.same_folder ? Level::Ok : Level::Warning,
                     {host.name},
                     {},
                     *host.same_folder ? fmt::format("a file made on {} is seen", checkup.here)
                                       : fmt::format("a file made on {} in {} is not seen", checkup.here, folder.path),
                     {},
                     *host.same_folder ? ""
                                       : "work in a folder of a shared file system; or copy it: rsync -a . " +
                                             host.name + ":" + folder.path});
    }
  }
}

}  // namespace cohort::doctor
