// The meeting of ranks in a store: each claims its rank once and shows its description; rank 0 judges them all and
// writes one decision, which everyone takes. A rank that dies meanwhile leaves a decision behind (its will). Blocks
// until the deadline at most.
#pragma once

#include "meet/member_info.h"
#include "net/address.h"
#include "store/store.h"

#include <string>
#include <vector>

namespace cohort::meet {

struct MeetingOptions {
  std::string prefix;  ///< of all keys
  std::string place;   ///< for messages
  std::vector<BackendChoice> backends;
  net::Deadline deadline;
  bool serves_store = false;  ///< the store ends with this process, which is rank 0
};

/// Throws what `cohort::join` throws.
Membership hold_meeting(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options);

/// After the communicator has been formed: whoever serves the store stays until all have theirs. Throws PeerLost if
/// a rank died before, Timeout naming those that did not finish.
void leave_meeting(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options);

}  // namespace cohort::meet
