// Ends training when a watched value (a validation loss) no longer improves, on all ranks in the same step: rank 0
// decides, and informs the others. One thread per rank. The state is a text, to be saved among a checkpoint's values.
#pragma once

#include <cohort/communicator.h>

#include <cstdint>
#include <limits>
#include <string>

namespace cohort {

/// Defines which values of a measure are better.
enum class BestMode : std::uint8_t {
  Min,  ///< lower values, as for a loss
  Max,  ///< higher values, as for an accuracy
};

struct EarlyStoppingOptions {
  int patience = 3;      ///< number of values in a row without improvement that ends training; at least 1
  double min_delta = 0;  ///< a value is an improvement if it is better than the best by more than this; at least 0
  BestMode mode = BestMode::Min;
};

///   cohort::EarlyStopping early({.patience = 3});
///   for (...) {
///     ...  // an epoch, and valid_loss over all of the validation data
///     const bool stop = early.should_stop(comm, valid_loss);
///     checkpoints.save(*net, &optimizer, {..., .values = {{"valid_loss", valid_loss}, {"early", early.state()}}});
///     if (stop) break;
///   }
class EarlyStopping {
 public:
  /// Throws InvalidArgument for a patience below 1, a min_delta below 0 or not finite.
  explicit EarlyStopping(EarlyStoppingOptions options = {});

  /// Returns whether to end training. Collective: the same answer on all ranks. Rank 0's options, state and `value`
  /// count; for a value that differs between ranks, pass the mean (all_reduce). NaN and infinite values are no
  /// improvement. Broadcasts 32 bytes, and throws what a broadcast throws. `Communicator()` stands for a world of one.
  bool should_stop(Communicator& comm, double value);

  /// `best` is the best value so far, NaN before the first; `waited` is the number of values since then without
  /// improvement. Both are the same on all ranks.
  double best() const noexcept { return now_.best; }
  int waited() const noexcept { return static_cast<int>(now_.waited); }
  /// True if the last value was an improvement.
  bool improved() const noexcept { return now_.improved != 0; }

  /// State to resume from, with the same bits, such as "mode=min best=0.375 waited=1".
  std::string state() const;
  /// Throws InvalidArgument, without changing anything, for a text that is no `state` of this mode.
  void load_state(const std::string& text);

 private:
  struct Now {
    double best = std::numeric_limits<double>::quiet_NaN();
    std::int64_t waited = 0;
    std::int64_t improved = 0;
    std::int64_t stop = 0;
  };
  EarlyStoppingOptions options_;
  Now now_;
};

}  // namespace cohort
