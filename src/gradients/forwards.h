// Forward passes that a backward may yet come to, and which of them the backward under way is for: whose samples are
// the weight of its gradients. A forward whose graph is gone does not count. One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace cohort::gradients {

/// One forward pass, until a backward has used it up. Hooks on its outputs hold it as long as its graph lives; each
/// language adds what it knows of them.
struct Forward {
  virtual ~Forward() = default;

  std::int64_t samples = 0;
  bool sync = true;
  bool hooked = false;   // its outputs tell when a backward begins
  bool fired = false;    // a backward has come to it
  bool counted = false;  // its samples are in the accumulated count
  bool reduced = false;  // a synchronising backward has used it up
};

class Forwards {
 public:
  /// Whether the backward under way will come to this forward's outputs; nullopt where only time will tell: what gets a
  /// gradient through them gets it after that. Asked of hooked ones only.
  using TakesPart = std::function<std::optional<bool>(const Forward&)>;

  bool in_no_sync() const noexcept { return no_sync_depth_ > 0; }
  void enter_no_sync() noexcept { ++no_sync_depth_; }
  void leave_no_sync() noexcept { --no_sync_depth_; }

  void add(const std::shared_ptr<Forward>& forward);

  /// A backward has begun: it has come to `first`, or (null) to a parameter. False if it belongs to no forward.
  bool begin(const std::shared_ptr<Forward>& first, const TakesPart& takes_part);
  /// The same backward has come to another one.
  void reach(const std::shared_ptr<Forward>& forward);
  /// It has ended: what it came to is used up, or its samples wait for the next one that synchronises.
  void end();
  /// A reduction without a backward.
  void begin_without();

  /// Of the backward under way. It reduces:
  bool sync() const noexcept { return sync_; }
  /// It has no samples: what it yields is dropped.
  bool discards() const noexcept { return discard_; }
  /// The weight of its gradients, with what was accumulated before; final once it is decided who takes part.
  std::int64_t samples() const noexcept { return samples_; }
  bool decided() const noexcept { return undecided_.empty(); }

 private:
  using List = std::vector<std::shared_ptr<Forward>>;
  List live() const;
  void count();

  int no_sync_depth_ = 0;
  std::vector<std::weak_ptr<Forward>> forwards_;
  List unhooked_;
  std::int64_t accumulated_ = 0;  // samples of passes in no_sync
  List taking_part_;              // in this backward,
  List undecided_;                // and what may turn out to
  bool led_ = false;              // by a forward: this backward
  bool sync_ = false;
  bool discard_ = false;
  std::int64_t samples_ = 0;
};

}  // namespace cohort::gradients
