// Trained parameters and buffers by name, as a framework's adapter shows them. Differences from the last look come as
// events, each of which has one meaning for a method of training. One thread at a time.
#pragma once

#include "train/step/given.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::step {

struct Shown {
  std::string name = {};
  const void* identity = nullptr;  ///< the tensor's; whoever shows it holds it, so that no other one gets its address
  std::string type = {}, device = {};  ///< as the framework names them
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
  TakenIn,  ///< trained as it is from this step on, and compared over the ranks first
  Rebased,  ///< nothing has to be done: what is kept of it goes on
  Refused,  ///< InvalidArgument, which names it
};

struct Meanings {
  Given<Meaning> frozen, thawed, added, removed, replaced, cast, moved;
  Meaning of(Event event) const noexcept;
};

class Trained {
 public:
  explicit Trained(const Meanings& meanings) : meanings_(meanings) {}

  /// Takes what is trained now. Returns the changes since the last call, in the order of names as shown; empty in the
  /// first call. Throws InvalidArgument, and changes nothing, where one is refused; "{advice}" ends the text.
  std::vector<Change> update(std::vector<Shown> now, const char* where, const char* advice);
  /// An adapter has looked, and all is as it was.
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
