// The folders and files of a run, made so that no other user of the host can lead them somewhere else by links: what is
// in a folder is reached through its descriptor. Errors (Io) hold the reason only; the caller names what it was for.
// Any thread.
#pragma once

#include "base/result.h"
#include "sys/unique_fd.h"

#include <sys/types.h>

#include <string>

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

}  // namespace cohort::launch
