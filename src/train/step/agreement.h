// Agreement of ranks that train together on the options that have to be equal on all ranks, each with owner, name and
// value. A digest of the options travels in messages that are sent anyway. If the digests differ, the lists are
// exchanged, and the error on all ranks names the option, both values and both ranks. One thread at a time.
#pragma once

#include "train/step/ranks.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cohort::step {

/// Returns "lr of parameter group 0 = 0.1", or only the name if the option has no value.
struct Option {
  std::string owner = {}, name = {}, value = {};
  std::string text() const;
  bool operator==(const Option&) const = default;
};

/// Text of an error around an option: "WHERE: the ranks' WHAT differ -- ... -- ADVICE".
struct Difference {
  std::string where, what, advice;
};

class Agreement {
 public:
  explicit Agreement(Difference difference) : difference_(std::move(difference)) {}

  /// Adds an option, or changes its value. All ranks have to add their options in the same order.
  void set(const std::string& owner, const std::string& name, std::string value);
  /// Replaces all options that were set.
  void set(std::vector<Option> options);
  const std::vector<Option>& options() const noexcept { return options_; }
  /// Returns how often a digest was sent, or options were compared.
  std::int64_t uses() const noexcept { return uses_; }

  std::uint64_t digest() const;
  /// Returns the digest as AllReduceOptions::tag: ranks whose tags differ get Mismatch (see `explain`).
  /// `more`: a digest of other values that have to be the same.
  std::uint32_t tag(std::uint64_t more = 0) const;
  /// The digest as numbers whose sums over the ranks show whether all digests are equal: exact up to two million ranks.
  using Sums = std::array<double, 6>;
  Sums sums() const;

  /// Collective. Throws Mismatch on all ranks if `sums`, which are sums over the ranks, show that options differ.
  /// `where` replaces Difference::where in the error.
  void require(Ranks& ranks, std::span<const double> sums, const char* where = "") const;
  /// Collective. Compares the options now, for methods that send no message in which the digest could travel.
  void require(Ranks& ranks) const;
  /// Explains an error that all ranks have received from an operation with a `tag`. If options differ, throws the
  /// Mismatch that names the option; otherwise returns. Collective if all ranks had passed a tag to the operation,
  /// which the error records.
  void explain(Ranks& ranks, const Error& error) const;

 private:
  Error mismatch(const Ranks& ranks, const char* where, std::pair<std::size_t, std::size_t> between,
                 const std::string& first, const std::string& other) const;
  /// Collective. Returns the Mismatch that names the first option that differs, the same on all ranks.
  std::optional<Error> difference(Ranks& ranks) const;
  std::optional<Error> exchange(Ranks& ranks, const std::vector<std::vector<std::uint64_t>>& sizes,
                                const std::string& text, const char* where) const;
  std::string lines() const;
  std::string changes() const;

  Difference difference_;
  std::vector<Option> options_;
  mutable std::optional<std::vector<Option>> agreed_;  // the options when the ranks last compared them
  mutable std::uint64_t digest_ = 0;                   // 0: not computed yet
  mutable std::int64_t uses_ = 0;
};

/// Collective. Throws Mismatch on every rank if the lines of any rank ("parameter 'fc.weight': float32 [10, 50]")
/// differ from rank 0's. The error names the first line that differs, both texts, and `who`, the caller.
void require_same_on_all_ranks(Ranks& ranks, const std::vector<std::string>& lines, const char* who);

}  // namespace cohort::step
