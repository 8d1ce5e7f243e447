#include "store/table.h"

#include "base/parse.h"
#include "store/meeting_store.h"

namespace cohort::store {

Result<void> check_sizes(std::string_view key, std::string_view value) {
  if (key.size() > kLongestKey) {
    return fail(ErrorCode::InvalidArgument, "a store key of {} bytes ('{}...'): at most {} are allowed", key.size(),
                key.substr(0, 64), kLongestKey);
  }
  if (value.size() > kLongestValue) {
    return fail(ErrorCode::InvalidArgument, "a value of {} bytes under the store key '{}': at most {} are allowed",
                value.size(), key, kLongestValue);
  }
  return {};
}

std::string list_of_keys(const std::vector<std::string>& keys) {
  constexpr std::size_t kShown = 16;
  std::string text;
  for (std::size_t i = 0; i < keys.size() && i < kShown; ++i)
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", keys[i]);
  if (keys.size() > kShown) text += fmt::format(" and {} more", keys.size() - kShown);
  return text;
}

Result<void> Table::set(std::string_view key, std::string_view value) {
  if (auto checked = check_sizes(key, value); !checked) return checked;
  const auto found = entries_.find(key);
  if (found == entries_.end()) {
    entries_.emplace(key, value);
  } else {
    found->second = value;
  }
  return {};
}

const std::string* Table::find(std::string_view key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : &found->second;
}

Result<std::int64_t> Table::add(std::string_view key, std::int64_t amount) {
  const std::string* const old = find(key);
  const auto value = old == nullptr ? std::optional<std::int64_t>(0) : parse_integer<std::int64_t>(*old);
  if (!value) {
    return fail(ErrorCode::InvalidArgument, "cannot add {} to the store key '{}': its value '{}' is not a number",
                amount, key, old->substr(0, 32));
  }
  std::int64_t sum = 0;
  if (__builtin_add_overflow(*value, amount, &sum)) {
    return fail(ErrorCode::InvalidArgument, "cannot add {} to the store key '{}': {} would overflow", amount, key,
                *value);
  }
  if (auto done = set(key, std::to_string(sum)); !done) return tl::unexpected(done.error());
  return sum;
}

Result<std::optional<std::string>> Table::compare_and_set(std::string_view key,
                                                          std::optional<std::string_view> expected,
                                                          std::string_view desired) {
  const std::string* const old = find(key);
  const bool equal = old == nullptr ? !expected.has_value() : expected.has_value() && *expected == *old;
  if (!equal) return old == nullptr ? std::optional<std::string>() : std::optional<std::string>(*old);
  if (auto done = set(key, desired); !done) return tl::unexpected(done.error());
  return std::optional<std::string>(desired);
}

bool Table::erase(std::string_view key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return false;
  entries_.erase(found);
  return true;
}

}  // namespace cohort::store
