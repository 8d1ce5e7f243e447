// For tests: memory and streams of GPUs, and the errors that operations on them throw. `seen_by_kernels` works only
// with the fake ones (comm/gpu/fake). One thread per communicator.
#pragma once

#include "comm/gpu/driver.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace cohort::comm::testing {

/// A function from a loaded library.
template <class Function>
Function* function_of(const char* library, const char* name) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  return handle != nullptr ? reinterpret_cast<Function*>(::dlsym(handle, name)) : nullptr;
}
template <class Function>
Function* of_driver(const char* name) {
  return function_of<Function>("libcuda.so.1", name);
}
inline void launch(void* stream, void (*kernel)(void*), void* data) {
  const cuda::InGpu here(cuda::Gpu::at(0));
  EXPECT_EQ((of_driver<int(void*, void (*)(void*), void*)>("cuLaunchHostFunc")(stream, kernel, data)), 0);
}
/// Blocks a stream until the flag, a std::atomic<bool>, is true.
inline void wait_for_flag(void* flag) {
  while (!static_cast<std::atomic<bool>*>(flag)->load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
inline float* seen_by_kernels(void* memory) {
  return static_cast<float*>(of_driver<void*(void*)>("fake_cuda_memory")(memory));
}
inline void* new_stream() {
  const cuda::InGpu here(cuda::Gpu::at(0));
  void* stream = nullptr;
  EXPECT_EQ((of_driver<int(void**, unsigned)>("cuStreamCreate")(&stream, 0)), 0);
  return stream;
}

/// Floats in a GPU's memory.
class Floats {
 public:
  Floats(Communicator& comm, std::vector<float> values, int gpu = 0)
      : gpu_(gpu),
        count_(static_cast<std::int64_t>(values.size())),
        memory_(comm.allocate(values.size() * sizeof(float), {DeviceType::CUDA, gpu})) {
    if (count_ == 0) return;
    cuda::Gpu& on = cuda::Gpu::at(gpu_);
    on.wait(*on.copy_to_device(data(), values.data(), values.size() * sizeof(float), *on.mark(nullptr)), kNever);
  }
  Buffer buffer(void* stream = nullptr) const {
    return {memory_.data(), count_, DType::Float32, {DeviceType::CUDA, gpu_, stream}};
  }
  std::vector<float> values() const {
    std::vector<float> values(static_cast<std::size_t>(count_));
    if (count_ == 0) return values;
    cuda::Gpu& on = cuda::Gpu::at(gpu_);
    on.wait(*on.copy_to_host(values.data(), data(), values.size() * sizeof(float), *on.mark(nullptr)), kNever);
    return values;
  }
  void* data() const { return memory_.data(); }

 private:
  static constexpr auto kNever = std::chrono::steady_clock::time_point::max();
  int gpu_;
  std::int64_t count_;
  Memory memory_;
};
/// Makes floats on a GPU of the rank's own.
inline Floats floats(Communicator& comm, std::vector<float> values) {
  return {comm, std::move(values), comm.rank() % 4};
}

/// Text of the error that an operation throws.
template <class Body>
std::string refused(const Body& body, ErrorCode code) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}
inline bool has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

}  // namespace cohort::comm::testing
