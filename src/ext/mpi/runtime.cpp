#include "ext/mpi/runtime.h"

#include "base/log.h"
#include "sys/thread.h"

#include <unistd.h>
#include <cstdlib>

#include <algorithm>
#include <utility>

namespace cohort::mpi {
namespace {

constexpr std::string_view kLevels[] = {"MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED",
                                        "MPI_THREAD_MULTIPLE"};

constexpr std::chrono::seconds kFinalizing{15};

std::string_view level_name(int level) { return kLevels[static_cast<std::size_t>(std::clamp(level, 0, 3))]; }

// For MPI, which takes no context. Set once, before MPI can call.
std::shared_ptr<Endpoint>& endpoint_of_process() {
  static auto* const endpoint = new std::shared_ptr<Endpoint>();
  return *endpoint;
}

void before_finalize() {
  if (endpoint_of_process()) endpoint_of_process()->close();
}

}  // namespace

Runtime& Runtime::of_process() {
  static auto* const runtime = new Runtime();
  return *runtime;
}

Result<std::shared_ptr<Endpoint>> Runtime::endpoint(net::Deadline deadline, std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  if (begun_ && process_ != ::getpid())
    return fail(ErrorCode::InvalidArgument, "MPI cannot be used in a forked child of the process that began it");
  if (!begun_) {
    auto plugin = plugin_of_process();
    if (!plugin) return tl::unexpected(plugin.error());
    plugin_ = *std::move(plugin);
    process_ = ::getpid();
    begun_ = true;
    // After what has been registered so far, so that it comes before it: the launcher's meeting place is left last.
    ::on_exit([](int status, void* runtime) { static_cast<Runtime*>(runtime)->at_exit(status); }, this);
    sys::start_without_signals([this, deadline] { serve(deadline); }).detach();
  }
  patience_ = std::max(patience_, patience);
  if (!changed_.wait_until(lock, deadline, [&] { return outcome_.has_value(); })) {
    return fail(ErrorCode::Timeout,
                "MPI ({}) did not begin in time: MPI_Init waits for all processes that mpirun or srun has started -- "
                "did one of them end, or not join?",
                plugin_.mpi->made_for);
  }
  return *outcome_;
}

void Runtime::serve(net::Deadline deadline) {
  Outcome outcome = begin(deadline);
  std::unique_lock lock(mutex_);
  if (outcome) endpoint_of_process() = *outcome;
  outcome_ = std::move(outcome);
  changed_.notify_all();
  if (!ours_) return;
  changed_.wait(lock, [&] { return ending_ == Ending::Wanted; });
  const net::Deadline all_here = net::deadline_in(patience_);
  lock.unlock();
  finalize(all_here);
}

void Runtime::finalize(net::Deadline all_here) {
  const bool met = endpoint_of_process()->meet(all_here);
  step_to(met ? Ending::Met : Ending::Alone);
  if (!met) return;
  const int code = plugin_.mpi->finalize();
  if (code != 0) log::warn("comm", "MPI_Finalize returned the error {}", code);
  step_to(Ending::Over);
}

void Runtime::step_to(Ending step) {
  const std::lock_guard lock(mutex_);
  ending_ = step;
  changed_.notify_all();
}

Runtime::Outcome Runtime::begin(net::Deadline deadline) {
  const CohortMpi& mpi = *plugin_.mpi;
  int state = COHORT_MPI_NOT_BEGUN;
  int level = COHORT_MPI_SINGLE;
  if (mpi.state(&state, &level) != 0)
    return fail(ErrorCode::Unavailable, "MPI ({}) does not say whether it is initialized", mpi.made_for);
  if (state == COHORT_MPI_OVER) {
    return fail(ErrorCode::Unavailable,
                "MPI ({}) has been finalized in this process and cannot begin again -- join before MPI_Finalize",
                mpi.made_for);
  }
  if (state == COHORT_MPI_RUNNING && level < COHORT_MPI_MULTIPLE) {
    return fail(ErrorCode::Unavailable,
                "the program has initialized MPI ({}) with {}, and the communicator's thread calls MPI beside the "
                "program's -- call MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave MPI to join",
                mpi.made_for, level_name(level));
  }
  if (state == COHORT_MPI_NOT_BEGUN) {
    if (const int code = mpi.initialize(&level); code != 0)
      return fail(ErrorCode::Unavailable, "MPI_Init of {} failed with the error {}", mpi.made_for, code);
    const std::lock_guard lock(mutex_);
    ours_ = true;
  }
  if (level < COHORT_MPI_SERIALIZED) {
    return fail(ErrorCode::Unavailable,
                "MPI ({}) gives {}, and MPI_THREAD_SERIALIZED is the least that a communicator needs: its thread calls "
                "MPI when nobody waits -- use an MPI that was built for threads, or the transport tcp",
                mpi.made_for, level_name(level));
  }
  if (const int code = mpi.before_finalize(before_finalize); code != 0)
    return fail(ErrorCode::Unavailable, "MPI ({}): MPI_Comm_set_attr failed with the error {}", mpi.made_for, code);
  auto endpoint = Endpoint::open(mpi, deadline);
  if (endpoint) {
    log::info("comm", "MPI process {} of {}: {} (plug-in {}, {}, {})", (*endpoint)->rank(), (*endpoint)->size(),
              (*endpoint)->library(), plugin_.path, level_name(level),
              ours_ ? "initialized by Cohort" : "initialized by the program");
  }
  return endpoint;
}

// MPI_Finalize is collective. After a failure it would wait for those that do not come: the launcher is left to see
// that this process ended out of order, and ends the others. Some do not return although all have come: MPICH over
// UCX's tcp before 4.2 (pmodels/mpich#6596). So it is known when all have, and the rest has a limit of its own.
void Runtime::at_exit(int status) {
  std::unique_lock lock(mutex_);
  if (process_ != ::getpid() || !ours_ || !outcome_ || !*outcome_ || ending_ != Ending::None) return;
  if (status != 0 || (**outcome_)->failed()) return;
  (**outcome_)->close();
  ending_ = Ending::Wanted;
  changed_.notify_all();
  changed_.wait_for(lock, patience_, [&] { return ending_ != Ending::Wanted; });
  if (ending_ < Ending::Met) {
    log::warn("comm", "not all ranks have come to MPI_Finalize (they may take {} ms); this process ends without it",
              patience_.count());
    return;
  }
  if (!changed_.wait_for(lock, kFinalizing, [&] { return ending_ == Ending::Over; })) {
    log::warn("comm",
              "MPI_Finalize of {} has not returned {} s after all ranks had come to it; this process ends without it, "
              "which its launcher may call a failure of the job -- the program itself has ended in order",
              plugin_.mpi->made_for, std::chrono::seconds(kFinalizing).count());
  }
}

}  // namespace cohort::mpi
