#include "launch/agent/gpu_meter.h"

#include "base/thread.h"

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace cohort::launch {

struct GpuMeter::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  bool ended = false;  // the thread has ended
  std::vector<GpuUse> use;
};

namespace {

constexpr std::chrono::seconds kEvery{2};
/// How long the destructor waits for a driver that does not answer.
constexpr std::chrono::milliseconds kMeterPatience{500};

/// NVML's functions, declared as in nvml.h.
class Nvml {
 public:
  /// Returns true if there is a driver.
  bool load() {
    void* const library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    return library != nullptr && find(library, "nvmlInit_v2", init_) &&
           find(library, "nvmlDeviceGetCount_v2", count_) && find(library, "nvmlDeviceGetHandleByIndex_v2", handle_) &&
           find(library, "nvmlDeviceGetUtilizationRates", rates_) &&
           find(library, "nvmlDeviceGetMemoryInfo", memory_) && init_() == 0;
  }
  std::vector<GpuUse> look() const {
    std::vector<GpuUse> all;
    unsigned count = 0;
    if (count_(&count) != 0) return all;
    for (unsigned i = 0; i < count; ++i) {
      GpuUse& use = all.emplace_back();
      void* device = nullptr;
      unsigned rates[2] = {0, 0};               // percentages for the processors and the memory interface
      unsigned long long bytes[3] = {0, 0, 0};  // total, free, used
      if (handle_(i, &device) != 0) continue;
      if (rates_(device, rates) == 0) use.percent = rates[0];
      if (memory_(device, bytes) == 0) use.memory = static_cast<std::int64_t>(bytes[2]);
    }
    return all;
  }

 private:
  template <class Function>
  static bool find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    return function != nullptr;
  }
  int (*init_)() = nullptr;
  int (*count_)(unsigned*) = nullptr;
  int (*handle_)(unsigned, void**) = nullptr;
  int (*rates_)(void*, unsigned*) = nullptr;
  int (*memory_)(void*, unsigned long long*) = nullptr;
};

}  // namespace

GpuMeter::GpuMeter() : state_(std::make_shared<State>()) {
  try {
    sys::start_without_signals([state = state_] {
      Nvml nvml;
      const bool has_driver = nvml.load();
      std::unique_lock lock(state->mutex);
      while (has_driver && !state->over) {
        lock.unlock();
        auto use = nvml.look();
        lock.lock();
        state->use = std::move(use);
        state->changed.wait_for(lock, kEvery, [&] { return state->over; });
      }
      state->ended = true;
      state->changed.notify_all();
    }).detach();
  } catch (const std::system_error&) {  // no thread could be started
    state_->ended = true;
  }
}

GpuMeter::~GpuMeter() {
  std::unique_lock lock(state_->mutex);
  state_->over = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, kMeterPatience, [this] { return state_->ended; });
}

std::vector<GpuUse> GpuMeter::use() const {
  const std::lock_guard lock(state_->mutex);
  return state_->use;
}

}  // namespace cohort::launch
