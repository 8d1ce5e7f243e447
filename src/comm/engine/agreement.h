// The ranks' descriptions of an operation, and the decision that all ranks derive from them.
#pragma once

#include "comm/api/request.h"
#include "comm/kernels/fold.h"

#include <cohort/dtype.h>
#include <cohort/error.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace cohort::comm {

// Descriptions of an operation, given by each rank before the operation begins. All ranks of a world compare all
// descriptions, so all come to the same decision. Plain values of one layout, sent between ranks of one build.

/// Memory of a rank. Segment 0 is memory that peers have not mapped: `offset` is its address in the rank's process.
struct Location {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
};

/// A rank's description of an operation. All ranks read all descriptions before any result is delivered.
struct Descriptor {
  Kind kind = Kind::None;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  std::uint8_t weighted : 1 = 0;
  std::uint8_t wire_format : 3 = 0;   ///< WireFormat
  std::uint8_t check_finite : 1 = 0;  ///< the rank asks whether the result is finite; ranks need not agree
  std::uint8_t memory : 2 = 0;        ///< MemoryKind
  std::uint8_t round : 1 = 0;         ///< the operation is carried out elsewhere (Request::round)
  std::int32_t root = 0;
  std::int64_t count = 0;  ///< elements, in the smaller buffer if one has parts; Joined: the order of joining
  double weight = 1;
  double prescale = 1;
  double postscale = 1;
  std::uint64_t detail = 0;  ///< tag, or digest of counts or of a group; Joined: see `count`
  std::uint32_t input_segment = 0;
  std::uint32_t output_segment = 0;
  std::uint64_t input_offset = 0;
  std::uint64_t output_offset = 0;
  std::uint64_t announcements = 0;  ///< number of messages about segments that the rank has sent to each peer so far

  Location input() const noexcept { return {input_segment, input_offset}; }
  Location output() const noexcept { return {output_segment, output_offset}; }
};
static_assert(sizeof(Descriptor) == 80);

// Description of operations in announcements and messages. Pure.

/// The request with which a rank that has joined serves the operation of the others.
Request request_to_serve(const Descriptor& agreed) noexcept;
/// Describes a request, but not the location of its memory.
Descriptor describe(const Request& request) noexcept;
/// Fingerprint of everything that has to agree, and of the weight. Different descriptors have equal fingerprints with
/// probability 2^-64.
std::uint64_t fingerprint_of(const Descriptor& descriptor) noexcept;
/// Digest of a group. Each operation of the group carries it, so ranks whose groups differ anywhere disagree on the
/// first operation.
std::uint64_t group_digest(std::span<const Request> requests) noexcept;
/// True if the descriptors may describe the same operation. The descriptor of a rank that has joined agrees with all.
bool agree(const Descriptor& a, const Descriptor& b) noexcept;
/// True if ranks that all give one of these descriptions need not know more of each other, because they agree, none has
/// joined, and weights are equal and not 0.
bool are_uniform(const Descriptor& a, const Descriptor& b) noexcept;
/// Text for messages: "all_reduce(float32[10], sum)".
std::string to_string(const Descriptor& descriptor);
/// Bytes of the largest payload that a rank sends inline (with its descriptor) in a small operation.
std::size_t inline_bytes(const Request& request, int ranks) noexcept;

// All ranks' descriptions of an operation, and the decision on it. All ranks see the same descriptions, so all decide
// alike. The code that runs operations fills in `brought`. Pure; belongs to the thread that runs operations.

/// Reason why an operation is refused, and one of the ranks concerned.
struct Disagreement {
  std::string why;
  int peer = -1;
  bool tagged = false;  ///< see ErrorContext::tagged
};

struct Agreement {
  explicit Agreement(int ranks);

  /// Derives the decision from all ranks' descriptions.
  void settle();
  /// Decides without `brought`, which was not filled in: all ranks' descriptions are uniform with `own`.
  void settle_on(const Descriptor& own);
  /// Returns a reason if ranks' descriptions differ, or if a rank that is needed has joined. `where(rank)`: added to a
  /// rank's description in messages.
  std::optional<Disagreement> disagreement(int rank, const std::function<std::string(int)>& where) const;
  const Descriptor& of(int rank) const noexcept { return brought[static_cast<std::size_t>(rank)]; }
  /// The rank that joined last, if all have joined.
  int last_joined() const noexcept;

  std::vector<Descriptor> brought;  // by rank; not filled in if `uniform`
  std::vector<int> active;          // ranks that have not joined
  Descriptor agreed;                // the lowest active rank's; its kind is Joined if no rank is active
  int root = 0;                     // the agreed root, or the lowest active rank if the root has joined
  bool uniform = false;             // see settle_on
  const std::vector<int> everyone;
};

/// Returns the Round of an agreement, for an operation that is carried out elsewhere.
Round round_of(const Agreement& agreement);

/// Returns the error of an operation that is refused, a Mismatch.
Error refusal(const std::string& operation, int rank, const std::string& host, std::uint64_t number,
              Disagreement disagreement);

Disagreement unequal_counts(int from, std::int64_t sent, int to, std::int64_t expected, int rank);

/// Compares the counts of an all_to_all_v. Every rank compares all pairs, so all come to the same decision.
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

// The ranks whose inputs a reduction folds, and the factor of each. Belongs to the thread that runs operations.
class Contributors {
 public:
  /// Sets ranks and factors from the operation that all have agreed on. Allocates only in the first calls.
  void set(const Agreement& agreement);

  const std::vector<int>& ranks() const noexcept { return ranks_; }  ///< ascending
  std::int64_t count() const noexcept { return static_cast<std::int64_t>(ranks_.size()); }
  /// One factor for each of `ranks()`; empty if there are no factors.
  const std::vector<double>& scales() const noexcept { return scales_; }
  double scale(std::size_t position) const noexcept { return scales_.empty() ? 1 : scales_[position]; }
  /// Divisor of an average.
  std::int64_t divisor() const noexcept { return divisor_; }

 private:
  std::vector<int> ranks_;
  std::vector<double> scales_;
  std::int64_t divisor_ = 1;
  std::vector<double> weights_;
  Weighting weighting_;
};

}  // namespace cohort::comm
