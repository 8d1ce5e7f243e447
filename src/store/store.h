// The meeting place: a small key-value store through which ranks find each other. Keys and values are bytes.
// Implementations may be called from any thread. Blocking calls take a deadline and never wait without one.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::store {

class Store {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  virtual ~Store() = default;

  virtual void set(std::string_view key, std::string_view value) = 0;
  /// Waits until the key exists. Throws Timeout, naming the key, when the deadline passes.
  virtual std::string get(std::string_view key, Deadline deadline) = 0;
  /// The value if the key exists now.
  virtual std::optional<std::string> try_get(std::string_view key) = 0;
  /// Waits until all keys exist. Throws Timeout, naming those that are missing.
  virtual void wait(std::span<const std::string> keys, Deadline deadline) = 0;
  /// Adds to a decimal counter that starts at 0; returns the new value. Throws InvalidArgument if the value under
  /// the key is not a number or would overflow.
  virtual std::int64_t add(std::string_view key, std::int64_t amount) = 0;
  /// Sets the key to `desired` if its value is `expected` (nullopt: if it does not exist). Returns the value that
  /// is there afterwards (nullopt: the key does not exist).
  virtual std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                                     std::string_view desired) = 0;
  /// True if the key existed.
  virtual bool delete_key(std::string_view key) = 0;
};

/// Within one process; for worlds of threads and for tests.
std::shared_ptr<Store> make_in_process_store();
/// All keys under "prefix/", so that several users share one store without meeting.
std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store);

}  // namespace cohort::store
