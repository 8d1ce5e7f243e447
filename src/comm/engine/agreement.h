// Ranks' contributions to an operation, their description, and the decision that all ranks derive from them.
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

// Descriptions of an operation, given by each rank before it begins. All ranks of a world compare all of them, so all
// come to the same decision. Plain values of one layout, which travel between the ranks of one build.

/// Memory of a rank. Segment 0: not mapped by peers; then the offset is its address in that rank's process.
struct Location {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
};

/// A rank's contribution to an operation; all ranks read all of them before any result is delivered.
struct Descriptor {
  Kind kind = Kind::None;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  std::uint8_t weighted : 1 = 0;
  std::uint8_t wire_format : 3 = 0;   ///< WireFormat
  std::uint8_t check_finite : 1 = 0;  ///< somebody asks for it; ranks need not agree
  std::uint8_t memory : 2 = 0;        ///< MemoryKind
  std::uint8_t round : 1 = 0;         ///< likewise: carried out elsewhere
  std::int32_t root = 0;
  std::int64_t count = 0;  ///< elements, of the smaller buffer where there are parts; of Joined, when (then `detail`)
  double weight = 1;
  double prescale = 1;
  double postscale = 1;
  std::uint64_t detail = 0;  ///< digest of counts or of a group, where there are any
  std::uint32_t input_segment = 0;
  std::uint32_t output_segment = 0;
  std::uint64_t input_offset = 0;
  std::uint64_t output_offset = 0;
  std::uint64_t announcements = 0;  ///< messages about segments that the rank has sent to each peer so far

  Location input() const noexcept { return {input_segment, input_offset}; }
  Location output() const noexcept { return {output_segment, output_offset}; }
};
static_assert(sizeof(Descriptor) == 80);

// How operations are described in announcements and messages. Pure.

/// The request by which a rank that has joined takes part in the operation of the others.
Request request_to_serve(const Descriptor& agreed) noexcept;
/// Describes what all ranks have to provide alike for this request, without the location of its memory.
Descriptor describe(const Request& request) noexcept;
/// Fingerprint of everything that has to agree. Equal fingerprints of different descriptors are as likely as 2^-64.
std::uint64_t fingerprint_of(const Descriptor& descriptor) noexcept;
/// Digest of a group, which each of its operations has: ranks whose groups differ anywhere differ in the first.
std::uint64_t group_digest(std::span<const Request> requests) noexcept;
/// True if two ranks may describe the same operation by these. (A rank that has joined goes with everything.)
bool agree(const Descriptor& a, const Descriptor& b) noexcept;
/// "all_reduce(float32[10], sum)".
std::string to_string(const Descriptor& descriptor);
/// Bytes that each rank sends inline, with its descriptor, if the operation is small (the most of any rank).
std::size_t inline_bytes(const Request& request, int ranks) noexcept;

// All ranks' contributions to an operation, and the decision on it: the same on all of them, so they all decide alike.
// The code that runs operations fills in `brought` by its own means. Pure; belongs to its thread.

/// Reason why an operation is refused, and the rank that has to do with it.
struct Disagreement {
  std::string why;
  int peer = -1;
  bool tagged = false;  ///< as ErrorContext's
};

struct Agreement {
  explicit Agreement(int ranks);

  /// Derives what is done from all ranks' contributions.
  void settle();
  /// All describe what this rank does, nobody has joined, no weights: `brought` was not filled in.
  void settle_on(const Descriptor& own);
  /// Ranks' descriptions do not go together, or a rank has joined that is needed. `where`: what messages say of a rank.
  std::optional<Disagreement> disagreement(int rank, const std::function<std::string(int)>& where) const;
  const Descriptor& of(int rank) const noexcept { return brought[static_cast<std::size_t>(rank)]; }
  /// The rank that joined last, if all have joined.
  int last_joined() const noexcept;

  std::vector<Descriptor> brought;  // by rank; not filled in where `uniform`
  std::vector<int> active;          // ranks that have not joined
  Descriptor agreed;                // of the lowest active rank; Joined if there is none
  int root = 0;                     // of a broadcast: the rank that has the data
  bool uniform = false;             // see settle_on
  const std::vector<int> everyone;
};

/// Makes a Round of the agreement on an operation that is carried out elsewhere.
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

// The ranks that a reduction folds, and the factor of each. Belongs to the thread that runs operations.
class Contributors {
 public:
  /// Takes the operation that all have agreed on. Does not allocate once it has been used.
  void set(const Agreement& agreement);

  const std::vector<int>& ranks() const noexcept { return ranks_; }  ///< ascending
  std::int64_t count() const noexcept { return static_cast<std::int64_t>(ranks_.size()); }
  /// One factor for each of them, or none.
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
