// Interface through which training reaches the other ranks: a Communicator, and what a language has to do around its
// operations (Python releases the interpreter lock while it waits, and keeps an operation's memory alive when nobody
// waits any more). Also a collective check that all ranks hold the same values, to the bit. One thread at a time.
#pragma once

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cohort::step {

/// An operation under way. The operation ends even if this object is dropped, but its memory may depend on the object.
class Pending {
 public:
  virtual ~Pending() = default;
  /// Throws the operation's error.
  virtual void wait() = 0;
  /// Does what Work::synchronize does.
  virtual void synchronize(const Device& stream) = 0;
  /// Returns what Work::finite returns.
  virtual std::optional<bool> finite() const = 0;
};

class Ranks {
 public:
  using Start = std::function<Work(Communicator&)>;

  virtual ~Ranks() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int local_size() const = 0;
  virtual const std::string& host() const = 0;
  virtual std::vector<int> hosts() const = 0;  ///< as Communicator::hosts
  virtual Memory allocate(std::size_t bytes) = 0;
  /// `keep` owns the operation's memory. It lives until the operation ends, even if the Pending is dropped before.
  virtual std::unique_ptr<Pending> start(const char* name, const Start& start, std::shared_ptr<const void> keep) = 0;

  /// Runs `start(comm, span)` over the values, and waits. The values are moved to other memory meanwhile,
  /// and are 0 after an error.
  template <class T, class Function>
  void run(const char* name, std::vector<T>& values, const Function& start) {
    const auto shared = std::make_shared<std::vector<T>>(std::move(values));
    const auto pending = this->start(
        name, [&](Communicator& comm) { return start(comm, std::span<T>(*shared)); }, shared);
    try {
      pending->wait();
    } catch (...) {  // the operation may still use its memory
      values.resize(shared->size());
      throw;
    }
    values = std::move(*shared);
  }
  /// Returns the context that errors name: rank, host and operation.
  ErrorContext where(const char* operation) const;
};

/// Returns all ranks' words: row r has rank r's, and is empty if rank r has joined. All ranks pass equally many words.
/// Collective; waits. Implemented as a sum, in which ranks that have joined take part automatically; `tag` as in
/// AllReduceOptions.
std::vector<std::vector<std::uint64_t>> gather_rows(Ranks& ranks, const std::vector<std::uint64_t>& mine,
                                                    std::uint32_t tag = 0);

std::shared_ptr<Ranks> ranks_of(Communicator comm);

/// Returns the position of element number `index` in a tensor of these sizes.
std::vector<std::int64_t> position_of(std::int64_t index, std::span<const std::int64_t> sizes);

/// Values of any type, contiguous in row-major order.
struct NamedValues {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::size_t element_size = 1;
  std::span<const std::uint8_t> bytes;
  std::function<std::string(std::int64_t)> text;  ///< text of the element with this number; empty: its bits are shown
};

/// Collective; waits. See <cohort/torch/same_parameters.h>. `step` is for the message; -1: none.
void require_same_parameters(Ranks& ranks, std::span<const NamedValues> values, std::int64_t step);

}  // namespace cohort::step
