// How ranks tell each other what they need to form groups: every rank's card, with `color` and `key`, goes to all.
// Backends add what they meet by. Pure; any thread.
#pragma once

#include "comm/request.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace cohort::comm {

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
