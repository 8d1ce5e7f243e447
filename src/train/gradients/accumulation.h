// Decides whether a backward reduces, and counts the samples of the reduced gradients. Pure; one thread at a time.
#pragma once

#include <cstdint>
#include <optional>

namespace cohort::gradients {

/// State of no_sync, of accumulation, and of the sample counts that forwards declare. Nothing is derived from shapes or
/// graphs, so a rank that declares no count weighs as much as any other, as in torch's DistributedDataParallel.
class Accumulation {
 public:
  bool in_no_sync() const noexcept { return no_sync_depth_ > 0; }
  void enter_no_sync() noexcept { ++no_sync_depth_; }
  void leave_no_sync() noexcept { --no_sync_depth_; }

  /// Number of samples of a forward whose sampler does not know it; an error if a backward is for that forward only.
  static constexpr std::int64_t kUnknown = -1;

  /// Notes a forward with gradients on. `declared`: its number of samples, if it is known. All forwards before one
  /// backward have to declare the same number, since a backward does not tell which forward it is for.
  void add_forward(std::optional<std::int64_t> declared) noexcept;

  /// Makes the samples of a virtual rank count once, however many micro-batches it is divided into: a sampler declares
  /// the whole batch for each of them.
  void count_parts_once() noexcept { counts_once_ = true; }

  /// Begins a backward. A backward that follows no new forward (a second one through a retained graph, a penalty) has
  /// as many samples as the backward before it. `last`: false for the virtual ranks before this rank's last.
  void begin(bool last = true) noexcept;
  /// Ends the backward: its gradients have been reduced, or wait for the next backward that reduces.
  void end() noexcept;
  /// Begins a reduction without a backward, when this rank has only the samples accumulated before.
  void begin_without(bool last = true) noexcept {
    ends_part_ = true;
    sync_ = last;
  }
  /// Returns to an earlier state, taken between backwards, except for no_sync and what the last backward was.
  void go_back_to(const Accumulation& earlier) noexcept;

  // State of the backward under way, or of the last one.

  /// True if the backward reduces because it is outside of no_sync and had a forward outside of no_sync before it.
  bool sync() const noexcept { return sync_; }
  /// True if the backward ends its part of the step: the same as sync(), except for virtual ranks before the last.
  bool ends_part() const noexcept { return ends_part_; }
  /// True if this rank has declared 0 samples, so that the backward's gradients are dropped.
  bool discards() const noexcept { return samples_ == 0; }
  /// True if there has been a forward since the last reduction, or with virtual ranks since the last part has ended.
  bool has_forward() const noexcept { return forwards_ != Forwards::None; }
  /// Like has_forward, but for the whole step, so also true if an earlier part has had its forward.
  bool follows_forward() const noexcept { return has_forward() || earlier_ != Backwards::None; }
  /// Returns the samples declared for the gradients that are reduced; nullopt if none were declared.
  std::optional<std::int64_t> declared() const noexcept;
  /// Weight of this rank's gradients in the average over the ranks. 0: this rank has no samples.
  double weight() const noexcept { return earlier_weight_ + part_weight(); }
  /// Weight of the part of the step under way, i.e. of one virtual rank. Equals weight() without virtual ranks.
  double part_weight() const noexcept {
    return backwards_ == Backwards::Undeclared ? 1 : static_cast<double>(total_ - earlier_total_);
  }
  /// Like part_weight, but as it will be after the backward for which forwards wait.
  double coming_weight() const noexcept;
  /// True if the weight is not known: some backwards have a number of samples and others have none, forwards of one
  /// backward declared different numbers, or a number is kUnknown.
  bool is_mixed() const noexcept { return conflict_ || (!declared() && total_ > 0); }

 private:
  /// Kind of the forwards since the last reduction.
  enum class Forwards : std::uint8_t { None, Local, Synchronising };
  /// Forwards since the last backward: all with the same number of samples, or not.
  enum class Fresh : std::uint8_t { None, Alike, Conflicting };
  /// Backwards of a part: all with a number of samples (even 0), or at least one without.
  enum class Backwards : std::uint8_t { None, Counted, Undeclared };

  int no_sync_depth_ = 0;
  Forwards forwards_ = Forwards::None;
  Fresh fresh_ = Fresh::None;
  std::optional<std::int64_t> fresh_samples_;
  std::optional<std::int64_t> samples_;  // samples of the backward under way, or of the last one
  bool sync_ = false;                    // true if that backward reduces
  bool ends_part_ = false;
  bool counts_once_ = false;
  Backwards backwards_ = Backwards::None;  // backwards of this part, and of the parts before it
  Backwards earlier_ = Backwards::None;
  double earlier_weight_ = 0;  // weight and samples of the parts before this one
  std::int64_t earlier_total_ = 0;
  bool conflict_ = false;   // true if forwards of a backward since the last reduction conflicted
  std::int64_t total_ = 0;  // samples declared for the next reduction
};

}  // namespace cohort::gradients
