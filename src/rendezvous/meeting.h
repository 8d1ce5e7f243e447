// Descriptions that ranks exchange when they meet, and the decision on them. Plain data and pure functions; the texts
// come from other processes and are checked in full.
// The meeting of ranks in a store: each claims its rank once and shows its description; rank 0 checks them all and
// writes one decision, which everyone takes. A rank that dies meanwhile leaves a decision behind (its will). Blocks
// until the deadline at most.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/store.h"
#include "rendezvous/identity.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::rendezvous {

/// A rank's description.
struct MemberInfo {
  std::int32_t rank = 0;
  std::int32_t size = 1;
  std::int32_t launcher_local_rank = -1;  ///< what the launcher said; -1 if nothing
  std::int32_t launcher_local_size = -1;
  std::int64_t pid = 0;
  std::string nonce;                  ///< distinguishes two processes that claim one rank
  std::string host_id;                ///< equal on ranks that share memory
  std::string host;                   ///< for messages
  std::string build;                  ///< version, compiler, layout of types: has to be equal
  std::string program;                ///< has to be equal
  std::string torch;                  ///< version; has to be equal where two ranks have one
  std::string transport = "tcp";      ///< between hosts; has to be equal
  std::string no_transport;           ///< why this rank does not have it; empty: it has
  std::string source;                 ///< source that said that it is this rank
  std::vector<std::string> backends;  ///< backends that are available, best first
};

/// This process's build, as `MemberInfo::build`.
std::string this_build();

std::string encode(const MemberInfo& info);
Result<MemberInfo> decode_member_info(std::string_view bytes);

/// "rank 3 (host a, pid 4711)".
std::string describe(const MemberInfo& info);

/// Placement of a rank, from facts.
struct AgreedPlace {
  std::int32_t local_rank = 0;
  std::int32_t local_size = 1;
  std::int32_t cross_rank = 0;
  std::int32_t cross_size = 1;
};
/// The result that all agreed on.
struct AgreedWorld {
  std::string backend;
  std::vector<AgreedPlace> entries;  ///< by rank
  std::string layout;                ///< on rank 0 alone: "2 hosts (a: ranks 0-1; b: rank 2)"
};

std::string encode_decision(const Result<AgreedWorld>& decision);
/// The world, or the error that ended the meeting.
Result<AgreedWorld> decode_decision(std::string_view bytes);

/// One backend as the meeting sees it.
struct BackendChoice {
  std::string name;
  bool several_hosts = false;
};
/// Judges complete descriptions, infos[r] being rank r's: Mismatch if they cannot be one world, naming both sides'
/// values; Unavailable if no backend fits. `known` are the backends in order of preference.
Result<AgreedWorld> judge(const std::vector<MemberInfo>& infos, const std::vector<BackendChoice>& known);

struct MeetingOptions {
  std::string prefix;  ///< of all keys
  std::string place;   ///< for messages
  std::vector<BackendChoice> backends;
  net::Deadline deadline;
  std::string who_may_come = {};  ///< why some ranks cannot, for messages that name the missing; empty: all can
  bool serves_store = false;      ///< the store ends with this process, which is rank 0
};

/// Throws what `cohort::join` throws.
AgreedWorld hold_meeting(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options);

/// Called after the communicator has been formed: the process that serves the store stays until all have theirs. Throws
/// PeerLost if a rank died before, Timeout naming those that did not finish.
void leave_meeting(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options);

}  // namespace cohort::rendezvous
