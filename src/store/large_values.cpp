#include "store/large_values.h"

#include "base/parse.h"
#include "base/result.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace cohort::store {
namespace {

// A request with its value is one message: far below what a store takes, so that others are served in between.
constexpr std::size_t kPiece = std::size_t{8} << 20;

std::string piece_key(std::string_view key, std::int64_t number) { return fmt::format("{}/{}", key, number); }

std::string pieces_of(Store& store, std::string_view key, std::string_view number_text, Store::Deadline deadline) {
  const auto number = parse_integer<std::int64_t>(number_text);
  if (!number || *number < 0) {
    raise(ErrorCode::Corrupt, "store key '{}' does not say how many pieces there are", key);
  }
  std::string value;
  for (std::int64_t i = 0; i < *number; ++i) value += store.get(piece_key(key, i), deadline);
  return value;
}

}  // namespace

void set_large(Store& store, std::string_view key, std::string_view value) {
  std::int64_t number = 0;
  while (!value.empty()) {
    const std::size_t length = std::min(value.size(), kPiece);
    store.set(piece_key(key, number++), value.substr(0, length));
    value.remove_prefix(length);
  }
  store.set(key, std::to_string(number));
}

std::string get_large(Store& store, std::string_view key, Store::Deadline deadline) {
  const std::string number = store.get(key, deadline);
  return pieces_of(store, key, number, deadline);
}

std::optional<std::string> try_get_large(Store& store, std::string_view key, Store::Deadline deadline) {
  const auto number = store.try_get(key);
  if (!number) return std::nullopt;
  return pieces_of(store, key, *number, deadline);
}

void delete_large(Store& store, std::string_view key) {
  const auto text = store.try_get(key);
  const auto number = text ? parse_integer<std::int64_t>(*text) : std::nullopt;
  store.delete_key(key);
  for (std::int64_t i = 0; number && i < *number; ++i) store.delete_key(piece_key(key, i));
}

}  // namespace cohort::store
