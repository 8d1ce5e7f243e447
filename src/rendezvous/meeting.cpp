#include "rendezvous/meeting.h"

#include "base/log.h"
#include "base/parse.h"
#include "base/records.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>
#include <optional>
#include <span>

namespace cohort::rendezvous {
namespace {

constexpr std::uint32_t kInfoMagic = 0x33435243;   // "CRC3"
constexpr std::uint32_t kWorldMagic = 0x33565243;  // "CRV3"
constexpr std::size_t kMostBackends = 64;
constexpr std::size_t kMostRanks = store::kMostKeys;

// The next ranks are on these consecutive hosts, with this number of ranks on each.
struct Run {
  std::int32_t first_host = 0;
  std::int32_t hosts = 1;
  std::int32_t ranks = 1;
  bool operator==(const Run&) const = default;
};
void visit_fields(auto& m, auto& a, const Run*) { a(m.first_host, m.hosts, m.ranks); }

struct EncodedWorld {
  std::string backend;
  std::vector<Run> runs;
};
void visit_fields(auto& m, auto& a, const EncodedWorld*) {
  a(codec::constant(kWorldMagic, "not a world in this version of Cohort"), m.backend, codec::most(m.runs, kMostRanks));
}

struct Failure {
  std::int32_t peer = -1;
  std::optional<Error> error;
};
void visit_fields(auto& m, auto& a, const Failure*) {
  a(m.peer, m.error);
  a.demand(m.error.has_value(), "a failure without an error");
}

std::vector<Run> runs_of(const std::vector<int>& hosts) {
  std::vector<Run> runs;
  for (std::size_t at = 0; at < hosts.size();) {
    const int host = hosts[at];
    const std::size_t begin = at;
    while (at < hosts.size() && hosts[at] == host) ++at;
    const auto ranks = static_cast<std::int32_t>(at - begin);
    if (!runs.empty() && runs.back().first_host + runs.back().hosts == host && runs.back().ranks == ranks) {
      ++runs.back().hosts;
    } else {
      runs.push_back({host, 1, ranks});
    }
  }
  return runs;
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

AgreedPlace AgreedWorld::place_of(int rank) const {
  const auto own = hosts.begin() + rank;
  return {static_cast<std::int32_t>(std::count(hosts.begin(), own, *own)),
          static_cast<std::int32_t>(std::count(hosts.begin(), hosts.end(), *own)), *own, std::ranges::max(hosts) + 1};
}

std::string encode(const AgreedWorld& world) {
  return codec::encode(EncodedWorld{world.backend, runs_of(world.hosts)});
}

Result<AgreedWorld> decode_agreed_world(std::string_view bytes) {
  auto encoded = codec::decode<EncodedWorld>(bytes);
  if (!encoded) return tl::unexpected(encoded.error());
  AgreedWorld world{std::move(encoded->backend), {}, {}};
  int hosts = 0;
  for (const Run& run : encoded->runs) {
    const auto most = static_cast<std::int64_t>(kMostRanks - world.hosts.size());
    if (run.first_host < 0 || run.first_host > hosts || run.hosts < 1 || run.ranks < 1 ||
        std::int64_t{run.hosts} * run.ranks > most) {
      return fail(ErrorCode::Corrupt, "a placement that cannot be");
    }
    for (int host = run.first_host; host < run.first_host + run.hosts; ++host)
      world.hosts.insert(world.hosts.end(), static_cast<std::size_t>(run.ranks), host);
    hosts = std::max(hosts, run.first_host + run.hosts);
  }
  if (world.hosts.empty() || runs_of(world.hosts) != encoded->runs)
    return fail(ErrorCode::Corrupt, "a placement that nobody writes");
  return world;
}

std::string encode_failure(const Error& error) { return codec::encode(Failure{error.context().peer, error}); }

Error decode_failure(std::string_view bytes) {
  auto failure = codec::decode<Failure>(bytes);
  if (!failure) return failure.error();
  ErrorContext context;
  context.peer = failure->peer;
  return Error(failure->error->code(), failure->error->what(), std::move(context));
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
  agreed.hosts.resize(infos.size());
  for (std::size_t host = 0; host < hosts.ranks.size(); ++host) {
    for (const int rank : hosts.ranks[host]) agreed.hosts[static_cast<std::size_t>(rank)] = static_cast<int>(host);
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

std::string verdict_key(const MeetingOptions& options) { return options.prefix + "/verdict"; }
std::string failed_key(const MeetingOptions& options) { return fmt::format("{}/{}", options.prefix, kFailedKey); }
std::string info_key(const MeetingOptions& options, int rank) {
  return fmt::format("{}/card/{}", options.prefix, rank);
}
// Key set by a rank that no longer needs the store, if the store ends with rank 0.
std::string done_key(const MeetingOptions& options, int rank) {
  return fmt::format("{}/done/{}", options.prefix, rank);
}

using KeyOfRank = std::string (*)(const MeetingOptions&, int rank);

/// Waits for keys of these ranks, until the failure or the deadline.
store::Store::Gathered gather(store::MeetingStore& store, KeyOfRank key_of, std::span<const int> ranks,
                              const MeetingOptions& options, net::Deadline deadline) {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(key_of(options, rank));
  const std::string unless[] = {failed_key(options)};
  return store.get_all(keys, unless, deadline);
}

std::vector<int> all_ranks(int size, int first = 0) {
  std::vector<int> ranks(static_cast<std::size_t>(size - first));
  std::iota(ranks.begin(), ranks.end(), first);
  return ranks;
}

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

Error missing_error(store::MeetingStore& store, int size, const MeetingOptions& options) {
  std::string here;
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(info_key(options, rank));
  const auto came = store.get_all(keys, {}, net::deadline_in({}));
  for (int rank = 0; rank < size && here.size() < 300; ++rank) {
    const auto& bytes = came.values[static_cast<std::size_t>(rank)];
    if (!bytes) continue;
    const auto info = decode_member_info(*bytes);
    here += fmt::format("{}{}", here.empty() ? "" : ", ", info ? describe(*info) : fmt::format("rank {}", rank));
  }
  std::vector<int> missing = came.missing();
  const std::size_t count = missing.size();
  if (count == 0) {
    return Error(ErrorCode::Timeout, fmt::format("all {} ranks came, but rank 0 did not form the world in time", size));
  }
  missing.resize(std::min(count, std::size_t{32}));
  const std::string more = count > missing.size() ? fmt::format(" and {} more", count - missing.size()) : "";
  return Error(ErrorCode::Timeout,
               fmt::format("{} of {} ranks did not come in time: {}{}. Here: {} -- were all started, "
                           "with the same address and group, and did "
                           "none end before it called init?{}{}",
                           count, size, fmt::join(missing, ", "), more, here.empty() ? "nobody" : here,
                           options.who_may_come.empty() ? "" : " ", options.who_may_come));
}

// Leaves a will (the failure if this process dies), then claims the rank, which belongs to the first process to do so.
void claim(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options) {
  const std::string info = encode(mine);
  store.leave_will(failed_key(options), encode_failure(lost_error(mine, "before the world was formed")));
  const auto holder = store.compare_and_set(info_key(options, mine.rank), std::nullopt, info);
  if (holder == info) return log::debug("comm", "rank {} of {} is here", mine.rank, mine.size);
  store.withdraw_will(failed_key(options));
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
  const std::vector<int> ranks = all_ranks(mine.size);
  const net::Deadline tell_at = net::deadline_in(kTellAfter);
  // A rank that cannot come may have reported why, but only in its own output.
  const bool tells = !options.who_may_come.empty() && tell_at < options.deadline;
  auto came = gather(store, info_key, ranks, options, tells ? tell_at : options.deadline);
  if (tells && !came.ended && !came.missing().empty()) {
    log::warn("comm", "init at {}: rank {} of {} has not come so far. {}", options.place, came.missing().front(),
              mine.size, options.who_may_come);
    came = gather(store, info_key, ranks, options, options.deadline);
  }
  if (came.ended) return tl::unexpected(decode_failure(came.ended->value));
  if (!came.missing().empty()) return tl::unexpected(missing_error(store, mine.size, options));
  std::vector<MemberInfo> infos;
  for (const auto& bytes : came.values) {
    auto info = decode_member_info(*bytes);
    if (!info) return tl::unexpected(info.error());
    infos.push_back(*std::move(info));
  }
  return judge(infos, options.backends);
}

// Waits before the store ends with this process, until the ranks that have come have read the failure from it.
void stay_for_bad_news(store::MeetingStore& store, const Error& failure, const MemberInfo& mine,
                       const MeetingOptions& options) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < mine.size; ++rank) keys.push_back(info_key(options, rank));
  try {
    const auto came = store.get_all(keys, {}, net::deadline_in({}));
    keys.clear();
    for (int rank = 0; rank < mine.size; ++rank) {
      const bool here = came.values[static_cast<std::size_t>(rank)].has_value();
      if (here && rank != mine.rank && rank != failure.context().peer) keys.push_back(done_key(options, rank));
    }
    (void)store.get_all(keys, {}, net::deadline_in(kGrace));
  } catch (const Error& error) {
    log::debug("comm", "init at {}: {}", options.place, error.what());
  }
}

}  // namespace

AgreedWorld hold_meeting(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options) {
  claim(store, mine, options);
  if (mine.rank == 0) {
    const auto decision = collect(store, mine, options);
    if (decision) {
      store.set(verdict_key(options), encode(*decision));
      return *decision;
    }
    // If a rank's will was written first, all ranks get the will instead.
    const std::string bytes = encode_failure(decision.error());
    const Error failure =
        decode_failure(store.compare_and_set(failed_key(options), std::nullopt, bytes).value_or(bytes));
    if (options.store_ends) stay_for_bad_news(store, failure, mine, options);
    raise_here(failure, mine, options.place);
  }
  const std::string keys[] = {verdict_key(options)};
  const std::string unless[] = {failed_key(options)};
  const auto found = store.get_all(keys, unless, options.deadline + kGrace);
  if (found.ended) {
    if (options.store_ends) store.set(done_key(options, mine.rank), "");  // rank 0 need not wait for this rank
    raise_here(decode_failure(found.ended->value), mine, options.place);
  }
  if (!found.values.front()) raise_here(missing_error(store, mine.size, options), mine, options.place);
  auto world = decode_agreed_world(*found.values.front());
  if (!world) raise_here(world.error(), mine, options.place);
  if (world->hosts.size() != static_cast<std::size_t>(mine.size)) {
    raise_here(
        Error(ErrorCode::Mismatch, fmt::format("the world that was formed has {} ranks, and this rank was told {} ({})",
                                               world->hosts.size(), mine.size, mine.source)),
        mine, options.place);
  }
  return *std::move(world);
}

void leave_meeting(store::MeetingStore& store, const MemberInfo& mine, const MeetingOptions& options) {
  if (!options.store_ends) return;  // a connection that is closed in good order leaves no will
  if (mine.rank != 0) {
    try {
      store.set(done_key(options, mine.rank), "");
    } catch (const Error& error) {
      // The world has been formed, so it does not matter if the store closes a moment early.
      if (error.code() != ErrorCode::PeerLost) throw;
    }
    return;
  }
  // The communicator now detects ranks that die, so this waits only for those that still need the store.
  const auto done = gather(store, done_key, all_ranks(mine.size, 1), options, options.deadline + kGrace);
  if (done.ended) raise_here(decode_failure(done.ended->value), mine, options.place);
  if (done.missing().empty()) return;
  raise_here(Error(ErrorCode::Timeout,
                   fmt::format("rank {} came but did not form its communicator in time", done.missing().front() + 1)),
             mine, options.place);
}

}  // namespace cohort::rendezvous
