// Ends a preempted training job in good order: a signal (of Slurm before the time is over, of a cloud that takes the
// machine back) asks one rank, some or all of them to save and end; all see it at the same step. A Preemption owns
// handlers of its signals while it lives, and calls those that were there before it. Once it has asked the program to
// end they stay to the end of the process. One thread at a time; ranks that are threads of one process have one each.
#pragma once

#include <cohort/communicator.h>
#include <cohort/exit_status.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace cohort {

struct PreemptionOptions {
  /// Slurm's --signal, and what most systems send before they kill.
  std::vector<int> signals = {SIGUSR1, SIGTERM};
  /// Asks the other ranks at every so many-th call of `requested`, the first time at call number `every`. More than 1
  /// saves time if steps take less than a millisecond, and ranks are on several hosts.
  std::int64_t every = 1;
  /// Timeout of each question to the other ranks; default: the communicator's.
  std::optional<std::chrono::milliseconds> timeout = {};
};

///   cohort::Preemption preemption;
///   while (...) {
///     ...; optimizer.step();
///     if (preemption.requested(comm)) {
///       checkpoints.save(*net, &optimizer, {.step = step, .epoch = epoch, .sampler = sampler.state()});
///       return cohort::kRequeueStatus;  // from main
///     }
///   }
///
/// Make it early: before it is there a signal has its ordinary effect, which is to end the process. (Under `cohort
/// run`, SIGUSR1 waits until a rank has a handler for it.) Under `cohort run` a rank that has one is given
/// --preempt-grace instead of --grace when SIGTERM ends the job.
///
/// A rank that ends may be signalled once more, by another process that passes signals on or by a batch system that
/// wants to be sure: once `requested` has said yes, or `received` has named a signal, the handlers stay when the object
/// goes. Such a process ends by itself; SIGTERM does not end it any more.
class Preemption {
 public:
  /// Throws InvalidArgument for no signals, signals that cannot be handled, and `every` below 1.
  explicit Preemption(PreemptionOptions options = {});
  ~Preemption();
  Preemption(const Preemption&) = delete;
  Preemption& operator=(const Preemption&) = delete;

  /// Returns whether this job is to save and end. Collective, with the same answer on all ranks; ask once per step.
  /// Once the answer is yes it stays yes, and no rank is asked any more. An all_reduce of 4 bytes, which ranks that
  /// step together hardly notice. A communicator of no world (`Communicator()`) stands for a world of one. Throws what
  /// all_reduce throws.
  bool requested(Communicator& comm);

  /// The signal because of which `requested` said yes, the highest of all ranks'; 0 before that.
  int signal() const noexcept;

  /// Returns the first of `signals` that this process has received since this object was made, or 0. Not collective.
  /// For programs without a communicator, and for what only this rank has to know.
  int received() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cohort
