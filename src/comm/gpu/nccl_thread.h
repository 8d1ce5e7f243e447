// The thread that makes a communicator's calls of NCCL. They block where NCCL connects ranks: so the thread that runs
// operations checks on the other ranks meanwhile, and leaves the thread where it is once one of them has died. It is
// one for all calls, since starting one for each, as NCCL does where it is told not to block, takes longer than a small
// sum. One call at a time, by one thread.
#pragma once

#include "comm/gpu/driver.h"
#include "comm/gpu/nccl.h"

#include <functional>
#include <memory>
#include <thread>

namespace cohort::comm::cuda {

class NcclThread {
 public:
  using Call = std::function<NcclResult()>;

  /// Calls are made in the context of `gpu`. Throws std::system_error.
  explicit NcclThread(const Gpu& gpu);
  /// A call that has not returned is left to itself, with what it holds.
  ~NcclThread();
  NcclThread(const NcclThread&) = delete;
  NcclThread& operator=(const NcclThread&) = delete;

  /// The call before is over.
  void make(Call call);
  bool over() const noexcept;
  /// Result of the call that is over. Throws Internal if the GPU has failed.
  NcclResult result() const;

 private:
  struct State;
  static void run(State& state, const Gpu& gpu) noexcept;

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace cohort::comm::cuda
