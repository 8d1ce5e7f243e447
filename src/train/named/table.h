// Decides whether the ranks' signatures under one name make one operation, and which. Pure functions of replicated
// values: all ranks come to the same answer, and to the same words.
#pragma once

#include "train/named/request.h"

#include <cstddef>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace cohort::named {

/// Signatures given under one name, by rank; nullopt: none (the rank has joined).
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

/// Returns the operation, or Mismatch with the ranks of each signature. At least one rank has one.
Result<AgreedPtr> match(const std::string& name, const Brought& brought);

/// Reason why `operation` cannot be carried out while these ranks have joined; nullopt if it can.
std::optional<Error> refused_by_joined(const Agreed& operation, const std::vector<bool>& joined);

/// Rows of a reduce_scatter for each of `size` ranks: equal, the first ranks one more where they do not divide.
std::vector<std::int64_t> scattered_rows(std::int64_t rows, int size);

/// "0, 2 and 5"; at most eight ranks by number.
std::string list_ranks(std::span<const int> ranks);

// Operations that all ranks have agreed on before: each has a slot, whose number stands for it in a round's bits. All
// ranks insert, use and erase in the same order, so that slots, and which go when the cache is full, are the same
// everywhere. `own` is this rank's signature, which may differ from others' in dimension 0 and splits. Not thread-safe.

class Cache {
 public:
  /// With a capacity of 0 nothing is kept.
  explicit Cache(std::size_t capacity) : capacity_(capacity) {}

  /// The slot of this name if this rank's signature is the same as before.
  std::optional<std::size_t> find(const std::string& name, const Signature& own) const;
  /// The slot of a name, for any signature of this rank.
  std::optional<std::size_t> slot_of(const std::string& name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? std::nullopt : std::optional(found->second);
  }
  /// The operation in a slot; null if the slot is free.
  const AgreedPtr& at(std::size_t slot) const { return slots_[slot].agreed; }
  /// Slots that have been in use so far: all slots are below.
  std::size_t width() const noexcept { return slots_.size(); }

  struct Freed {
    std::string name;
    std::size_t slot = 0;
  };
  /// `agreed` has no slot yet. Returns the entry that was evicted for it.
  std::optional<Freed> insert(AgreedPtr agreed, Signature own);
  /// It was used just now.
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

// Names without a slot that some ranks have described and others not yet. Every rank holds the same table, since every
// rank enters the same descriptions in the same order. Pure; belongs to the engine's thread.

class Table {
 public:
  explicit Table(int size) : size_(static_cast<std::size_t>(size)) {}

  /// A name is described once by a rank; a second time replaces the first.
  void add(int rank, const std::string& name, Signature signature);
  /// Takes out the names that all ranks that have not joined have described, in the order in which they first came.
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
    std::size_t missing = 0;  // ranks that have not described it
  };
  const std::size_t size_;
  std::list<Entry> entries_;  // in the order in which the names first came
  std::unordered_map<std::string, std::list<Entry>::iterator> index_;
};

// Decides which operations that have become ready together are carried out together. A pure function of replicated
// values, so all ranks plan alike. Fusing never changes bits: the core folds each element by ascending rank wherever it
// lies.

/// Larger tensors of the host gain nothing from being copied together (and the core would not): they go alone. Tensors
/// on GPUs are not copied: a batch of any sizes is one operation of NCCL.
inline constexpr std::size_t kFusedTensor = std::size_t{64} << 10;

/// Indices into the operations that were planned; one batch is one call of the communicator.
using Batch = std::vector<std::size_t>;

/// all_reduces of equal dtype, op and scales, and broadcasts of equal dtype and root, on one kind of device, go
/// together, up to `threshold` bytes per batch, also past others that stand between them. Batches are in the order of
/// their first operations.
std::vector<Batch> plan_fusion(std::span<const AgreedPtr> ready, std::size_t threshold);

}  // namespace cohort::named
