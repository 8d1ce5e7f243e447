// Trained parameters and buffers by name, as a framework's adapter reports them. Each change since the last report is
// an event, to which a method of training gives one meaning. One thread at a time.
#pragma once

#include "train/step/given.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::step {

struct Shown {
  std::string name = {};
  const void* identity = nullptr;      ///< the tensor's address; the adapter keeps the tensor, so the address is unique
  std::string type = {}, device = {};  ///< the framework's names for them
  std::vector<std::int64_t> sizes = {};
  bool requires_grad = true;
};

enum class Event : std::uint8_t { Frozen, Thawed, Added, Removed, Replaced, Cast, Moved };

struct Change {
  Event event;
  std::string name, from, to;
  std::string text() const;  ///< "'fc.weight' was cast from float32 to float16"
};

enum class Meaning : std::uint8_t {
  TakenIn,  ///< the parameter is compared over the ranks, and trained as it is from this step on
  Rebased,  ///< nothing has to be done: the parameter's kept state stays valid
  Refused,  ///< the change is an InvalidArgument error, which names the parameter
};

struct Meanings {
  Given<Meaning> frozen, thawed, added, removed, replaced, cast, moved;
  Meaning of(Event event) const noexcept;
};

class Trained {
 public:
  explicit Trained(const Meanings& meanings) : meanings_(meanings) {}

  /// Stores what is trained now. Returns the changes since the last call, in the order of `now`, then removals; none in
  /// the first call. Throws InvalidArgument, and changes nothing, if a change is refused; `advice` ends the text.
  std::vector<Change> update(std::vector<Shown> now, const char* where, const char* advice);
  /// Notes that an adapter has looked and found no change.
  void unchanged() noexcept { ++looks_; }
  const std::vector<Shown>& table() const noexcept { return table_; }
  std::int64_t looks() const noexcept { return looks_; }

 private:
  std::vector<Change> compare(const std::vector<Shown>& now) const;

  Meanings meanings_;
  std::vector<Shown> table_;
  std::int64_t looks_ = 0;
};

}  // namespace cohort::step
