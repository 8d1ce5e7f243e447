// How ranks tell each other what they need to form groups: every rank's card, with `color` and `key`, goes to all.
// Backends add what they meet by. A rank that cannot prepare it says why in its card: no rank waits for one that has
// left, and all throw the same. Pure; any thread.
#pragma once

#include "comm/request.h"

#include <cohort/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

namespace cohort::comm {

/// What every backend's card begins with.
struct GroupCardHead {
  static constexpr std::int32_t kPrepared = -1;
  std::int32_t color = 0;
  std::int32_t key = 0;
  std::int32_t failure = kPrepared;  // else the ErrorCode
  std::uint32_t entry_length = 0;
  char entry[180] = {};  // where ranks of its host meet it, or what failed
  void set_entry(std::string_view text) noexcept {
    entry_length = static_cast<std::uint32_t>(std::min(text.size(), sizeof entry));
    std::memcpy(entry, text.data(), entry_length);
  }
  std::string_view entry_text() const noexcept { return {entry, std::min<std::size_t>(entry_length, sizeof entry)}; }
  void fail(ErrorCode code, std::string_view why) noexcept {
    failure = static_cast<std::int32_t>(code);
    set_entry(why);
  }
};

/// Runs `work`, which fills in `own`.
template <class Work>
void prepare(GroupCardHead& own, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    own.fail(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    own.fail(ErrorCode::Unavailable, "out of memory");
  }
}

/// Throws if a rank could not prepare. `name_of`: a rank's number in messages.
template <class Card, class NameOf>
void check_prepared(const std::vector<Card>& cards, const NameOf& name_of) {
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    const GroupCardHead& card = cards[rank];
    if (card.failure == GroupCardHead::kPrepared) continue;
    const bool known = card.failure >= 0 && card.failure <= static_cast<std::int32_t>(ErrorCode::Internal);
    ErrorContext context;
    context.peer = name_of(static_cast<int>(rank));
    throw Error(known ? static_cast<ErrorCode>(card.failure) : ErrorCode::Corrupt,
                fmt::format("no group is formed: rank {} failed -- {}", context.peer, card.entry_text()), context);
  }
}

/// The operation that fills `cards` (one for each rank) with all ranks' `own`. `listed`: the ranks of a group that was
/// given as a list, which all have to give alike.
template <class Card>
Request exchange_of(const Card& own, std::vector<Card>& cards, std::span<const int> listed,
                    std::chrono::milliseconds timeout) {
  Request exchange;
  exchange.kind = Kind::Split;
  exchange.dtype = DType::UInt8;
  exchange.input = &own;
  exchange.input_count = sizeof own;
  exchange.output = cards.data();
  exchange.output_count = static_cast<std::int64_t>(cards.size() * sizeof own);
  exchange.timeout = timeout;
  if (!listed.empty()) exchange.counts = std::make_shared<const Counts>(Counts{{listed.begin(), listed.end()}, {}});
  return exchange;
}

/// The ranks of this color, in the order of their keys, then of their numbers.
template <class Card>
std::vector<int> members_of(const std::vector<Card>& cards, int color) {
  std::vector<int> members;
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    if (cards[rank].color == color) members.push_back(static_cast<int>(rank));
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return cards[static_cast<std::size_t>(a)].key < cards[static_cast<std::size_t>(b)].key;
  });
  return members;
}

}  // namespace cohort::comm
