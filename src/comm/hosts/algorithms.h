// What an operation between hosts consists of, once its ranks have called it: a round, then sums or moves. The
// functions run on all ranks, on the thread that runs the operation.
#pragma once

#include "comm/api/request.h"
#include "comm/api/slices.h"
#include "comm/engine/agreement.h"
#include "comm/hosts/context.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace cohort::comm::hosts {

// Rounds: how all ranks learn what all others bring, and come to one decision before anything is delivered. Small sums
// travel along. The functions run on all ranks, on the thread that runs the operation.

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

// What happens once all ranks agree: sums (below), and operations that only move data. Between hosts each byte goes
// once to each host that needs it. The functions run on all ranks, on the thread that runs the operation; memory that
// is needed aside is the context's.

/// The operation that all have agreed on. `serving`: this rank has joined, and brings and gets nothing.
void execute(Context& context, const Request& request, bool serving);

/// `bytes` is by rank.
void all_gather(Context& context, const void* input, void* output, const std::vector<std::int64_t>& bytes);

// Reductions, once all ranks agree: each element is folded over the ranks of each host by ascending number, then over
// the hosts by ascending number, whatever the way. Every function runs on all ranks, also on those that have joined.

void reduce(Context& context, const Request& request, bool serving);
/// By stripes, block by block (stripes.cpp). All ranks are contributors.
void reduce_striped(Context& context, const Request& request, const Contributors& contributors);
/// What a host does with what its ranks bring; an average divides once, at the end.
inline ReduceOp within_host(ReduceOp op) noexcept { return op == ReduceOp::Average ? ReduceOp::Sum : op; }
/// `to` = `factor` times `from`, rounded as a sum of one rank is.
void scale_by(double factor, DType dtype, const void* from, void* to, std::int64_t count);
/// The hosts' sums to the result.
void fold_hosts(const Request& request, const std::vector<const void*>& partials, void* to, std::int64_t count,
                std::int64_t divisor);
/// Where the result of an element goes directly; null: it is put together aside.
std::byte* destination(const Context& context, const Request& request, std::int64_t begin) noexcept;
/// Takes what this rank is to have of a finished chunk that was put together aside.
void place(const Context& context, const Request& request, std::int64_t begin, std::int64_t count,
           const std::byte* result);

}  // namespace cohort::comm::hosts
