#include "meet/meeting.h"

#include "base/log.h"

#include <algorithm>

namespace cohort::meet {
namespace {

using std::chrono::seconds;

// Rank 0 ends a meeting that is late; the others give its verdict this much time to reach them.
constexpr seconds kGrace{3};

std::string card_key(const MeetingOptions& options, int rank) {
  return fmt::format("{}/card/{}", options.prefix, rank);
}
std::string verdict_key(const MeetingOptions& options) { return options.prefix + "/verdict"; }
std::string formed_key(const MeetingOptions& options, int rank) {
  return fmt::format("{}/formed/{}", options.prefix, rank);
}
std::string lost_key(const MeetingOptions& options) { return options.prefix + "/lost"; }

Error lost_error(const JoinCard& card, std::string_view when) {
  ErrorContext context;
  context.peer = card.rank;
  return Error(ErrorCode::PeerLost,
               fmt::format("{} died {} -- look at its output for the reason", describe(card), when), context);
}

// An error that others report, with this rank's place added.
[[noreturn]] void raise_here(const Error& error, const JoinCard& mine, std::string_view place) {
  ErrorContext context = error.context();
  context.rank = mine.rank;
  context.host = mine.host;
  context.operation = "join";
  throw Error(error.code(), fmt::format("join at {}: {}", place, error.what()), std::move(context));
}

Roster take_verdict(std::string_view bytes, const JoinCard& mine, const MeetingOptions& options) {
  auto verdict = decode_verdict(bytes);
  if (!verdict) raise_here(verdict.error(), mine, options.place);
  if (verdict->entries.size() != static_cast<std::size_t>(mine.size)) {
    raise_here(
        Error(ErrorCode::Mismatch, fmt::format("the world that was formed has {} ranks, and this rank was told {} ({})",
                                               verdict->entries.size(), mine.size, mine.source)),
        mine, options.place);
  }
  return *std::move(verdict);
}

Error missing_error(store::MeetingStore& store, int size, const MeetingOptions& options) {
  std::string missing;
  std::string here;
  int count = 0;
  for (int rank = 0; rank < size; ++rank) {
    const auto bytes = store.try_get(card_key(options, rank));
    if (!bytes) {
      ++count;
      if (count <= 32) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
    } else if (here.size() < 300) {
      const auto card = decode_card(*bytes);
      here += fmt::format("{}{}", here.empty() ? "" : ", ", card ? describe(*card) : fmt::format("rank {}", rank));
    }
  }
  if (count > 32) missing += fmt::format(" and {} more", count - 32);
  if (count == 0) {
    return Error(ErrorCode::Timeout, fmt::format("all {} ranks came, but rank 0 did not form the world in time", size));
  }
  return Error(
      ErrorCode::Timeout,
      fmt::format(
          "{} of {} ranks did not come in time: {}. Here: {} -- were all started, with the same address and group?",
          count, size, missing, here.empty() ? "nobody" : here));
}

// Leaves a will, then claims the rank; a rank belongs to the first who claims it.
void claim(store::MeetingStore& store, const JoinCard& mine, const MeetingOptions& options) {
  const std::string card = encode(mine);
  const std::string will = encode_verdict(tl::unexpected(lost_error(mine, "before the world was formed")));
  store.leave_will(verdict_key(options), will);
  if (mine.rank != 0) store.leave_will(lost_key(options), will);
  const auto holder = store.compare_and_set(card_key(options, mine.rank), std::nullopt, card);
  if (holder == card) return log::debug("comm", "rank {} of {} is here", mine.rank, mine.size);
  store.withdraw_will(verdict_key(options));
  store.withdraw_will(lost_key(options));
  const auto first = holder ? decode_card(*holder) : Result<JoinCard>(fail(ErrorCode::Corrupt, "no card"));
  raise_here(Error(ErrorCode::InvalidArgument,
                   fmt::format(
                       "rank {} is taken: {} has it, and this process (host {}, pid {}, {}) claims it too -- give each "
                       "process a rank of its own",
                       mine.rank, first ? describe(*first) : "another process", mine.host, mine.pid, mine.source)),
             mine, options.place);
}

// Rank 0: all cards, or what ended the meeting before.
Result<Roster> collect(store::MeetingStore& store, const JoinCard& mine, const MeetingOptions& options) {
  std::vector<JoinCard> cards;
  for (int rank = 0; rank < mine.size; ++rank) {
    const std::string keys[] = {verdict_key(options), card_key(options, rank)};
    const auto found = store.get_any(keys, options.deadline);
    if (found.index == 0) return decode_verdict(found.value);
    auto card = decode_card(found.value);
    if (!card) return tl::unexpected(card.error());
    cards.push_back(*std::move(card));
  }
  return judge(cards, options.backends);
}

// The store ends with us: those who have come should learn the reason from it first.
void stay_for_bad_news(store::MeetingStore& store, const std::string& bytes, const JoinCard& mine,
                       const MeetingOptions& options) {
  const auto verdict = decode_verdict(bytes);
  if (verdict) return;
  const net::Deadline enough = net::deadline_in(kGrace);
  for (int rank = 0; rank < mine.size; ++rank) {
    if (rank == mine.rank || rank == verdict.error().context().peer || !store.try_get(card_key(options, rank)))
      continue;
    try {
      (void)store.get(formed_key(options, rank), enough);
    } catch (const Error&) {
      return;
    }
  }
}

}  // namespace

Roster hold_meeting(store::MeetingStore& store, const JoinCard& mine, const MeetingOptions& options) {
  claim(store, mine, options);
  const std::string key = verdict_key(options);
  if (mine.rank == 0) {
    Result<Roster> verdict = fail(ErrorCode::Internal, "no verdict");
    try {
      verdict = collect(store, mine, options);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::Timeout) throw;
      verdict = tl::unexpected(missing_error(store, mine.size, options));
    }
    const std::string bytes = encode_verdict(verdict);
    // Somebody's will may have come first; then that is the verdict.
    const std::string final_bytes = store.compare_and_set(key, std::nullopt, bytes).value_or(bytes);
    if (options.serves_store) stay_for_bad_news(store, final_bytes, mine, options);
    return take_verdict(final_bytes, mine, options);
  }
  try {
    const std::string bytes = store.get(key, options.deadline + kGrace);
    if (!decode_verdict(bytes)) store.set(formed_key(options, mine.rank), "0");  // rank 0 need not stay for us
    return take_verdict(bytes, mine, options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::Timeout || error.context().operation == "join") throw;
    raise_here(missing_error(store, mine.size, options), mine, options.place);
  }
}

void leave_meeting(store::MeetingStore& store, const JoinCard& mine, const MeetingOptions& options) {
  if (!options.serves_store) {
    try {
      store.withdraw_will(lost_key(options));
      store.set(formed_key(options, mine.rank), "1");
    } catch (const Error& error) {
      // The world stands: a store that closes a moment early is nobody's loss.
      if (error.code() != ErrorCode::PeerLost) throw;
    }
    return;
  }
  // Whoever dies from here on is seen by the communicator; only those that still need the store matter.
  for (int rank = 0; rank < mine.size; ++rank) {
    if (rank == mine.rank) continue;
    const std::string keys[] = {formed_key(options, rank), lost_key(options)};
    try {
      const auto found = store.get_any(keys, options.deadline + kGrace);
      if (found.index == 1) {
        const auto lost = decode_verdict(found.value);
        raise_here(lost ? Error(ErrorCode::PeerLost, "a rank died") : lost.error(), mine, options.place);
      }
    } catch (const Error& error) {
      if (error.code() != ErrorCode::Timeout || error.context().operation == "join") throw;
      raise_here(Error(ErrorCode::Timeout, fmt::format("rank {} came but did not form its communicator in time", rank)),
                 mine, options.place);
    }
  }
}

}  // namespace cohort::meet
