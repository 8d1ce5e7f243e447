#include "comm/gpu/nccl_thread.h"

#include "base/thread.h"
#include "comm/api/work_state.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

namespace cohort::comm::cuda {
namespace {

/// How long the thread spins after a call, so that it is awake for the next of a series of small operations.
constexpr std::chrono::microseconds kAwake{50};

}  // namespace

struct NcclThread::State {
  std::mutex mutex;
  std::condition_variable come;
  std::atomic<bool> called{false};
  std::atomic<bool> over{true};
  bool ends = false;
  Call call;
  NcclResult result = NcclResult::Success;
  std::exception_ptr failed;
};

NcclThread::NcclThread(const Gpu& gpu) : state_(std::make_shared<State>()) {
  thread_ = sys::start_without_signals([state = state_, &gpu] { run(*state, gpu); });
}

NcclThread::~NcclThread() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->ends = true;
  }
  state_->come.notify_one();
  if (over() && thread_.get_id() != std::this_thread::get_id()) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void NcclThread::make(Call call) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->call = std::move(call);
    state_->over.store(false, std::memory_order_relaxed);
    state_->called.store(true, std::memory_order_release);
  }
  state_->come.notify_one();
}

bool NcclThread::over() const noexcept { return state_->over.load(std::memory_order_acquire); }

NcclResult NcclThread::result() const {
  if (state_->failed) std::rethrow_exception(state_->failed);
  return state_->result;
}

void NcclThread::run(State& state, const Gpu& gpu) noexcept {
  ::pthread_setname_np(::pthread_self(), "cohort-nccl");
  times::leave_out_this_thread();
  while (true) {
    const auto sleeps = std::chrono::steady_clock::now() + kAwake;
    while (!state.called.load(std::memory_order_acquire) && std::chrono::steady_clock::now() < sleeps)
      std::this_thread::yield();
    Call call;
    {
      std::unique_lock lock(state.mutex);
      state.come.wait(lock, [&] { return state.called.load(std::memory_order_relaxed) || state.ends; });
      if (!state.called.load(std::memory_order_relaxed)) return;
      state.called.store(false, std::memory_order_relaxed);
      call = std::exchange(state.call, nullptr);
    }
    std::exception_ptr failed;
    try {
      const InGpu here(gpu);
      state.result = call();
    } catch (...) {
      failed = std::current_exception();
    }
    state.failed = std::move(failed);
    call = nullptr;  // frees what the call holds before its end is reported
    state.over.store(true, std::memory_order_release);
  }
}

}  // namespace cohort::comm::cuda
