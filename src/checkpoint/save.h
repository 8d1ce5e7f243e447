// One save by all ranks: parts written aside by whoever the place says, synced; digests to rank 0; a manifest that
// comes last; a rename. Collective; it blocks, and calls the communicator from the calling thread alone.
#pragma once

#include "checkpoint/bundle.h"
#include "formats/checkpoint_folder.h"

#include <cohort/communicator.h>

namespace cohort::checkpoint {

/// Returns on every rank once the checkpoint is on the disk of everyone who keeps a part of it. What any rank cannot do
/// (write, see the folder) is an error on all of them, and the folder is as it was. The bundle's views are not used
/// afterwards.
formats::StoredCheckpoint save(Communicator& comm, const FolderOptions& options, const Bundle& bundle);

}  // namespace cohort::checkpoint
