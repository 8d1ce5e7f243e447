// Whether a backward reduces, and how many samples stand behind what it reduces. Pure; one thread at a time.
#pragma once

#include <cstdint>
#include <optional>

namespace cohort::gradients {

/// no_sync, accumulation, and the counts that forwards declare. Nothing is derived from shapes or graphs: a rank that
/// declares nothing weighs as much as any other, as in torch's DistributedDataParallel.
class Accumulation {
 public:
  bool in_no_sync() const noexcept { return no_sync_depth_ > 0; }
  void enter_no_sync() noexcept { ++no_sync_depth_; }
  void leave_no_sync() noexcept { --no_sync_depth_; }

  /// Samples of a forward when the part that knows cannot say: an error if a backward is for that one alone.
  static constexpr std::int64_t kUnknown = -1;

  /// A forward with gradients on. `declared`: its number of samples, where a part that knows has said it. Several
  /// before one backward have one number: nothing says whose it would be.
  void add_forward(std::optional<std::int64_t> declared) noexcept;

  /// A backward begins. One that follows no new forward (a second one through a retained graph, a penalty) is of as
  /// many samples as the one before it.
  void begin() noexcept;
  /// It has ended: what it was for is reduced, or waits for the next one that reduces.
  void end() noexcept;
  /// A reduction without a backward: this rank has no samples but those accumulated.
  void begin_without() noexcept { sync_ = true; }

  // State of the backward under way, or of the last one.

  /// It reduces: outside of no_sync, and not only for forwards of no_sync.
  bool sync() const noexcept { return sync_; }
  /// Its rank has declared that it has no samples: what it yields is dropped.
  bool discards() const noexcept { return samples_ == 0; }
  /// There has been a forward since the last reduction.
  bool has_forward() const noexcept { return forwards_ != Forwards::None; }
  /// The samples declared for what is reduced; nullopt where none were.
  std::optional<std::int64_t> declared() const noexcept;
  /// Weight of what is reduced, in the average over ranks. 0: this rank has nothing.
  double weight() const noexcept { return declared() ? static_cast<double>(total_) : 1; }
  /// The weight of what is reduced is not known: some of it has a number of samples and some has none, forwards of one
  /// backward have different ones, or it is unknown.
  bool is_mixed() const noexcept { return conflict_ || (backwards_ == Backwards::Undeclared && total_ > 0); }

 private:
  /// Since the last reduction.
  enum class Forwards : std::uint8_t { None, Local, Synchronising };
  /// Since the last backward: of one number of samples, or of several.
  enum class Fresh : std::uint8_t { None, Alike, Conflicting };
  /// Since the last reduction: all with a number of samples (be it 0), or one without.
  enum class Backwards : std::uint8_t { None, Counted, Undeclared };

  int no_sync_depth_ = 0;
  Forwards forwards_ = Forwards::None;
  Fresh fresh_ = Fresh::None;
  std::optional<std::int64_t> fresh_samples_;
  std::optional<std::int64_t> samples_;  // of the backward under way, or the last one
  bool sync_ = false;                    // the same
  Backwards backwards_ = Backwards::None;
  bool conflict_ = false;   // in one of them
  std::int64_t total_ = 0;  // declared for what is reduced next
};

}  // namespace cohort::gradients
