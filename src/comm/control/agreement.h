// What all ranks brought to an operation, and the decision on it: the same on all of them, so they all decide alike.
// Whoever runs operations fills in `brought` by its own means. Pure; belongs to its thread.
#pragma once

#include "comm/control/descriptor.h"
#include "comm/request.h"

#include <cohort/error.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace cohort::comm {

/// Why an operation is refused, and the rank that has to do with it.
struct Disagreement {
  std::string why;
  int peer = -1;
};

struct Agreement {
  explicit Agreement(int ranks);

  /// From what all brought to what is done.
  void settle();
  /// All bring what this rank does, nobody has joined, no weights: `brought` was not filled in.
  void settle_on(const Descriptor& own);
  /// Ranks bring what does not go together, or a rank has joined that is needed. `where`: what messages say of a rank.
  std::optional<Disagreement> disagreement(int rank, const std::function<std::string(int)>& where) const;
  const Descriptor& of(int rank) const noexcept { return brought[static_cast<std::size_t>(rank)]; }
  /// Where all have joined: who came last.
  int last_joined() const noexcept;

  std::vector<Descriptor> brought;  // by rank; not filled in where `uniform`
  std::vector<int> active;          // ranks that have not joined
  Descriptor agreed;                // of the lowest active rank; Joined if there is none
  int root = 0;                     // of a broadcast: who has the data
  bool uniform = false;             // see settle_on
  const std::vector<int> everyone;
};

/// What a round has told of an operation that is carried out elsewhere.
Round round_of(const Agreement& agreement);

/// The error of an operation that is refused: Mismatch.
Error refusal(const std::string& operation, int rank, const std::string& host, std::uint64_t number,
              Disagreement disagreement);

Disagreement unequal_counts(int from, std::int64_t sent, int to, std::int64_t expected, int rank);

/// all_to_all_v. Every rank looks at all pairs, so all come to the same decision.
template <class Sent, class Expected>
std::optional<Disagreement> compare_counts(int ranks, int rank, Sent sent, Expected expected) {
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      if (sent(from, to) != expected(to, from)) {
        return unequal_counts(from, sent(from, to), to, expected(to, from), rank);
      }
    }
  }
  return std::nullopt;
}

}  // namespace cohort::comm
