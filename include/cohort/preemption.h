// Ends a preempted training job in good order: a signal (from Slurm before the time limit, from a cloud that takes the
// machine back) asks one rank, some or all to save and end; all ranks see the request at the same step. A Preemption
// owns handlers of its signals while it lives, and calls the handlers that were installed before. After it has asked
// the program to end, its handlers stay until the process ends. One thread at a time; ranks that are threads of one
// process each have their own.
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
  /// Default: the usual signal of Slurm's --signal, and the one that most systems send before they kill.
  std::vector<int> signals = {SIGUSR1, SIGTERM};
  /// The ranks ask each other in every N-th call of `requested` only, first in call N (N = `every`). A value above 1
  /// saves time if steps take less than a millisecond and ranks are on several hosts.
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
/// Make the Preemption early, since before that a signal has its ordinary effect, which is to end the process. (`cohort
/// run` holds SIGUSR1 back until a rank has a handler for it.) When SIGTERM ends a job of `cohort run`, a rank with a
/// Preemption may take --preempt-grace, instead of --grace, to end.
///
/// A rank that is ending may be signalled again, by another process that passes signals on or by a batch system that
/// repeats them. So after `requested` has returned true, or `received` has returned a signal, the handlers stay when
/// the object is destroyed. The process then has to end by itself, since SIGTERM does not end it.
class Preemption {
 public:
  /// Throws InvalidArgument for no signals, signals that cannot be handled, and `every` below 1.
  explicit Preemption(PreemptionOptions options = {});
  ~Preemption();
  Preemption(const Preemption&) = delete;
  Preemption& operator=(const Preemption&) = delete;

  /// Returns whether this job is to save and end. Collective, with the same answer on all ranks; ask once per step.
  /// After the first true, every call returns true without communication. Costs an all_reduce of 4 bytes, which is
  /// little for ranks that step together. `Communicator()` stands for a world of one. Throws what all_reduce throws.
  bool requested(Communicator& comm);

  /// The signal that made `requested` return true, the highest over all ranks; 0 before that.
  int signal() const noexcept;

  /// Returns the first of `signals` that this process has received since this object was made, or 0. Not collective.
  /// For programs without a communicator, and for decisions that concern only this rank.
  int received() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cohort
