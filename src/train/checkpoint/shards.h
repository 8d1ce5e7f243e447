// Reads tensors from a checkpoint whose tensors may be divided in any way: ranges of bytes, from files that a rank sees
// or, in pieces, from the rank that has the file. Collective; one thread per communicator.
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

/// Sends the files' bytes up to the end of their headers from the owners to all ranks, so that all have the same.
std::map<std::string, std::string> heads_of(Communicator& comm, const StoredTensors& tensors);

/// Sends parts, without their shards of tensors, to the ranks that want them; keys are file names.
std::map<std::string, sys::FileBytes> fetch_parts(Communicator& comm, const StoredTensors& tensors,
                                                  const Headers& headers,
                                                  const std::map<std::string, std::vector<int>>& wanted);

/// Returns, on all ranks, model.safetensors or optimizer.safetensors as saved without shards; rank 0 assembles the
/// file. nullopt: the checkpoint has no such tensors.
std::optional<sys::FileBytes> fetch_file(Communicator& comm, const StoredTensors& tensors, const std::string& name);

}  // namespace cohort::checkpoint
