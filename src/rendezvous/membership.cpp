#include "rendezvous/membership.h"

#include "base/records.h"

#include <algorithm>
#include <set>

namespace cohort::rendezvous {
namespace {

constexpr std::uint32_t kMagic = 0x31424d43;  // "CMB1"
constexpr std::size_t kMostMembers = std::size_t{1} << 20;
constexpr std::size_t kLongestHost = 255;

// Returns what is wrong with the membership; "" if it is valid.
std::string_view problem_of(const Membership& membership) {
  if (membership.members.empty()) return "a membership of nobody";
  std::set<int> workers;
  const Member* before = nullptr;
  for (const Member& member : membership.members) {
    if (member.worker < 0 || !workers.insert(member.worker).second) return "a worker is listed twice, or is below 0";
    if (member.host.empty()) return "a member has no host";
    const int first_or_next = before == nullptr ? 0 : before->host_number + 1;
    const bool same_host = before != nullptr && member.host_number == before->host_number;
    if (!same_host && member.host_number != first_or_next) return "hosts are not numbered in the order of the ranks";
    if (same_host && member.host != before->host) return "a host has two names";
    before = &member;
  }
  return {};
}

}  // namespace

void visit_fields(auto& m, auto& a, const Member*) { a(m.worker, codec::longest(m.host, kLongestHost), m.host_number); }
void visit_fields(auto& m, auto& a, const Membership*) {
  a(codec::constant(kMagic, "not a membership in this version of Cohort"), m.epoch,
    codec::most(m.members, kMostMembers), m.cause);
}

std::string encode(const Membership& membership) { return codec::encode(membership); }

Result<Membership> decode_membership(std::string_view bytes) {
  auto membership = codec::decode<Membership>(bytes, {.what = "a job's membership"});
  if (!membership) return membership;
  if (const auto problem = problem_of(*membership); !problem.empty())
    return fail(ErrorCode::Corrupt, "a job's membership: {}", problem);
  return membership;
}

std::string membership_key(std::uint64_t epoch) { return fmt::format("job/membership/{}", epoch); }

std::optional<MemberPlace> place_of(const Membership& membership, int worker) {
  const auto& members = membership.members;
  const auto found =
      std::find_if(members.begin(), members.end(), [&](const Member& member) { return member.worker == worker; });
  if (found == members.end()) return std::nullopt;
  const auto of_host = [&](const Member& member) { return member.host_number == found->host_number; };
  const auto first = std::find_if(members.begin(), members.end(), of_host);
  return MemberPlace{static_cast<int>(found - members.begin()), static_cast<int>(found - first),
                     static_cast<int>(std::count_if(first, members.end(), of_host)), found->host_number,
                     members.back().host_number + 1};
}

}  // namespace cohort::rendezvous
