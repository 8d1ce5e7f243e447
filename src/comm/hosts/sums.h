// Reductions, once all ranks agree: each element is folded over the ranks of each host by ascending number, then over
// the hosts by ascending number, whatever the way. Every function runs on all ranks, also on those that have joined.
#pragma once

#include "comm/control/contributors.h"
#include "comm/hosts/context.h"
#include "comm/request.h"
#include "comm/slices.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cohort::comm::hosts {

void reduce(Context& context, const Request& request, bool serving);
/// By stripes, block by block (stripes.cpp). All ranks are contributors, here and below.
void reduce_striped(Context& context, const Request& request, const Contributors& contributors);
/// A reduce_scatter, to where it is kept (parts.cpp).
bool goes_by_parts(const Context& context, const Request& request);
void reduce_parts(Context& context, const Request& request, const Contributors& contributors);

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
