// Agreement of ranks that train together: options of everybody who takes part, each by owner, name and value. One
// digest of them travels in what is sent anyway; only where that differs the lists are exchanged, and the error names
// the option, both values and both ranks, on all ranks. One thread at a time.
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

/// "lr of parameter group 0 = 0.1"; without a value the name alone.
struct Option {
  std::string owner = {}, name = {}, value = {};
  std::string text() const;
};

/// Text of an error around an option: "WHERE: the ranks' WHAT differ -- ... -- ADVICE".
struct Difference {
  std::string where, what, advice;
};

class Agreement {
 public:
  explicit Agreement(Difference difference) : difference_(std::move(difference)) {}

  /// Adds an option, or gives it another value. The order of first calls has to be that of all ranks.
  void set(const std::string& owner, const std::string& name, std::string value);
  /// In place of all that was set.
  void set(std::vector<Option> options);
  const std::vector<Option>& options() const noexcept { return options_; }
  /// How often a digest was given out to travel, or options were compared.
  std::int64_t uses() const noexcept { return uses_; }

  std::uint64_t digest() const;
  /// The digest as AllReduceOptions::tag: ranks with other ones get Mismatch from the operation. See `explain`.
  /// `more`: what else has to be the same.
  std::uint32_t tag(std::uint64_t more = 0) const;
  /// The digest as numbers whose sums over ranks tell whether all have the same: exact up to two million ranks.
  using Sums = std::array<double, 6>;
  Sums sums() const;

  /// Collective. Throws Mismatch on all ranks where these sums over ranks say that options differ. `where`: in place of
  /// the difference's.
  void require(Ranks& ranks, std::span<const double> sums, const char* where = "") const;
  /// Collective, for what nothing travels with: compares the options now.
  void require(Ranks& ranks) const;
  /// All ranks have had this error from an operation that carried `tag`, or of another one in its place. Throws in its
  /// place the Mismatch that names the option, where that is the reason; returns otherwise. Collective where all of
  /// them had brought a tag, which the error says.
  void explain(Ranks& ranks, const Error& error) const;

 private:
  Error mismatch(const Ranks& ranks, const char* where, std::pair<std::size_t, std::size_t> between,
                 const std::string& first, const std::string& other) const;
  /// Collective: the Mismatch that names the first option that differs, the same on all ranks.
  std::optional<Error> difference(Ranks& ranks) const;
  std::optional<Error> exchange(Ranks& ranks, const std::vector<std::vector<std::uint64_t>>& sizes,
                                const std::string& text, const char* where) const;
  std::string lines() const;

  Difference difference_;
  std::vector<Option> options_;
  mutable std::uint64_t digest_ = 0;  // 0: not made
  mutable std::int64_t uses_ = 0;
};

/// Collective. Throws Mismatch on every rank if the lines of any rank ("parameter 'fc.weight': float32 [10, 50]")
/// differ from rank 0's; it names the first that does, and both sides. `who`: on whose behalf.
void require_same_on_all_ranks(Ranks& ranks, const std::vector<std::string>& lines, const char* who);

}  // namespace cohort::step
