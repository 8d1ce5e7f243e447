// A store in a file that all ranks can lock: an append-only log under an open-file-description lock. For worlds without
// any server. The file belongs to one meeting: it is made by the first rank to come, removed by the last one to leave,
// and one left by an earlier job is recognised and refused. Any thread may call; not usable in a forked child.
#pragma once

#include "net/deadline.h"
#include "store/meeting_store.h"

#include <memory>
#include <string>

namespace cohort::store {

struct FileStoreOptions {
  std::string path;  ///< absolute; on a file system with locks
  int rank = 0;
  int size = 1;
  std::string meeting = {};  ///< as all others say
};

/// Throws Unavailable if the file was left by an earlier job or its world is complete already (says by whom, and how to
/// remove it), InvalidArgument if it belongs to another user or others may write it, Mismatch if it is for another
/// world size, Corrupt if it is not a store, Io where the system refuses.
std::shared_ptr<MeetingStore> open_file_store(const FileStoreOptions& options, net::Deadline deadline);

}  // namespace cohort::store
