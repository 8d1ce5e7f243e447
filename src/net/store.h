// The meeting place: a small key-value store through which ranks find each other. Keys and values are bytes.
// Implementations may be called from any thread. Blocking calls take a deadline and never wait without one.
// `MeetingStore` adds what a meeting of processes needs: to wait for the first of several keys, and to learn that
// another process has died. Implemented by the stores that connect processes (TCP or Unix socket, file).
#pragma once

#include "base/result.h"
#include "net/address.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
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

/// Makes a store within one process; for worlds of threads and for tests.
std::shared_ptr<Store> make_in_process_store();
/// All keys under "prefix/", so that several users share one store without meeting.
std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store);

/// Limits of all stores; longer ones are refused with InvalidArgument.
inline constexpr std::size_t kLongestKey = 4096;
inline constexpr std::size_t kLongestValue = std::size_t{64} << 20;
inline constexpr std::size_t kMostKeys = 65536;  ///< in one call of wait

class MeetingStore : public Store {
 public:
  struct Found {
    std::size_t index = 0;
    std::string value;
  };
  /// Waits until one of the keys exists; the first of the list that does. Throws Timeout, naming them.
  virtual Found get_any(std::span<const std::string> keys, Deadline deadline) = 0;
  /// If this process dies (or drops the store) while the will stands, `key` is set to `value` unless it exists.
  /// One will per key and process; a second one replaces the first.
  virtual void leave_will(std::string_view key, std::string_view value) = 0;
  virtual void withdraw_will(std::string_view key) = 0;
};

// Values of any length in a store, whose own values have a limit: in pieces, which are there before their number is. A
// reader of a key finds all of it or nothing. Values are written once (those of one piece may be written again); any
// thread.

/// Throws what the store throws.
void set_large(Store& store, std::string_view key, std::string_view value);
/// Waits until the key exists. Throws Timeout, naming it.
std::string get_large(Store& store, std::string_view key, Store::Deadline deadline);
/// Nullopt if it does not exist now.
std::optional<std::string> try_get_large(Store& store, std::string_view key, Store::Deadline deadline);
/// Deletes a value; nobody may read or write it meanwhile. A missing value is deleted already.
void delete_large(Store& store, std::string_view key);

/// Key under which the job says in which of its epochs it is; not there: in the first, 0.
inline constexpr std::string_view kEpochKey = "job/epoch";

/// The store of the job that started this process (`cohort run`): COHORT_STORE and the job's secret. Any thread.
/// Throws Unavailable where there is no job, and what connecting throws.
std::shared_ptr<Store> connect_job_store(Store::Deadline deadline);

struct FileStoreOptions {
  std::string path;  ///< absolute; on a file system with locks
  int rank = 0;
  int size = 1;
  std::string meeting = {};  ///< as all others say
};

/// A store in a file that all ranks can lock: an append-only log under an open-file-description lock. For worlds
/// without any server. The file belongs to one meeting: it is made by the first rank to come, removed by the last one
/// to leave, and one left by an earlier job is recognised and refused. Any thread may call; not usable in a forked
/// child. Throws Unavailable if the file was left by an earlier job or its world is complete already (says by whom, and
/// how to remove it), InvalidArgument if it belongs to another user or others may write it, Mismatch if it is for
/// another world size, Corrupt if it is not a store, Io where the system refuses.
std::shared_ptr<MeetingStore> open_file_store(const FileStoreOptions& options, net::Deadline deadline);

// The map behind every store, with the semantics of `Store` and its limits, and without waiting. Not thread-safe.
class Table {
 public:
  Result<void> set(std::string_view key, std::string_view value);
  /// nullptr if there is none; valid until the key changes.
  const std::string* find(std::string_view key) const;
  /// The new value of a decimal counter.
  Result<std::int64_t> add(std::string_view key, std::int64_t amount);
  /// Returns the value that is there afterwards.
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
