// `cohort run --sync`: copies the working folder and the active virtual environment to other hosts by rsync over ssh,
// in parallel. Files that exist only there are kept. Called by one thread; uses further threads during the call.
#pragma once

#include <string>
#include <vector>

namespace cohort::app {

struct SyncRequest {
  std::vector<std::string> ssh;            ///< the command and its options
  std::vector<std::string> hosts;          ///< names for ssh
  std::string folder = {};                 ///< the folder there; empty: the same as here
  std::vector<std::string> excludes = {};  ///< patterns of rsync that take precedence over the rules
  std::string program = {};                ///< as typed; copied even if a rule excludes it
  bool quiet = false;
};

/// The files of a folder that are copied, relative to it: in a work tree, those that git does not ignore (without
/// untracked ones in runs/); else all except .git, runs, build folders and caches. Nested repositories have their own
/// rules. Throws Unavailable if git fails in a work tree.
std::vector<std::string> files_to_sync(const std::string& folder, const std::string& program);

/// Copies, and reports to stderr. Throws Unavailable, naming each incomplete host with rsync's message; InvalidArgument
/// if the folder is the home folder or above it, or VIRTUAL_ENV is no virtual environment.
void sync(const SyncRequest& request);

}  // namespace cohort::app
