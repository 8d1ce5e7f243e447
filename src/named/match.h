// Whether what the ranks brought under one name is one operation, and which. Pure functions of replicated values: all
// ranks come to the same answer, and to the same words.
#pragma once

#include "named/request.h"

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace cohort::named {

/// What one rank brought under a name; nullopt: nothing (it has joined).
using Brought = std::vector<std::optional<Signature>>;

/// An operation that all active ranks asked for. The same on all ranks, and never changed.
struct Agreed {
  std::string name;
  Signature common;                                    ///< of the lowest active rank
  std::vector<std::int64_t> rows = {};                 ///< all_gather: dimension 0 of each rank, 0 of those that joined
  std::vector<std::vector<std::int64_t>> splits = {};  ///< all_to_all: [from][to]
  /// Elements of one row: of everything but dimension 0.
  std::int64_t row_elements() const noexcept;
};
using AgreedPtr = std::shared_ptr<const Agreed>;

/// The operation, or Mismatch that says who brought what. At least one rank has brought something.
Result<AgreedPtr> match(const std::string& name, const Brought& brought);

/// Why `operation` cannot be carried out while these ranks have joined; nullopt if it can.
std::optional<Error> refused_by_joined(const Agreed& operation, const std::vector<bool>& joined);

/// Rows of a reduce_scatter for each of `size` ranks: equal, the first ranks one more where they do not divide.
std::vector<std::int64_t> scattered_rows(std::int64_t rows, int size);

/// "0, 2 and 5"; at most eight ranks by number.
std::string list_ranks(std::span<const int> ranks);

}  // namespace cohort::named
