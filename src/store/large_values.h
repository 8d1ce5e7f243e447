// Values of any length in a store, whose own values have a limit: in pieces, which are there before their number is.
// Whoever reads a key finds all of it or nothing. Values are written once (those of one piece may be written again);
// any thread.
#pragma once

#include "store/store.h"

#include <optional>
#include <string>
#include <string_view>

namespace cohort::store {

/// Throws what the store throws.
void set_large(Store& store, std::string_view key, std::string_view value);
/// Waits until the key exists. Throws Timeout, naming it.
std::string get_large(Store& store, std::string_view key, Store::Deadline deadline);
/// Nullopt if it does not exist now.
std::optional<std::string> try_get_large(Store& store, std::string_view key, Store::Deadline deadline);
/// Nobody may read or write it meanwhile. What is not there is deleted already.
void delete_large(Store& store, std::string_view key);

}  // namespace cohort::store
