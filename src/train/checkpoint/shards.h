// Tensors out of a checkpoint whose files are cut in any way: bytes in places, from files that a rank sees or, in
// pieces, from the one who has them. Collective; one thread per communicator.
#pragma once

#include "base/files.h"
#include "train/checkpoint/checkpoint.h"
#include "train/formats/safetensors.h"

#include <cohort/communicator.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::checkpoint {

using Headers = std::map<std::string, formats::SafetensorsHeader>;

/// Bytes of the files up to the end of their headers, from their owners to all: what they say is the same on all ranks.
std::map<std::string, std::string> heads_of(Communicator& comm, const StoredTensors& tensors);

/// Parts without what they have of tensors, to the ranks that want them, by their files' names.
std::map<std::string, sys::FileBytes> fetch_parts(Communicator& comm, const StoredTensors& tensors,
                                                  const Headers& headers,
                                                  const std::map<std::string, std::vector<int>>& wanted);

/// model.safetensors or optimizer.safetensors as a program without shards knows it, on all ranks: rank 0 puts it
/// together. nullopt: nothing of it was saved.
std::optional<sys::FileBytes> fetch_file(Communicator& comm, const StoredTensors& tensors, const std::string& name);

}  // namespace cohort::checkpoint
