// One save by all ranks: parts written aside by whoever the place says, synced; digests to rank 0; a manifest that
// comes last; a rename. Collective; it blocks, and calls the communicator from the calling thread alone.
// Finding the newest checkpoint that is whole, and its bytes to the ranks that need them. Who holds a file is looked
// up, not remembered: a checkpoint may be loaded by other ranks on other hosts, and from another place, than it was
// saved. Collective; it blocks, and calls the communicator from the calling thread alone.
#pragma once

#include "base/files.h"
#include "train/checkpoint/bundle.h"
#include "train/formats/checkpoint_folder.h"

#include <cohort/communicator.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace cohort::checkpoint {

/// Returns on every rank once the checkpoint is on the disk of everyone who keeps a part of it. What any rank cannot do
/// (write, see the folder) is an error on all of them, and the folder is as it was. The bundle's views are not used
/// afterwards.
formats::StoredCheckpoint save(Communicator& comm, const FolderOptions& options, const Bundle& bundle);

/// The same on all ranks but for `part`.
struct Found {
  std::optional<formats::StoredCheckpoint> stored;  ///< none: no checkpoint is whole
  std::map<std::string, sys::FileBytes> files;      ///< all but parts, compared with their digests
  std::optional<sys::FileBytes> part;               ///< of the saved rank of this rank's number
  std::vector<std::string> passed_over;             ///< what is wrong with newer ones
};

/// Throws InvalidArgument if a newer Cohort saved a newer one. `unwanted` files are compared, too, but left out if no
/// rank wants them. Checkpoints of a later generation than `latest` (the same on all ranks) are not looked at.
Found load_newest(Communicator& comm, const FolderOptions& options, const std::set<std::string>& unwanted,
                  std::optional<std::int64_t> latest = {});

/// What to throw if nothing was found although something was there; Corrupt.
Error all_damaged(const FolderOptions& options, const std::vector<std::string>& reasons);

/// Parts of saved ranks; each rank asks for those that it needs, and gets those that there are.
std::map<int, sys::FileBytes> load_parts(Communicator& comm, const FolderOptions& options,
                                         const formats::StoredCheckpoint& stored, const std::set<int>& ranks);

}  // namespace cohort::checkpoint
