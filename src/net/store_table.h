// The map behind every store, with the semantics of `Store` and its limits, and without waiting. Not thread-safe.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace cohort::store {

class Table {
 public:
  Result<void> set(std::string_view key, std::string_view value);
  /// nullptr if there is none; valid until the key changes.
  const std::string* find(std::string_view key) const;
  /// The new value of a decimal counter.
  Result<std::int64_t> add(std::string_view key, std::int64_t amount);
  /// What is there afterwards.
  Result<std::optional<std::string>> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                                     std::string_view desired);
  bool erase(std::string_view key);
  std::size_t size() const noexcept { return entries_.size(); }

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>()(text); }
  };
  std::unordered_map<std::string, std::string, Hash, std::equal_to<>> entries_;
};

/// InvalidArgument if one of them is too long for a store.
Result<void> check_sizes(std::string_view key, std::string_view value);

/// A list of keys for a message, cut after a few.
std::string list_of_keys(const std::vector<std::string>& keys);

}  // namespace cohort::store
