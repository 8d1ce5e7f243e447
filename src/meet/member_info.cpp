#include "meet/member_info.h"

#include "base/ranges.h"
#include "base/records.h"

#include <algorithm>
#include <cstddef>
#include <map>

namespace cohort::meet {
namespace {

constexpr std::uint32_t kInfoMagic = 0x33435243;      // "CRC3"
constexpr std::uint32_t kDecisionMagic = 0x32565243;  // "CRV2"
constexpr std::size_t kMostBackends = 64;
constexpr std::size_t kMostRanks = 1 << 20;

struct Decision {
  std::optional<Error> error;
  std::int32_t peer = -1;  // of the error
  Membership membership;
};

template <class M, class A>
void visit_fields(M& m, A& a, const Decision*) {
  a(codec::constant(kDecisionMagic, "not a decision in this version of Cohort"), m.error);
  if (m.error) {
    a(m.peer);
  } else {
    a(m.membership.backend, codec::most(m.membership.entries, kMostRanks));
  }
}

struct Hosts {
  std::vector<std::vector<int>> ranks;  // by host, in order of their lowest rank
  std::vector<std::string> names;
};

Hosts group_by_host(const std::vector<MemberInfo>& infos) {
  Hosts hosts;
  std::map<std::string, std::size_t> number;
  for (std::size_t rank = 0; rank < infos.size(); ++rank) {
    const auto [entry, is_new] = number.emplace(infos[rank].host_id, hosts.ranks.size());
    if (is_new) {
      hosts.ranks.emplace_back();
      hosts.names.push_back(infos[rank].host);
    }
    hosts.ranks[entry->second].push_back(static_cast<int>(rank));
  }
  return hosts;
}

}  // namespace

template <class M, class A>
void visit_fields(M& m, A& a, const MemberInfo*) {
  a(codec::constant(kInfoMagic, "not a description of a rank in this version of Cohort"), m.rank, m.size);
  a.demand(m.size >= 1 && m.rank >= 0 && m.rank < m.size, "a rank outside of its world");
  a(m.launcher_local_rank, m.launcher_local_size, m.pid, m.nonce, m.host_id, m.host, m.build, m.source, m.program,
    m.torch, m.transport, m.no_transport, codec::most(m.backends, kMostBackends));
}
template <class M, class A>
void visit_fields(M& m, A& a, const MembershipEntry*) {
  a(m.local_rank, m.local_size, m.cross_rank, m.cross_size);
}

std::string this_build() {
  // Ranks of different builds could differ in the last bit of a sum, or in the layout of what they share.
  return fmt::format("Cohort {}, {}, pointers of {} bytes, long double of {}", COHORT_VERSION, __VERSION__,
                     sizeof(void*), sizeof(long double));
}

std::string encode(const MemberInfo& info) { return codec::encode(info); }
Result<MemberInfo> decode_member_info(std::string_view bytes) { return codec::decode<MemberInfo>(bytes); }

std::string describe(const MemberInfo& info) {
  return fmt::format("rank {} (host {}, pid {})", info.rank, info.host, info.pid);
}

std::string encode_decision(const Result<Membership>& decision) {
  if (decision) return codec::encode(Decision{{}, -1, *decision});
  return codec::encode(Decision{decision.error(), decision.error().context().peer, {}});
}

Result<Membership> decode_decision(std::string_view bytes) {
  auto decision = codec::decode<Decision>(bytes);
  if (!decision) return tl::unexpected(decision.error());
  if (!decision->error) return std::move(decision->membership);
  ErrorContext context;
  context.peer = decision->peer;
  return tl::unexpected(Error(decision->error->code(), decision->error->what(), std::move(context)));
}

Result<Membership> judge(const std::vector<MemberInfo>& infos, const std::vector<BackendChoice>& known) {
  const MemberInfo& first = infos.front();
  const MemberInfo* with_torch = nullptr;
  for (const MemberInfo& info : infos) {
    if (info.size != first.size) {
      return fail(ErrorCode::Mismatch,
                  "cannot form a world: {} says it has {} ranks ({}), {} says {} ({}) -- give all the same",
                  describe(first), first.size, first.source, describe(info), info.size, info.source);
    }
    if (info.build != first.build) {
      return fail(ErrorCode::Mismatch,
                  "cannot form a world: {} runs '{}', {} runs '{}' -- use the same build everywhere", describe(first),
                  first.build, describe(info), info.build);
    }
    if (info.program != first.program) {
      return fail(ErrorCode::Mismatch,
                  "cannot form a world: {} is the program '{}', {} is '{}' -- start the same everywhere, or give all "
                  "ranks the same COHORT_PROGRAM if they are meant to differ",
                  describe(first), first.program, describe(info), info.program);
    }
    if (info.transport != first.transport) {
      return fail(ErrorCode::Mismatch,
                  "cannot form a world: {} asks for the transport '{}', {} for '{}' -- give all ranks the same "
                  "COHORT_TRANSPORT",
                  describe(first), first.transport, describe(info), info.transport);
    }
    if (info.torch.empty()) continue;
    if (with_torch == nullptr) with_torch = &info;
    if (info.torch != with_torch->torch) {
      return fail(ErrorCode::Mismatch,
                  "cannot form a world: {} runs with torch {}, {} with torch {} -- use the same version everywhere",
                  describe(*with_torch), with_torch->torch, describe(info), info.torch);
    }
  }
  const Hosts hosts = group_by_host(infos);
  for (const MemberInfo& info : infos) {
    if (hosts.ranks.size() == 1 || info.no_transport.empty()) continue;
    return fail(ErrorCode::Unavailable, "cannot form a world on {} hosts with the transport '{}': {} -- {}",
                hosts.ranks.size(), info.transport, describe(info), info.no_transport);
  }
  Membership membership;
  membership.entries.resize(infos.size());
  for (std::size_t host = 0; host < hosts.ranks.size(); ++host) {
    const std::vector<int>& ranks = hosts.ranks[host];
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      membership.entries[static_cast<std::size_t>(ranks[i])] = {
          static_cast<std::int32_t>(i), static_cast<std::int32_t>(ranks.size()), static_cast<std::int32_t>(host),
          static_cast<std::int32_t>(hosts.ranks.size())};
    }
  }
  constexpr std::size_t kMostNamed = 32;
  std::string layout = fmt::format("{} host{} (", hosts.ranks.size(), hosts.ranks.size() == 1 ? "" : "s");
  for (std::size_t host = 0; host < hosts.ranks.size() && host < kMostNamed; ++host) {
    layout += fmt::format("{}{}: rank{} {}", host == 0 ? "" : "; ", hosts.names[host],
                          hosts.ranks[host].size() == 1 ? "" : "s", to_ranges(hosts.ranks[host]));
  }
  layout += hosts.ranks.size() > kMostNamed ? fmt::format("; {} more)", hosts.ranks.size() - kMostNamed) : ")";
  for (const BackendChoice& choice : known) {
    const bool everywhere = std::all_of(infos.begin(), infos.end(), [&](const MemberInfo& info) {
      return std::find(info.backends.begin(), info.backends.end(), choice.name) != info.backends.end();
    });
    if (everywhere && (hosts.ranks.size() == 1 || choice.several_hosts)) {
      membership.backend = choice.name;
      membership.layout = std::move(layout);
      return membership;
    }
  }
  if (hosts.ranks.size() > 1) {
    return fail(ErrorCode::Unavailable,
                "cannot form a world on {}: no backend of this version connects several hosts -- start all ranks on "
                "one host, in one PID and network namespace",
                layout);
  }
  return fail(ErrorCode::Unavailable,
              "cannot form a world on {}: no backend is available on all ranks -- COHORT_LOG=info says why", layout);
}

}  // namespace cohort::meet
