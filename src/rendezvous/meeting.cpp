#include "rendezvous/meeting.h"

#include "base/log.h"
#include "base/parse.h"
#include "base/records.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <span>

namespace cohort::rendezvous {
namespace {

constexpr std::uint32_t kInfoMagic = 0x33435243;      // "CRC3"
constexpr std::uint32_t kDecisionMagic = 0x32565243;  // "CRV2"
constexpr std::size_t kMostBackends = 64;
constexpr std::size_t kMostRanks = 1 << 20;

struct Decision {
  std::optional<Error> error;
  std::int32_t peer = -1;  // the error's peer
  AgreedWorld agreed;
};

void visit_fields(auto& m, auto& a, const Decision*) {
  a(codec::constant(kDecisionMagic, "not a decision in this version of Cohort"), m.error);
  if (m.error) {
    a(m.peer);
  } else {
    a(m.agreed.backend, codec::most(m.agreed.entries, kMostRanks));
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

#if defined(__x86_64__)
constexpr std::string_view kProcessor = "x86-64";
#elif defined(__aarch64__)
constexpr std::string_view kProcessor = "arm64";
#else
constexpr std::string_view kProcessor = "another processor";
#endif

}  // namespace

void visit_fields(auto& m, auto& a, const MemberInfo*) {
  a(codec::constant(kInfoMagic, "not a description of a rank in this version of Cohort"), m.rank, m.size);
  a.demand(m.size >= 1 && m.rank >= 0 && m.rank < m.size, "a rank outside of its world");
  a(m.launcher_local_rank, m.launcher_local_size, m.pid, m.nonce, m.host_id, m.host, m.build, m.source, m.program,
    m.torch, m.transport, m.no_transport, codec::most(m.backends, kMostBackends));
}
void visit_fields(auto& m, auto& a, const AgreedPlace*) { a(m.local_rank, m.local_size, m.cross_rank, m.cross_size); }

std::string this_build() {
  // Ranks of different builds could differ in the last bit of a sum, or in the layout of shared data.
  return fmt::format("Cohort {}, {}, {}, pointers of {} bytes, long double of {}", COHORT_VERSION, __VERSION__,
                     kProcessor, sizeof(void*), sizeof(long double));
}

std::string encode(const MemberInfo& info) { return codec::encode(info); }
Result<MemberInfo> decode_member_info(std::string_view bytes) { return codec::decode<MemberInfo>(bytes); }

std::string describe(const MemberInfo& info) {
  return fmt::format("rank {} (host {}, pid {})", info.rank, info.host, info.pid);
}

std::string encode_decision(const Result<AgreedWorld>& decision) {
  if (decision) return codec::encode(Decision{{}, -1, *decision});
  return codec::encode(Decision{decision.error(), decision.error().context().peer, {}});
}

Result<AgreedWorld> decode_decision(std::string_view bytes) {
  auto decision = codec::decode<Decision>(bytes);
  if (!decision) return tl::unexpected(decision.error());
  if (!decision->error) return std::move(decision->agreed);
  ErrorContext context;
  context.peer = decision->peer;
  return tl::unexpected(Error(decision->error->code(), decision->error->what(), std::move(context)));
}

Result<AgreedWorld> judge(const std::vector<MemberInfo>& infos, const std::vector<BackendChoice>& known) {
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
  AgreedWorld agreed;
  agreed.entries.resize(infos.size());
  for (std::size_t host = 0; host < hosts.ranks.size(); ++host) {
    const std::vector<int>& ranks = hosts.ranks[host];
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      agreed.entries[static_cast<std::size_t>(ranks[i])] = {
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
      agreed.backend = choice.name;
      agreed.layout = std::move(layout);
      return agreed;
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

namespace {

using std::chrono::seconds;

// Rank 0 ends a meeting at its deadline; the others wait this much longer for its decision.
constexpr seconds kGrace{3};
/// Time after which rank 0 reports that some ranks may be unable to come.
constexpr seconds kTellAfter{5};

std::string info_key(const MeetingOptions& options, int rank) {
  return fmt::format("{}/card/{}", options.prefix, rank);
}
std::string decision_key(const MeetingOptions& options) { return options.prefix + "/verdict"; }
std::string formed_key(const MeetingOptions& options, int rank) {
  return fmt::format("{}/formed/{}", options.prefix, rank);
}
std::string lost_key(const MeetingOptions& options) { return options.prefix + "/lost"; }

Error lost_error(const MemberInfo& info, std::string_view when) {
  ErrorContext context;
  context.peer = info.rank;
  return Error(ErrorCode::PeerLost,
               fmt::format("{} died {} -- look at its output for the reason", describe(info), when), context);
}

// Throws an error that others report, adding this rank and the meeting place.
[[noreturn]] void raise_here(const Error& error, const MemberInfo& mine, std::string_view place) {
  ErrorContext context = error.context();
  context.rank = mine.rank;
  context.host = mine.host;
  context.operation = "init";
  throw Error(error.code(), fmt::format("init at {}: {}", place, error.what()), std::move(context));
}

AgreedWorld take_decision(std::string_view bytes, const MemberInfo& mine, const MeetingOptions& options) {
  auto decision = decode_decision(bytes);
  if (!decision) raise_here(decision.error(), mine, options.place);
  if (decision->entries.size() != static_cast<std::size_t>(mine.size)) {
    raise_here(
        Error(ErrorCode::Mismatch, fmt::format("the world that was formed has {} ranks, and this rank was told {} ({})",
                                               decision->entries.size(), mine.size, mine.source)),
        mine, options.place);
  }
  return *std::move(decision);
}

Error missing_error(store::MeetingStore& store, int size, const MeetingOptions& options) {
  std::string missing;
  std::string here;
  int count = 0;
  for (int rank = 0; rank < size; ++rank) {
    const auto bytes = store.try_get(info_key(options, rank));
    if (!bytes) {
      ++count;
      if (count <= 32) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
    } else if (here.size() < 300) {
      const auto info = decode_member_info(*bytes);
      here += fmt::format("{}{}", here.empty() ? "" : ", ", info ? describe(*info) : fmt::format("rank {}", rank));
    }
  }
  if (count > 32) missing += fmt::format(" and {} more", count - 32);
  if (count == 0) {
    return Error(ErrorCode::Timeout, fmt::format("all {} ranks came, but rank 0 did not form the world in time", size));
  }
  return Error(ErrorCode::Timeout, fmt::format("{} of {} ranks did not come in time: {}. Here: {} -- were all started, "
                                               "with the same address and group, and did "
                                               "none end before it called init?{}{}",
                                               count, size, missing, here.empty() ? "nobody" : here,
                                               options.who_may_come.empty() ? "" : " ", options.who_may_come));
}

// Leaves a will (the decision if this process dies), then claims the rank, which belongs to the first process to do so.
void claim(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options) {
  const std::string info = encode(mine);
  const std::string will = encode_decision(tl::unexpected(lost_error(mine, "before the world was formed")));
  store.leave_will(decision_key(options), will);
  if (mine.rank != 0) store.leave_will(lost_key(options), will);
  const auto holder = store.compare_and_set(info_key(options, mine.rank), std::nullopt, info);
  if (holder == info) return log::debug("comm", "rank {} of {} is here", mine.rank, mine.size);
  store.withdraw_will(decision_key(options));
  store.withdraw_will(lost_key(options));
  const auto first =
      holder ? decode_member_info(*holder) : Result<MemberInfo>(fail(ErrorCode::Corrupt, "no description of a rank"));
  raise_here(Error(ErrorCode::InvalidArgument,
                   fmt::format(
                       "rank {} is taken: {} has it, and this process (host {}, pid {}, {}) claims it too -- give each "
                       "process a rank of its own; a program that a rank has started is none: COHORT_ALONE=1 for it",
                       mine.rank, first ? describe(*first) : "another process", mine.host, mine.pid, mine.source)),
             mine, options.place);
}

// On rank 0: collects all descriptions and decides, or returns the error that ended the meeting before.
Result<AgreedWorld> collect(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options) {
  std::vector<MemberInfo> infos;
  // A rank that cannot come may have reported why, but only in its own output.
  const net::Deadline tell_at = net::deadline_in(kTellAfter);
  bool tells = !options.who_may_come.empty() && tell_at < options.deadline;
  const auto wait_for = [&](std::span<const std::string> keys, int rank) {
    if (tells) {
      try {
        return store.get_any(keys, tell_at);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::Timeout) throw;
        log::warn("comm", "init at {}: rank {} of {} has not come so far. {}", options.place, rank, mine.size,
                  options.who_may_come);
        tells = false;
      }
    }
    return store.get_any(keys, options.deadline);
  };
  for (int rank = 0; rank < mine.size; ++rank) {
    const std::string keys[] = {decision_key(options), info_key(options, rank)};
    const auto found = wait_for(keys, rank);
    if (found.index == 0) return decode_decision(found.value);
    auto info = decode_member_info(found.value);
    if (!info) return tl::unexpected(info.error());
    infos.push_back(*std::move(info));
  }
  return judge(infos, options.backends);
}

// Waits before the store ends with this process, until the ranks that have come have read the reason from it.
void stay_for_bad_news(store::MeetingStore& store, const std::string& bytes, const MemberInfo& mine,
                       const MeetingOptions& options) {
  const auto decision = decode_decision(bytes);
  if (decision) return;
  const net::Deadline enough = net::deadline_in(kGrace);
  for (int rank = 0; rank < mine.size; ++rank) {
    if (rank == mine.rank || rank == decision.error().context().peer || !store.try_get(info_key(options, rank)))
      continue;
    try {
      (void)store.get(formed_key(options, rank), enough);
    } catch (const Error&) {
      return;
    }
  }
}

}  // namespace

AgreedWorld hold_meeting(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options) {
  claim(store, mine, options);
  const std::string key = decision_key(options);
  if (mine.rank == 0) {
    Result<AgreedWorld> decision = fail(ErrorCode::Internal, "no decision");
    try {
      decision = collect(store, mine, options);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::Timeout) throw;
      decision = tl::unexpected(missing_error(store, mine.size, options));
    }
    const std::string bytes = encode_decision(decision);
    // If a rank's will was written first, the will is the decision.
    const std::string final_bytes = store.compare_and_set(key, std::nullopt, bytes).value_or(bytes);
    if (options.serves_store) stay_for_bad_news(store, final_bytes, mine, options);
    AgreedWorld formed = take_decision(final_bytes, mine, options);
    if (decision) formed.layout = decision->layout;
    return formed;
  }
  try {
    const std::string bytes = store.get(key, options.deadline + kGrace);
    if (!decode_decision(bytes)) store.set(formed_key(options, mine.rank), "0");  // rank 0 need not wait for this rank
    return take_decision(bytes, mine, options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::Timeout || error.context().operation == "init") throw;
    raise_here(missing_error(store, mine.size, options), mine, options.place);
  }
}

void leave_meeting(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options) {
  if (!options.serves_store) {
    try {
      store.withdraw_will(lost_key(options));
      store.set(formed_key(options, mine.rank), "1");
    } catch (const Error& error) {
      // The world has been formed, so it does not matter if the store closes a moment early.
      if (error.code() != ErrorCode::PeerLost) throw;
    }
    return;
  }
  // The communicator now detects ranks that die, so this waits only for those that still need the store.
  for (int rank = 0; rank < mine.size; ++rank) {
    if (rank == mine.rank) continue;
    const std::string keys[] = {formed_key(options, rank), lost_key(options)};
    try {
      const auto found = store.get_any(keys, options.deadline + kGrace);
      if (found.index == 1) {
        const auto lost = decode_decision(found.value);
        raise_here(lost ? Error(ErrorCode::PeerLost, "a rank died") : lost.error(), mine, options.place);
      }
    } catch (const Error& error) {
      if (error.code() != ErrorCode::Timeout || error.context().operation == "init") throw;
      raise_here(Error(ErrorCode::Timeout, fmt::format("rank {} came but did not form its communicator in time", rank)),
                 mine, options.place);
    }
  }
}

}  // namespace cohort::rendezvous
