#include "doctor/rounds.h"

#include <algorithm>

namespace cohort::doctor {

std::vector<Pairs> rounds_of_pairs(std::size_t count, bool all) {
  std::vector<Pairs> rounds;
  if (count < 2) return rounds;
  const auto ordered = [](std::size_t a, std::size_t b) { return std::pair(std::min(a, b), std::max(a, b)); };
  if (!all) {
    for (const std::size_t first : {std::size_t{0}, std::size_t{1}}) {
      Pairs round;
      for (std::size_t at = first; at + 1 < count; at += 2) round.emplace_back(at, at + 1);
      if (!round.empty()) rounds.push_back(std::move(round));
    }
    // The circle closes: with the second round where that has left both ends alone.
    if (count > 2) {
      if (count % 2 == 0)
        rounds.back().emplace_back(0, count - 1);
      else
        rounds.push_back({{0, count - 1}});
    }
    return rounds;
  }
  // The circle method: one stays, the others move on by a place.
  const std::size_t places = count + count % 2;
  for (std::size_t turn = 0; turn + 1 < places; ++turn) {
    Pairs round;
    for (std::size_t i = 0; i < places / 2; ++i) {
      const auto host = [&](std::size_t place) { return place == 0 ? 0 : 1 + (place - 1 + turn) % (places - 1); };
      const std::size_t a = host(i), b = host(places - 1 - i);
      if (a < count && b < count) round.push_back(ordered(a, b));
    }
    rounds.push_back(std::move(round));
  }
  return rounds;
}

}  // namespace cohort::doctor
