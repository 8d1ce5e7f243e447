// A thread that makes a communicator's NCCL calls, which block while NCCL connects ranks. Meanwhile the thread that
// runs operations checks on the other ranks, and abandons the blocked thread if one of them has died. One thread serves
// all calls, since a new thread for each call, as in NCCL's non-blocking mode, takes longer than a small sum. One call
// at a time, from one caller thread.
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
  /// Abandons a call that has not returned, and what it holds.
  ~NcclThread();
  NcclThread(const NcclThread&) = delete;
  NcclThread& operator=(const NcclThread&) = delete;

  /// Begins a call. The previous call has to be over.
  void make(Call call);
  bool over() const noexcept;
  /// Returns the result of the call, which has to be over. Throws Internal if the GPU has failed.
  NcclResult result() const;

 private:
  struct State;
  static void run(State& state, const Gpu& gpu) noexcept;

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace cohort::comm::cuda
