// Which commit a folder is at. Reads the files of the repository around it; runs nothing. Any thread.
#pragma once

#include <optional>
#include <string>

namespace cohort::launch {

struct GitRevision {
  std::string commit;  ///< hexadecimal
  std::string branch;  ///< empty where none is checked out
};

/// nullopt where the folder is in no repository, or in one without a commit.
std::optional<GitRevision> git_revision(const std::string& folder);

}  // namespace cohort::launch
