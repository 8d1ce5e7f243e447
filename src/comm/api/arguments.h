// What is wrong with the arguments of an operation, as far as one rank can tell. Each function throws InvalidArgument
// that names the operation, the argument and the rank. Pure; any thread.
#pragma once

#include "comm/api/communicator_impl.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace cohort::comm {

/// The operation that is checked, and whose it is.
struct Caller {
  const CommunicatorImpl& impl;
  Kind kind;

  int size() const noexcept { return impl.placement().size; }
  int rank() const noexcept { return impl.placement().rank; }
};

void check_buffer(const Caller& caller, std::string_view name, const ConstBuffer& buffer);
void check_same_type(const Caller& caller, const ConstBuffer& input, const Buffer& output);
/// `in_place` is where the input begins if the two are one on purpose; else they must not share a byte.
void check_apart(const Caller& caller, const ConstBuffer& input, const Buffer& output, const void* in_place);
void check_reduction(const Caller& caller, DType dtype, ReduceOp op, double prescale, double postscale);
void check_weight(const Caller& caller, DType dtype, ReduceOp op, double weight);
/// What elements travel as between hosts.
void check_wire_dtype(const Caller& caller, DType dtype, ReduceOp op, DType wire);
void check_timeout(const Caller& caller, const std::optional<std::chrono::milliseconds>& timeout);
void check_root(const Caller& caller, int root);
void check_peer(const Caller& caller, int peer, int tag);
/// There has to be somebody to receive from.
void check_any_source(const Caller& caller, int tag);
/// `whole` has to be size() parts of `part` elements.
void check_parts(const Caller& caller, std::string_view whole_name, std::int64_t whole, std::string_view part_name,
                 std::int64_t part);
/// size() counts that make sense. Returns their sum.
std::int64_t check_counts(const Caller& caller, std::string_view name, std::span<const std::int64_t> counts);
/// They also add up to `total`.
void check_counts(const Caller& caller, std::string_view name, std::span<const std::int64_t> counts,
                  std::string_view of, std::int64_t total);
/// This rank's own entry.
void check_own_count(const Caller& caller, std::span<const std::int64_t> counts, std::string_view of,
                     std::int64_t count);
void check_ranks(const Caller& caller, std::span<const int> ranks);
[[noreturn]] void refuse_argument(const Caller& caller, std::string_view why);

}  // namespace cohort::comm
