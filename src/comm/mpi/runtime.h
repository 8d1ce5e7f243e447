// MPI in this process: which plug-in, begun at the first world that asks for it, ended at the process's end. MPI is
// begun and ended on a thread of its own, as it demands, so that both have deadlines. A program that has begun MPI
// itself also ends it itself. One for the process, never destroyed; any thread.
#pragma once

#include "base/result.h"
#include "comm/mpi/endpoint.h"
#include "comm/mpi/plugin.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include <sys/types.h>

namespace cohort::comm::mpi {

class Runtime {
 public:
  static Runtime& of_process();

  /// Begins MPI if nobody has. Collective over the processes of the launcher the first time. `patience`: at the
  /// process's end, how long the others may take to come to theirs.
  Result<std::shared_ptr<Endpoint>> endpoint(net::Deadline deadline, std::chrono::milliseconds patience);

 private:
  using Outcome = Result<std::shared_ptr<Endpoint>>;

  void serve(net::Deadline deadline);
  Outcome begin(net::Deadline deadline);
  void at_exit(int status);

  std::mutex mutex_;
  std::condition_variable changed_;
  Plugin plugin_;
  pid_t process_ = 0;
  bool begun_ = false;  // the thread has been started
  bool ours_ = false;   // this began MPI, and ends it
  bool finalize_ = false;
  bool finalized_ = false;
  std::chrono::milliseconds patience_{0};
  std::optional<Outcome> outcome_;
};

}  // namespace cohort::comm::mpi
