// How training reaches the other ranks: a Communicator, and what a language needs around its operations (Python lets
// others run while it waits, and keeps what an operation reads when nobody waits any more). And a question to them,
// collective: do all hold the same values, to the bit? One thread at a time.
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

/// An operation under way. Its end does not depend on this object, but what it reads and writes may.
class Pending {
 public:
  virtual ~Pending() = default;
  /// Throws the operation's error.
  virtual void wait() = 0;
  /// As Work::synchronize.
  virtual void synchronize(const Device& stream) = 0;
  /// As Work::finite.
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
  virtual Memory allocate(std::size_t bytes) = 0;
  /// `keep`: what the operation works on. Lives until it has ended, also if the Pending is dropped before.
  virtual std::unique_ptr<Pending> start(const char* name, const Start& start, std::shared_ptr<const void> keep) = 0;

  /// `start(comm, span)` over values that this may give another home meanwhile; waits.
  template <class T, class Function>
  void run(const char* name, std::vector<T>& values, const Function& start) {
    const auto shared = std::make_shared<std::vector<T>>(std::move(values));
    this->start(
            name, [&](Communicator& comm) { return start(comm, std::span<T>(*shared)); }, shared)
        ->wait();
    values = std::move(*shared);
  }
  /// Origin that errors name.
  ErrorContext where(const char* operation) const;
};

/// Row r: what rank r brings, as many words on all ranks; empty for a rank that has joined. Collective; waits. A sum,
/// in which ranks that have joined take part without a word.
std::vector<std::vector<std::uint64_t>> gather_rows(Ranks& ranks, const std::vector<std::uint64_t>& mine);

std::shared_ptr<Ranks> ranks_of(Communicator comm);

/// The position of an element with this number, in a tensor of these sizes.
std::vector<std::int64_t> position_of(std::int64_t index, std::span<const std::int64_t> sizes);

/// Values of any type, one after the other in the order of the dimensions.
struct NamedValues {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::size_t element_size = 1;
  std::span<const std::uint8_t> bytes;
  std::function<std::string(std::int64_t)> text;  ///< of the element with this number; empty: its bits say it
};

/// Collective; waits. As <cohort/torch/same_parameters.h> says. `step` is for the message; -1: none.
void require_same_parameters(Ranks& ranks, std::span<const NamedValues> values, std::int64_t step);

}  // namespace cohort::step
