// Decides whether the ranks' signatures under one name agree on an operation. Pure functions of replicated values, so
// all ranks get the same result, and the same error text.
#pragma once

#include "horovod/named/request.h"

#include <cstddef>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace cohort::named {

/// Signatures under one name, by rank; nullopt if the rank has joined.
using Brought = std::vector<std::optional<Signature>>;

/// An operation that all active ranks have requested. The same on all ranks, and immutable.
struct Agreed {
  std::string name;
  Signature common;                                    ///< signature of the lowest active rank
  std::vector<std::int64_t> rows = {};                 ///< all_gather: dimension 0 of each rank; 0 if joined
  std::vector<std::vector<std::int64_t>> splits = {};  ///< all_to_all: [from][to]
  /// Returns the number of elements of one row: the product of all dimensions but dimension 0.
  std::int64_t row_elements() const noexcept;
};
using AgreedPtr = std::shared_ptr<const Agreed>;

/// Returns the operation, or Mismatch, which lists the ranks of each signature. At least one rank has a signature.
Result<AgreedPtr> match(const std::string& name, const Brought& brought);

/// Returns why `operation` cannot be carried out while these ranks have joined; nullopt if it can.
std::optional<Error> refused_by_joined(const Agreed& operation, const std::vector<bool>& joined);

/// Returns a reduce_scatter's rows for each of `size` ranks: equal numbers, or one more for the first ranks.
std::vector<std::int64_t> scattered_rows(std::int64_t rows, int size);

/// Returns "0, 2 and 5"; lists at most eight ranks by number.
std::string list_ranks(std::span<const int> ranks);

// Operations on which all ranks have agreed before. Each has a slot; the slot's number is its bit in a round. All ranks
// insert, use and erase in the same order, so that slots and evictions are the same everywhere. `own` is this rank's
// signature, which may differ from others' in dimension 0 and splits. Not thread-safe.

class Cache {
 public:
  /// A capacity of 0 disables the cache.
  explicit Cache(std::size_t capacity) : capacity_(capacity) {}

  /// Returns the slot of a name if this rank's signature is the same as before.
  std::optional<std::size_t> find(const std::string& name, const Signature& own) const;
  /// Returns the slot of a name, whatever this rank's signature was.
  std::optional<std::size_t> slot_of(const std::string& name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? std::nullopt : std::optional(found->second);
  }
  /// Returns the operation in a slot; null if the slot is free.
  const AgreedPtr& at(std::size_t slot) const { return slots_[slot].agreed; }
  /// Returns the number of slots that have ever been in use.
  std::size_t width() const noexcept { return slots_.size(); }

  struct Freed {
    std::string name;
    std::size_t slot = 0;
  };
  /// Inserts an operation that has no slot yet. Returns the entry that was evicted for it.
  std::optional<Freed> insert(AgreedPtr agreed, Signature own);
  /// Notes that the slot was just used.
  void touch(std::size_t slot);
  std::optional<Freed> erase(const std::string& name);

 private:
  struct Slot {
    AgreedPtr agreed;
    Signature own;
    std::list<std::size_t>::iterator place;  // in order_
  };
  Freed release(std::size_t slot);

  const std::size_t capacity_;
  std::vector<Slot> slots_;
  std::list<std::size_t> order_;  // least recently used first
  std::vector<std::size_t> free_;
  std::unordered_map<std::string, std::size_t> index_;
};

// Names without a slot that some but not all ranks have described. Every rank has the same table, since every rank
// enters the same descriptions in the same order. Pure; belongs to the engine's thread.

class Table {
 public:
  explicit Table(int size) : size_(static_cast<std::size_t>(size)) {}

  /// Adds a rank's description of a name, replacing an earlier one of the same rank.
  void add(int rank, const std::string& name, Signature signature);
  /// A name that all active ranks have described. take_complete removes these, in order of first description.
  struct Complete {
    std::string name;
    Brought brought;
  };
  std::vector<Complete> take_complete(const std::vector<bool>& joined);
  /// Returns whether the rank has described the name.
  bool has(int rank, const std::string& name) const;
  bool contains(const std::string& name) const { return index_.count(name) != 0; }
  void erase(const std::string& name);
  std::size_t size() const noexcept { return index_.size(); }

 private:
  struct Entry {
    std::string name;
    Brought brought;
    std::size_t missing = 0;  // number of ranks that have not described the name
  };
  const std::size_t size_;
  std::list<Entry> entries_;  // in order of first description
  std::unordered_map<std::string, std::list<Entry>::iterator> index_;
};

// Decides which operations of those that became ready in one round run as one. A pure function of replicated values,
// so all ranks plan alike. Fusing never changes bits: the core folds each element by ascending rank, wherever it lies.

/// Largest host tensor that is fused. Larger ones run alone, since copying them together gains nothing (and the core
/// would not copy them). GPU tensors are not copied: a batch of any sizes is one NCCL operation.
inline constexpr std::size_t kFusedTensor = std::size_t{64} << 10;

/// Indices into the planned operations; a batch is one call of the communicator.
using Batch = std::vector<std::size_t>;

/// Fuses all_reduces of equal dtype, op and scales, and broadcasts of equal dtype and root, on one kind of device, up
/// to `threshold` bytes per batch, even if other operations are between them. Batches are in the order of their first
/// operations.
std::vector<Batch> plan_fusion(std::span<const AgreedPtr> ready, std::size_t threshold);

}  // namespace cohort::named
