// What an owner (--owner-folder) and ranks on other hosts send each other, where no file system is shared: files of the
// owner's folder that all ranks may read, and one of each rank. They travel through the job's store, so ranks need its
// secret. The owner's folder has a folder `to-ranks` if it wants this; `from-ranks/RANK` are the answers. One thread;
// blocks, for as long as the store in this process takes.
#pragma once

#include "base/result.h"
#include "net/secret.h"

#include <cstdint>
#include <string>

namespace cohort::launch {

struct PayloadTransferOptions {
  std::string folder;  ///< the owner's
  std::uint16_t store_port = 0;
  net::Secret secret;
};

/// Whether the owner has something for ranks that cannot read its folder.
bool has_payloads(const std::string& owner_folder);
/// Before ranks are started.
Result<void> bring_to_ranks(const PayloadTransferOptions& options);
/// After they have ended. Ranks that have sent nothing have no file. What of one rank cannot be brought leaves the
/// others' alone; the error names the first such rank.
Result<void> bring_from_ranks(const PayloadTransferOptions& options, int world_size);

}  // namespace cohort::launch
