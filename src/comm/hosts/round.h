// Rounds: how all ranks learn what all others bring, and come to one decision before anything is delivered. Small sums
// travel along. The functions run on all ranks, on the thread that runs the operation.
#pragma once

#include "comm/control/agreement.h"
#include "comm/control/descriptor.h"
#include "comm/hosts/context.h"
#include "comm/request.h"

#include <chrono>
#include <cstddef>
#include <optional>
#include <vector>

namespace cohort::comm::hosts {

/// What the last round came to, beside the context's `agreement` and `pieces_doubled`; its memory is kept.
struct Round {
  std::chrono::nanoseconds waited{0};   ///< for others to come to the operation
  bool delivered = false;               ///< the result came with the round
  bool agreed_here = false;             ///< those of this host bring the same, without weights
  std::vector<Descriptor> here_brings;  ///< one if they agree, else all of them
  std::vector<std::byte> info;
  std::vector<std::vector<std::byte>> infos;  ///< by host
  std::vector<std::byte> small;               ///< a decision, and the result behind it
};

/// `request` is null on a rank that has joined.
void meet_all(Context& context, Round& round, const Request* request, const Descriptor& own);
/// What the ranks disagree about, as this one sees it.
std::optional<Disagreement> disagreement(const Context& context);
/// Of an all_to_all_v: whether what is sent is what is expected.
std::optional<Disagreement> compare_counts(Context& context, const Request& request);
/// Throws Mismatch, or what has ended the world.
void refuse_if(const Context& context, std::optional<Disagreement> found);

}  // namespace cohort::comm::hosts
