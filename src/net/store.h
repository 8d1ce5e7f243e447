// A small key-value store through which ranks find each other. Keys and values are bytes.
// Implementations may be called from any thread. Blocking calls take a deadline and never wait without one.
// `MeetingStore`, which the stores between processes implement (TCP or Unix socket, file), also reports that another
// process has died.
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

  struct Found {
    std::size_t index = 0;
    std::string value;
  };
  struct Gathered {
    std::vector<std::optional<std::string>> values;  ///< by key; nullopt: the key does not exist
    std::optional<Found> ended;  ///< the key of `unless` that ended the wait; `values` is then empty
    /// Indexes of the keys that do not exist, unless a key of `unless` ended the wait.
    std::vector<int> missing() const;
  };

  virtual void set(std::string_view key, std::string_view value) = 0;
  /// Waits until all keys exist (if there are any), one of `unless` exists, or the deadline passes. Sends one request,
  /// however many keys there are. Throws InvalidArgument for more than `kMostKeys`.
  virtual Gathered get_all(std::span<const std::string> keys, std::span<const std::string> unless,
                           Deadline deadline) = 0;
  /// Waits until the key exists. Throws Timeout, naming the key, when the deadline passes.
  std::string get(std::string_view key, Deadline deadline);
  /// Returns the value if the key exists now; does not wait.
  std::optional<std::string> try_get(std::string_view key);
  /// Waits until one of the keys exists, and returns the first existing key of the list. Throws Timeout, naming the
  /// keys.
  Found get_any(std::span<const std::string> keys, Deadline deadline);
  /// Adds to a decimal counter that starts at 0, and returns the new value. Throws InvalidArgument if the key's value
  /// is not a number or would overflow.
  virtual std::int64_t add(std::string_view key, std::int64_t amount) = 0;
  /// Sets the key to `desired` if its value is `expected`; nullopt means that the key does not exist. Returns the key's
  /// value afterwards; nullopt if the key does not exist.
  virtual std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                                     std::string_view desired) = 0;
  /// Returns whether the key existed.
  virtual bool delete_key(std::string_view key) = 0;
  /// For messages: "store at ADDRESS".
  virtual std::string name() const = 0;
};

/// Makes a store within one process; for worlds of threads and for tests.
std::shared_ptr<Store> make_in_process_store();
/// Makes a store that keeps all its keys under "prefix/" in `store`, so that users with different prefixes do not
/// collide.
std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store);

/// Limits of all stores. Longer keys and values are refused with InvalidArgument.
inline constexpr std::size_t kLongestKey = 4096;
inline constexpr std::size_t kLongestValue = std::size_t{64} << 20;
inline constexpr std::size_t kMostKeys = 65536;  ///< in one call of get_all

class MeetingStore : public Store {
 public:
  /// If this process dies (or drops the store) before it withdraws the will, `key` is set to `value` unless the key
  /// exists. A process has one will per key; a second will replaces the first.
  virtual void leave_will(std::string_view key, std::string_view value) = 0;
  virtual void withdraw_will(std::string_view key) = 0;
};

// Values of any length in a store, whose own values have a limit. A large value is written in pieces, and the number of
// pieces last, so a reader finds the whole value or nothing. Each value is written once (a value of one piece may be
// overwritten). Any thread.

/// Sets the value. Throws any error of the store.
void set_large(Store& store, std::string_view key, std::string_view value);
/// Waits until the key exists. Throws Timeout, naming the key.
std::string get_large(Store& store, std::string_view key, Store::Deadline deadline);
/// Returns nullopt if the key does not exist now.
std::optional<std::string> try_get_large(Store& store, std::string_view key, Store::Deadline deadline);
/// Deletes a value, if it exists. No other process may read or write the value meanwhile.
void delete_large(Store& store, std::string_view key);

/// Key of the job's current epoch. A missing key means the first epoch, 0.
inline constexpr std::string_view kEpochKey = "job/epoch";

/// Connects to the store of the job that started this process (`cohort run`), with COHORT_STORE and the job's secret.
/// Any thread. Throws Unavailable if there is no job, and any error of connecting.
std::shared_ptr<Store> connect_job_store(Store::Deadline deadline);

struct FileStoreOptions {
  std::string path;  ///< absolute; on a file system with locks
  int rank = 0;
  int size = 1;
  std::string meeting = {};  ///< name of the meeting, the same on all ranks
};

/// Opens a store in a file that all ranks can lock (an append-only log under an open-file-description lock), for worlds
/// without a server. The file belongs to one meeting. The first rank to arrive creates the file, and the last rank to
/// leave removes it. Any thread may call; not usable in a forked child. Throws Unavailable if the file was left by an
/// earlier job or its world is complete already (the message names the job, and how to remove the file),
/// InvalidArgument if the file belongs to another user or others may write it, Mismatch if it is for another world
/// size, Corrupt if it is not a store, Io if the system refuses access.
std::shared_ptr<MeetingStore> open_file_store(const FileStoreOptions& options, net::Deadline deadline);

// The map behind every store, with the semantics and limits of `Store` but without waiting. Not thread-safe.
class Table {
 public:
  Result<void> set(std::string_view key, std::string_view value);
  /// Returns nullptr if the key does not exist. The pointer is valid until the key changes.
  const std::string* find(std::string_view key) const;
  /// Adds to a decimal counter, and returns its new value.
  Result<std::int64_t> add(std::string_view key, std::int64_t amount);
  /// Returns the key's value afterwards.
  Result<std::optional<std::string>> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                                     std::string_view desired);
  bool erase(std::string_view key);
  std::size_t size() const noexcept { return entries_.size(); }
  /// True if a wait of `get_all` is over.
  bool settles(std::span<const std::string> keys, std::span<const std::string> unless) const;
  /// Returns what `get_all` returns, without waiting.
  Store::Gathered gather(std::span<const std::string> keys, std::span<const std::string> unless) const;

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>()(text); }
  };
  std::unordered_map<std::string, std::string, Hash, std::equal_to<>> entries_;
};

/// Fails with InvalidArgument if the key or the value is too long for a store.
Result<void> check_sizes(std::string_view key, std::string_view value);

/// Returns a list of keys for a message, cut after a few.
std::string list_of_keys(const std::vector<std::string>& keys);

}  // namespace cohort::store
