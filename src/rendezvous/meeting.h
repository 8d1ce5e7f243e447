// MemberInfo, AgreedWorld: the descriptions that ranks exchange when they meet, and what is decided on them. Plain data
// and pure functions. The texts come from other processes and are fully checked.
// hold_meeting: the meeting of ranks in a store. Each rank claims its number once and publishes its description; rank 0
// checks them all and publishes the world. Until a rank's communicator is formed, each of its waits also ends with the
// first failure that a rank records, or that the store records when a rank has died (its will). A rank makes the same
// number of requests in worlds of all sizes. Blocks until the deadline at most.
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
  std::int32_t launcher_local_rank = -1;  ///< from the launcher; -1 if not given
  std::int32_t launcher_local_size = -1;
  std::int64_t pid = 0;
  std::string nonce;                  ///< distinguishes two processes that claim one rank
  std::string host_id;                ///< equal on ranks that share memory
  std::string host;                   ///< for messages
  std::string build;                  ///< version, compiler, layout of types; must be equal
  std::string program;                ///< must be equal
  std::string torch;                  ///< version; must be equal on all ranks that have libtorch
  std::string transport = "tcp";      ///< between hosts; must be equal
  std::string no_transport;           ///< why this rank lacks the transport; empty if it has it
  std::string source;                 ///< the source of its rank
  std::vector<std::string> backends;  ///< the available backends, best first
};

/// Returns this process's build, for `MemberInfo::build`.
std::string this_build();

std::string encode(const MemberInfo& info);
Result<MemberInfo> decode_member_info(std::string_view bytes);

/// "rank 3 (host a, pid 4711)".
std::string describe(const MemberInfo& info);

/// Placement of a rank, computed from the ranks' hosts.
struct AgreedPlace {
  std::int32_t local_rank = 0;
  std::int32_t local_size = 1;
  std::int32_t cross_rank = 0;
  std::int32_t cross_size = 1;
};
/// The result of a meeting, equal on all ranks.
struct AgreedWorld {
  std::string backend;
  std::vector<int> hosts;  ///< by rank, the number of its host; hosts are numbered in the order of their lowest rank
  std::string layout;      ///< only on rank 0: "2 hosts (a: ranks 0-1; b: rank 2)"

  AgreedPlace place_of(int rank) const;
};

/// The text is short if the placement is regular: a few bytes if all hosts have equally many ranks.
std::string encode(const AgreedWorld& world);
Result<AgreedWorld> decode_agreed_world(std::string_view bytes);

/// Why a world could not be formed, with the error's peer.
std::string encode_failure(const Error& error);
/// Returns the error that was recorded, or why it cannot be read.
Error decode_failure(std::string_view bytes);
/// Key of the first failure, in the store of the ranks of one world.
inline constexpr std::string_view kFailedKey = "failed";

/// A backend that the meeting may choose.
struct BackendChoice {
  std::string name;
  bool several_hosts = false;
};
/// Decides on the descriptions of all ranks, infos[r] being rank r's. Fails with Mismatch, naming both values, if they
/// cannot form one world, and Unavailable if no backend fits. `known`: the backends in order of preference.
Result<AgreedWorld> judge(const std::vector<MemberInfo>& infos, const std::vector<BackendChoice>& known);

struct MeetingOptions {
  std::string prefix;  ///< prefix of all keys
  std::string place;   ///< for messages
  std::vector<BackendChoice> backends;
  net::Deadline deadline;
  std::string who_may_come = {};  ///< why some ranks cannot come, for messages on missing ranks; empty if all can
  bool store_ends = false;        ///< rank 0's process serves the store, which ends with it
};

/// Throws the errors of `cohort::init`.
AgreedWorld hold_meeting(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options);

/// Called when this rank's communicator is formed. If the process serves the store, waits until all ranks have theirs.
/// Throws PeerLost if a rank died before, or Timeout, naming the ranks that did not finish.
void leave_meeting(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options);

}  // namespace cohort::rendezvous
