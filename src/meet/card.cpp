#include "meet/card.h"

#include "base/codec.h"
#include "base/ranges.h"

#include <algorithm>
#include <cstddef>
#include <map>

namespace cohort::meet {
namespace {

constexpr std::size_t kLongestText = 4096;
constexpr std::size_t kLongestError = 64 << 10;
constexpr std::uint32_t kCardMagic = 0x33435243;     // "CRC3"
constexpr std::uint32_t kVerdictMagic = 0x31565243;  // "CRV1"
constexpr std::size_t kMostBackends = 64;
constexpr std::size_t kMostRanks = 1 << 20;

// Takes parts one after the other and remembers the first failure.
class Parts {
 public:
  explicit Parts(std::string_view bytes) : in_(bytes) {}
  template <class T>
  void take(T& target) {
    if (error_) return;
    if (auto value = in_.number<T>()) {
      target = *value;
    } else {
      error_ = value.error();
    }
  }
  void take(std::string& target, std::size_t longest = kLongestText) {
    if (error_) return;
    if (auto value = in_.text(longest)) {
      target = *value;
    } else {
      error_ = value.error();
    }
  }
  void demand(bool condition, std::string_view otherwise) {
    if (!condition && !error_) error_ = Error(ErrorCode::Corrupt, std::string(otherwise));
  }
  bool good() const noexcept { return !error_; }
  template <class T>
  Result<T> finish(T value) {
    demand(in_.at_end(), "bytes after the end");
    if (error_) return tl::unexpected(*error_);
    return value;
  }

 private:
  codec::Reader in_;
  std::optional<Error> error_;
};

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

std::string this_build() {
  // Ranks of different builds could differ in the last bit of a sum, or in the layout of what they share.
  return fmt::format("Cohort {}, {}, pointers of {} bytes, long double of {}", COHORT_VERSION, __VERSION__,
                     sizeof(void*), sizeof(long double));
}

std::string encode(const JoinCard& card) {
  codec::Writer out;
  out.number(kCardMagic)
      .number(card.rank)
      .number(card.size)
      .number(card.launcher_local_rank)
      .number(card.launcher_local_size);
  out.number(card.pid).text(card.nonce).text(card.host_id).text(card.host).text(card.build).text(card.source);
  out.text(card.program).text(card.torch).text(card.transport).text(card.no_transport);
  out.number(static_cast<std::uint32_t>(card.backends.size()));
  for (const std::string& name : card.backends) out.text(name);
  return out.take();
}

Result<JoinCard> decode_card(std::string_view bytes) {
  Parts in(bytes);
  JoinCard card;
  std::uint32_t magic = 0;
  in.take(magic);
  in.demand(magic == kCardMagic, "not a join card of this version");
  in.take(card.rank);
  in.take(card.size);
  in.demand(card.size >= 1 && card.rank >= 0 && card.rank < card.size, "a rank outside of its world");
  in.take(card.launcher_local_rank);
  in.take(card.launcher_local_size);
  in.take(card.pid);
  in.take(card.nonce);
  in.take(card.host_id);
  in.take(card.host);
  in.take(card.build);
  in.take(card.source);
  in.take(card.program);
  in.take(card.torch);
  in.take(card.transport);
  in.take(card.no_transport);
  std::uint32_t count = 0;
  in.take(count);
  in.demand(count <= kMostBackends, "too many backends");
  for (std::uint32_t i = 0; i < count && in.good(); ++i) in.take(card.backends.emplace_back());
  return in.finish(std::move(card));
}

std::string describe(const JoinCard& card) {
  return fmt::format("rank {} (host {}, pid {})", card.rank, card.host, card.pid);
}

std::string encode_verdict(const Result<Roster>& verdict) {
  codec::Writer out;
  out.number(kVerdictMagic).number(static_cast<std::uint8_t>(verdict.has_value()));
  if (!verdict) {
    out.number(static_cast<std::uint8_t>(verdict.error().code()))
        .number(static_cast<std::int32_t>(verdict.error().context().peer));
    out.text(std::string_view(verdict.error().what()).substr(0, kLongestError));
    return out.take();
  }
  out.text(verdict->backend).number(static_cast<std::uint32_t>(verdict->entries.size()));
  for (const RosterEntry& entry : verdict->entries) {
    out.number(entry.local_rank).number(entry.local_size).number(entry.cross_rank).number(entry.cross_size);
  }
  return out.take();
}

Result<Roster> decode_verdict(std::string_view bytes) {
  Parts in(bytes);
  std::uint32_t magic = 0;
  std::uint8_t good = 0;
  in.take(magic);
  in.demand(magic == kVerdictMagic, "not a verdict of this version");
  in.take(good);
  in.demand(good <= 1, "a flag is neither 0 nor 1");
  Roster roster;
  if (in.good() && good == 0) {
    std::uint8_t code = 0;
    std::int32_t peer = -1;
    std::string message;
    in.take(code);
    in.demand(code <= static_cast<std::uint8_t>(ErrorCode::Internal), "an error code that does not exist");
    in.take(peer);
    in.take(message, kLongestError);
    const auto checked = in.finish(0);
    if (!checked) return tl::unexpected(checked.error());
    ErrorContext context;
    context.peer = peer;
    return tl::unexpected(Error(static_cast<ErrorCode>(code), message, std::move(context)));
  }
  in.take(roster.backend);
  std::uint32_t count = 0;
  in.take(count);
  in.demand(count <= kMostRanks, "too many ranks");
  for (std::uint32_t i = 0; i < count && in.good(); ++i) {
    RosterEntry& entry = roster.entries.emplace_back();
    in.take(entry.local_rank);
    in.take(entry.local_size);
    in.take(entry.cross_rank);
    in.take(entry.cross_size);
  }
  return in.finish(std::move(roster));
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
