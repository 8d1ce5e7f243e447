// `cohort run --sync`: the working folder and the active virtual environment are copied to other hosts by rsync over
// ssh, side by side. Files that exist only there stay. One thread calls; it has others for a while.
#pragma once

#include <string>
#include <vector>

namespace cohort::app {

struct SyncRequest {
  std::vector<std::string> ssh;            ///< the command and its options
  std::vector<std::string> hosts;          ///< as ssh takes them
  std::string folder = {};                 ///< there; empty: as here
  std::vector<std::string> excludes = {};  ///< rsync's patterns, over the rules
  std::string program = {};                ///< as it was typed: goes along also where a rule leaves it out
  bool quiet = false;
};

/// The files of a folder that are copied, relative to it, and by which rule: those that git does not ignore, where it
/// is in a work tree (without untracked ones of runs/); else all but .git, runs, build folders and caches. Repositories
/// within it have their own rules. Throws Unavailable where git fails in a work tree.
std::vector<std::string> files_to_sync(const std::string& folder, const std::string& program);

/// Says on stderr what was copied. Throws Unavailable with each host that has not got everything, and rsync's words;
/// InvalidArgument where the folder is the home folder or above it, or VIRTUAL_ENV is no virtual environment.
void sync(const SyncRequest& request);

}  // namespace cohort::app
