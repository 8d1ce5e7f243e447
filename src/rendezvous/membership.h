// Members of an elastic job, and their ranks. Only the supervisor decides on members; it writes one record for each
// epoch into the job's store. Plain data and pure functions. Bytes come from another process and are fully checked.
#pragma once

#include "base/result.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::rendezvous {

struct Member {
  int worker = 0;  ///< identifies one process during the whole job; never reused
  std::string host;
  int host_number = 0;  ///< from 0, in the order of the ranks, as in comm::FormOptions::hosts
  friend bool operator==(const Member&, const Member&) = default;
};

struct Membership {
  std::uint64_t epoch = 0;
  std::vector<Member> members;  ///< by rank; members of one host are consecutive, the oldest hosts and workers first
  std::string cause;            ///< why the membership has changed: "rank 2 (host b) was killed by signal 9"
  friend bool operator==(const Membership&, const Membership&) = default;
};

std::string encode(const Membership& membership);
/// Fails with Corrupt if the bytes are no membership of this version: no members, a worker twice, hosts out of order.
Result<Membership> decode_membership(std::string_view bytes);

/// Key of the membership in the job's store.
std::string membership_key(std::uint64_t epoch);

/// A worker's rank and placement in the membership.
struct MemberPlace {
  int rank = 0;
  int local_rank = 0;
  int local_size = 1;
  int cross_rank = 0;  ///< number of the worker's host
  int cross_size = 1;  ///< number of hosts
  friend bool operator==(const MemberPlace&, const MemberPlace&) = default;
};
/// Returns nullopt if the worker is not a member.
std::optional<MemberPlace> place_of(const Membership& membership, int worker);

}  // namespace cohort::rendezvous
