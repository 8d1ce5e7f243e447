#include "meet/card.h"

#include "base/ranges.h"
#include "base/records.h"

#include <algorithm>
#include <cstddef>
#include <map>

namespace cohort::meet {
namespace {

constexpr std::uint32_t kCardMagic = 0x33435243;     // "CRC3"
constexpr std::uint32_t kVerdictMagic = 0x32565243;  // "CRV2"
constexpr std::size_t kMostBackends = 64;
constexpr std::size_t kMostRanks = 1 << 20;

struct Verdict {
  std::optional<Error> error;
  std::int32_t peer = -1;  // of the error
  Roster roster;
};

template <class M, class A>
void visit_fields(M& m, A& a, const Verdict*) {
  a(codec::constant(kVerdictMagic, "not a verdict of this version"), m.error);
  if (m.error) {
    a(m.peer);
  } else {
    a(m.roster.backend, codec::most(m.roster.entries, kMostRanks));
  }
}

struct Hosts {
  std::vector<std::vector<int>> ranks;  // by host, in order of their lowest rank
  std::vector<std::string> names;
};

Hosts group_by_host(const std::vector<JoinCard>& cards) {
  Hosts hosts;
  std::map<std::string, std::size_t> number;
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    const auto [entry, is_new] = number.emplace(cards[rank].host_id, hosts.ranks.size());
    if (is_new) {
      hosts.ranks.emplace_back();
      hosts.names.push_back(cards[rank].host);
    }
    hosts.ranks[entry->second].push_back(static_cast<int>(rank));
  }
  return hosts;
}

}  // namespace

template <class M, class A>
void visit_fields(M& m, A& a, const JoinCard*) {
  a(codec::constant(kCardMagic, "not a join card of this version"), m.rank, m.size);
  a.demand(m.size >= 1 && m.rank >= 0 && m.rank < m.size, "a rank outside of its world");
  a(m.launcher_local_rank, m.launcher_local_size, m.pid, m.nonce, m.host_id, m.host, m.build, m.source, m.program,
    m.torch, m.transport, m.no_transport, codec::most(m.backends, kMostBackends));
}
template <class M, class A>
void visit_fields(M& m, A& a, const RosterEntry*) {
  a(m.local_rank, m.local_size, m.cross_rank, m.cross_size);
}

std::string this_build() {
  // Ranks of different builds could differ in the last bit of a sum, or in the layout of what they share.
  return fmt::format("Cohort {}, {}, pointers of {} bytes, long double of {}", COHORT_VERSION, __VERSION__,
                     sizeof(void*), sizeof(long double));
}

std::string encode(const JoinCard& card) { return codec::encode(card); }
Result<JoinCard> decode_card(std::string_view bytes) { return codec::decode<JoinCard>(bytes); }

std::string describe(const JoinCard& card) {
  return fmt::format("rank {} (host {}, pid {})", card.rank, card.host, card.pid);
}

std::string encode_verdict(const Result<Roster>& verdict) {
  if (verdict) return codec::encode(Verdict{{}, -1, *verdict});
  return codec::encode(Verdict{verdict.error(), verdict.error().context().peer, {}});
}

Result<Roster> decode_verdict(std::string_view bytes) {
  auto verdict = codec::decode<Verdict>(bytes);
  if (!verdict) return tl::unexpected(verdict.error());
  if (!verdict->error) return std::move(verdict->roster);
  ErrorContext context;
  context.peer = verdict->peer;
  return tl::unexpected(Error(verdict->error->code(), verdict->error->what(), std::move(context)));
}

Result<Roster> judge(const std::vector<JoinCard>& cards, const std::vector<BackendChoice>& known) {
  const JoinCard& first = cards.front();
  const JoinCard* with_torch = nullptr;
  for (const JoinCard& card : cards) {
    if (card.size != first.size) {
      return fail(ErrorCode::Mismatch,
                  "cannot form a world: {} says it has {} ranks ({}), {} says {} ({}) -- give all the same",
                  describe(first), first.size, first.source, describe(card), card.size, card.source);
    }
    if (card.build != first.build) {
      return fail(ErrorCode::Mismatch,
                  "cannot form a world: {} runs '{}', {} runs '{}' -- use the same build everywhere", describe(first),
                  first.build, describe(card), card.build);
    }
    if (card.program != first.program) {
      return fail(ErrorCode::Mismatch,
                  "cannot form a world: {} is the program '{}', {} is '{}' -- start the same everywhere, or give all "
                  "ranks the same COHORT_PROGRAM if they are meant to differ",
                  describe(first), first.program, describe(card), card.program);
    }
    if (card.transport != first.transport) {
      return fail(ErrorCode::Mismatch,
                  "cannot form a world: {} asks for the transport '{}', {} for '{}' -- give all ranks the same "
                  "COHORT_TRANSPORT",
                  describe(first), first.transport, describe(card), card.transport);
    }
    if (card.torch.empty()) continue;
    if (with_torch == nullptr) with_torch = &card;
    if (card.torch != with_torch->torch) {
      return fail(ErrorCode::Mismatch,
                  "cannot form a world: {} runs with torch {}, {} with torch {} -- use the same version everywhere",
                  describe(*with_torch), with_torch->torch, describe(card), card.torch);
    }
  }
  const Hosts hosts = group_by_host(cards);
  for (const JoinCard& card : cards) {
    if (hosts.ranks.size() == 1 || card.no_transport.empty()) continue;
    return fail(ErrorCode::Unavailable, "cannot form a world on {} hosts with the transport '{}': {} -- {}",
                hosts.ranks.size(), card.transport, describe(card), card.no_transport);
  }
  Roster roster;
  roster.entries.resize(cards.size());
  for (std::size_t host = 0; host < hosts.ranks.size(); ++host) {
    const std::vector<int>& ranks = hosts.ranks[host];
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      roster.entries[static_cast<std::size_t>(ranks[i])] = {
          static_cast<std::int32_t>(i), static_cast<std::int32_t>(ranks.size()), static_cast<std::int32_t>(host),
          static_cast<std::int32_t>(hosts.ranks.size())};
    }
  }
  for (const BackendChoice& choice : known) {
    const bool everywhere = std::all_of(cards.begin(), cards.end(), [&](const JoinCard& card) {
      return std::find(card.backends.begin(), card.backends.end(), choice.name) != card.backends.end();
    });
    if (everywhere && (hosts.ranks.size() == 1 || choice.several_hosts)) {
      roster.backend = choice.name;
      return roster;
    }
  }
  std::string layout;
  for (std::size_t host = 0; host < hosts.ranks.size(); ++host) {
    layout += fmt::format("{}{}: rank{} {}", host == 0 ? "" : "; ", hosts.names[host],
                          hosts.ranks[host].size() == 1 ? "" : "s", to_ranges(hosts.ranks[host]));
  }
  if (hosts.ranks.size() > 1) {
    return fail(
        ErrorCode::Unavailable,
        "cannot form a world on {} hosts ({}): no backend of this version connects several hosts -- start all ranks on "
        "one host, in one PID and network namespace",
        hosts.ranks.size(), layout);
  }
  return fail(ErrorCode::Unavailable,
              "cannot form a world ({}): no backend is available on all ranks -- COHORT_LOG=info says why", layout);
}

}  // namespace cohort::meet
