// MPI in this process: which plug-in, begun at the first world that asks for it, ended at the process's end. MPI is
// begun and ended on a thread of its own, as it demands, so that both have deadlines. A program that has begun MPI
// itself also ends it itself. One for the process, never destroyed; any thread.
#pragma once

#include "base/result.h"
#include "ext/mpi/endpoint.h"
#include "ext/mpi/plugin.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include <sys/types.h>

namespace cohort::mpi {

class Runtime {
 public:
  static Runtime& of_process();

  /// Begins MPI if nobody has. Collective over the processes of the launcher the first time. `patience`: at the
  /// process's end, how long the others may take to come to theirs.
  Result<std::shared_ptr<Endpoint>> endpoint(net::Deadline deadline, std::chrono::milliseconds patience);

 private:
  using Outcome = Result<std::shared_ptr<Endpoint>>;
  /// The way to MPI_Finalize: told to go, not all have come, all are there to call it, it has returned.
  enum class Ending { None, Wanted, Alone, Met, Over };

  void serve(net::Deadline deadline);
  void finalize(net::Deadline all_here);
  void step_to(Ending step);
  Outcome begin(net::Deadline deadline);
  void at_exit(int status);

  std::mutex mutex_;
  std::condition_variable changed_;
  Plugin plugin_;
  pid_t process_ = 0;
  bool begun_ = false;  // the thread has been started
  bool ours_ = false;   // this began MPI, and ends it
  Ending ending_ = Ending::None;
  std::chrono::milliseconds patience_{0};
  std::optional<Outcome> outcome_;
};

}  // namespace cohort::mpi
