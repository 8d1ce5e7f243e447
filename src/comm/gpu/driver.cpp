#include "comm/gpu/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace cohort::comm::cuda {
namespace {

using Address = unsigned long long;   // CUdeviceptr
constexpr int kNotReady = 600;        // CUDA_ERROR_NOT_READY
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned kNoTiming = 2;     // CU_EVENT_DISABLE_TIMING
constexpr unsigned kPortable = 1;     // CU_MEMHOSTREGISTER_PORTABLE
constexpr int kProcessors = 16;       // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kErrorLog = 5;          // CU_JIT_ERROR_LOG_BUFFER
constexpr int kErrorLogSize = 6;      // CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
constexpr int kImplicit = 906;  // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: a stream that waits for this one is captured
constexpr int kRelaxed = 2;     // CU_STREAM_CAPTURE_MODE_RELAXED

// The driver's functions, as its manual has them (CUDA Driver API, 11 and newer).
struct Functions {
  int (*cuInit)(unsigned) = nullptr;
  int (*cuDriverGetVersion)(int*) = nullptr;
  int (*cuGetErrorString)(int, const char**) = nullptr;
  int (*cuDeviceGetCount)(int*) = nullptr;
  int (*cuDeviceGet)(int*, int) = nullptr;
  int (*cuDeviceGetUuid)(void*, int) = nullptr;
  int (*cuDevicePrimaryCtxRetain)(void**, int) = nullptr;
  int (*cuCtxPushCurrent_v2)(void*) = nullptr;
  int (*cuCtxPopCurrent_v2)(void**) = nullptr;
  int (*cuMemAlloc_v2)(Address*, std::size_t) = nullptr;
  int (*cuMemFree_v2)(Address) = nullptr;
  int (*cuMemsetD8Async)(Address, unsigned char, std::size_t, void*) = nullptr;
  int (*cuMemHostRegister_v2)(void*, std::size_t, unsigned) = nullptr;
  int (*cuMemHostUnregister)(void*) = nullptr;
  int (*cuMemcpyDtoHAsync_v2)(void*, Address, std::size_t, void*) = nullptr;
  int (*cuMemcpyHtoDAsync_v2)(Address, const void*, std::size_t, void*) = nullptr;
  int (*cuMemcpyDtoDAsync_v2)(Address, Address, std::size_t, void*) = nullptr;
  int (*cuStreamCreate)(void**, unsigned) = nullptr;
  int (*cuStreamDestroy_v2)(void*) = nullptr;
  int (*cuStreamWaitEvent)(void*, void*, unsigned) = nullptr;
  int (*cuEventCreate)(void**, unsigned) = nullptr;
  int (*cuEventDestroy_v2)(void*) = nullptr;
  int (*cuEventRecord)(void*, void*) = nullptr;
  int (*cuEventQuery)(void*) = nullptr;
  int (*cuDeviceGetAttribute)(int*, int, int) = nullptr;
  int (*cuModuleLoadDataEx)(void**, const void*, unsigned, int*, void**) = nullptr;
  int (*cuModuleGetFunction)(void**, void*, const char*) = nullptr;
  int (*cuLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                        void**) = nullptr;
  // Null if the driver lacks the function; it then cannot capture.
  int (*cuStreamIsCapturing)(void*, int*) = nullptr;
  int (*cuThreadExchangeStreamCaptureMode)(int*) = nullptr;
};

struct Library {
  Functions call;
  int gpus = 0;
  int version = 0;
  std::string trouble;  // why the driver cannot be used
};

std::string said(const Functions& call, int status) {
  const char* text = nullptr;
  if (call.cuGetErrorString == nullptr || call.cuGetErrorString(status, &text) != 0 || text == nullptr)
    return fmt::format("error {}", status);
  return fmt::format("{} (error {})", text, status);
}

Library load() {
  Library library;
  // Never unloaded: the driver's threads may run until the process ends.
  void* const handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = ::dlerror();
    library.trouble = fmt::format(
        "there is no CUDA driver: {} -- it comes with NVIDIA's driver for this GPU; in a container, the runtime has to "
        "bring it (--gpus all)",
        why != nullptr ? why : "libcuda.so.1 was not found");
    return library;
  }
  Functions& call = library.call;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(handle, name));
    if (function == nullptr && library.trouble.empty())
      library.trouble = fmt::format("libcuda.so.1 has no {} -- CUDA 11 or newer is needed", name);
  };
#define FIND(name) find(call.name, #name)
  FIND(cuInit);
  FIND(cuDriverGetVersion);
  FIND(cuGetErrorString);
  FIND(cuDeviceGetCount);
  FIND(cuDeviceGet);
  FIND(cuDeviceGetUuid);
  FIND(cuDevicePrimaryCtxRetain);
  FIND(cuCtxPushCurrent_v2);
  FIND(cuCtxPopCurrent_v2);
  FIND(cuMemAlloc_v2);
  FIND(cuMemFree_v2);
  FIND(cuMemsetD8Async);
  FIND(cuMemHostRegister_v2);
  FIND(cuMemHostUnregister);
  FIND(cuMemcpyDtoHAsync_v2);
  FIND(cuMemcpyHtoDAsync_v2);
  FIND(cuMemcpyDtoDAsync_v2);
  FIND(cuStreamCreate);
  FIND(cuStreamDestroy_v2);
  FIND(cuStreamWaitEvent);
  FIND(cuEventCreate);
  FIND(cuEventDestroy_v2);
  FIND(cuEventRecord);
  FIND(cuEventQuery);
  FIND(cuDeviceGetAttribute);
  FIND(cuModuleLoadDataEx);
  FIND(cuModuleGetFunction);
  FIND(cuLaunchKernel);
#undef FIND
  if (!library.trouble.empty()) return library;
  const auto find_if_there = [&](auto& function, const char* name) {
    if (void* const found = ::dlsym(handle, name); found != nullptr)
      function = reinterpret_cast<std::decay_t<decltype(function)>>(found);
  };
  // Since CUDA 11.4; the second version distinguishes parts of a GPU.
  find_if_there(call.cuDeviceGetUuid, "cuDeviceGetUuid_v2");
  find_if_there(call.cuStreamIsCapturing, "cuStreamIsCapturing");
  find_if_there(call.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  int status = call.cuInit(0);
  if (status == 0) status = call.cuDriverGetVersion(&library.version);
  if (status == 0) status = call.cuDeviceGetCount(&library.gpus);
  if (status != 0) library.trouble = fmt::format("the CUDA driver does not start: {}", said(call, status));
  return library;
}

const Library& library() {
  static const Library* const loaded = new Library(load());
  return *loaded;
}

void check(int status, std::string_view what) {
  if (status != 0) raise(ErrorCode::Internal, "{}: {}", what, said(library().call, status));
}

Address address(const void* memory) noexcept { return reinterpret_cast<Address>(memory); }

}  // namespace

namespace {

/// Sets this thread's capture mode and returns the old one. While another thread captures a graph, the driver would
/// refuse calls of this thread and end the capture, unless this thread's mode is relaxed.
int exchange_capture_mode(int mode) noexcept {
  const auto exchange = library().call.cuThreadExchangeStreamCaptureMode;
  if (exchange != nullptr) exchange(&mode);
  return mode;
}

}  // namespace

InGpu::InGpu(void* context) noexcept : status_(library().call.cuCtxPushCurrent_v2(context)) {
  if (status_ == 0) mode_ = exchange_capture_mode(kRelaxed);
}
InGpu::InGpu(const Gpu& gpu) : InGpu(gpu.context_) { check(status_, "cuCtxPushCurrent"); }
InGpu::~InGpu() {
  if (status_ != 0) return;
  exchange_capture_mode(mode_);
  void* before = nullptr;
  library().call.cuCtxPopCurrent_v2(&before);
}

Mark::~Mark() {
  if (const InGpu here(context_); here) library().call.cuEventDestroy_v2(event_);
}

Gpu& Gpu::at(int index) {
  static std::mutex mutex;
  static auto* const known = new std::map<int, Gpu*>();
  const std::lock_guard lock(mutex);
  if (const auto found = known->find(index); found != known->end()) return *found->second;
  const Library& driver = library();
  if (!driver.trouble.empty()) raise(ErrorCode::Unavailable, "cuda:{}: {}", index, driver.trouble);
  if (index < 0 || index >= driver.gpus) {
    raise(ErrorCode::InvalidArgument,
          "cuda:{}: this process sees {} GPU{} -- they count from 0, and CUDA_VISIBLE_DEVICES says which there are",
          index, driver.gpus, driver.gpus == 1 ? "" : "s");
  }
  return *known->emplace(index, new Gpu(index)).first->second;
}

Result<int> Gpu::count() {
  const Library& driver = library();
  if (!driver.trouble.empty()) return fail(ErrorCode::Unavailable, "{}", driver.trouble);
  return driver.gpus;
}

Result<std::string> Gpu::look() {
  const Library& driver = library();
  if (!driver.trouble.empty()) return fail(ErrorCode::Unavailable, "{}", driver.trouble);
  return fmt::format("CUDA {}.{}, {} GPU{}", driver.version / 1000, driver.version % 1000 / 10, driver.gpus,
                     driver.gpus == 1 ? "" : "s");
}

Gpu::Gpu(int index) : index_(index) {
  const Functions& call = library().call;
  check(call.cuDeviceGet(&device_, index), "cuDeviceGet");
  int processors = 1;
  check(call.cuDeviceGetAttribute(&processors, kProcessors, device_), "cuDeviceGetAttribute");
  processors_ = static_cast<unsigned>(std::max(processors, 1));
  check(call.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  const InGpu here(*this);
  check(call.cuStreamCreate(&to_host_, kNonBlocking), "cuStreamCreate");
  check(call.cuStreamCreate(&to_device_, kNonBlocking), "cuStreamCreate");
}

std::array<unsigned char, 16> Gpu::uuid() const {
  std::array<unsigned char, 16> found{};
  check(library().call.cuDeviceGetUuid(found.data(), device_), "cuDeviceGetUuid");
  return found;
}

void* Gpu::allocate(std::size_t bytes, std::chrono::steady_clock::time_point deadline) {
  const std::size_t asked = std::max<std::size_t>(bytes, 1);
  void* const memory = reserve(asked);
  // Does not use the default stream, since it waits for other streams, and some streams do not wait for it.
  const Stream stream = make_stream();
  zero(memory, asked, stream);
  wait(*mark(stream), deadline);
  end_stream(stream);
  return memory;
}

void Gpu::free(void* memory) noexcept {
  if (const InGpu here(context_); here) library().call.cuMemFree_v2(address(memory));
}

bool Gpu::pin(void* host, std::size_t bytes) noexcept {
  const InGpu here(context_);
  return here && library().call.cuMemHostRegister_v2(host, bytes, kPortable) == 0;
}

void Gpu::unpin(void* host) noexcept {
  if (const InGpu here(context_); here) library().call.cuMemHostUnregister(host);
}

bool Gpu::captures(Stream stream) const {
  const auto ask = library().call.cuStreamIsCapturing;
  if (ask == nullptr) return false;
  const InGpu here(*this);
  int state = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
  const int status = ask(stream, &state);
  return status == kImplicit || (status == 0 && state != 0);
}

void Gpu::refuse_capture(Stream stream, const std::function<std::string()>& doing) const {
  if (!captures(stream)) return;
  raise(ErrorCode::InvalidArgument,
        "{} -- its stream on cuda:{} is being captured into a CUDA graph, and ranks agree on each operation, which a "
        "graph's replay does not -- leave it out of what is captured: call it between replays; of a model, capture "
        "parts (torch.cuda.make_graphed_callables, before DistributedDataParallel wraps it), with torch.compile take "
        "another mode than \"reduce-overhead\" and \"max-autotune\"",
        doing(), index_);
}

MarkPtr Gpu::new_mark() {
  void* event = nullptr;
  check(library().call.cuEventCreate(&event, kNoTiming), "cuEventCreate");
  return std::make_shared<const Mark>(event, context_);
}

MarkPtr Gpu::mark(Stream stream) {
  const InGpu here(*this);
  MarkPtr made = new_mark();
  check(library().call.cuEventRecord(made->event(), stream), "cuEventRecord");
  return made;
}

template <class Copy>
MarkPtr Gpu::give(Stream stream, std::span<const Transfer> copies, std::span<const MarkPtr> after, const Copy& copy) {
  const Functions& call = library().call;
  const InGpu here(*this);
  for (const MarkPtr& mark : after) {
    if (mark) check(call.cuStreamWaitEvent(stream, mark->event(), 0), "cuStreamWaitEvent");
  }
  for (const Transfer& one : copies) copy(call, one);
  MarkPtr made = new_mark();
  check(call.cuEventRecord(made->event(), stream), "cuEventRecord");
  return made;
}

MarkPtr Gpu::copy_to_host(std::span<const Transfer> copies, std::span<const MarkPtr> after) {
  return give(to_host_, copies, after, [this](const Functions& call, const Transfer& one) {
    check(call.cuMemcpyDtoHAsync_v2(one.to, address(one.from), one.bytes, to_host_), "cuMemcpyDtoHAsync");
  });
}

MarkPtr Gpu::copy_to_device(std::span<const Transfer> copies, std::span<const MarkPtr> after) {
  return give(to_device_, copies, after, [this](const Functions& call, const Transfer& one) {
    check(call.cuMemcpyHtoDAsync_v2(address(one.to), one.from, one.bytes, to_device_), "cuMemcpyHtoDAsync");
  });
}

MarkPtr Gpu::copy_on_gpu(const Transfer& copy, std::span<const MarkPtr> after) {
  return give(to_device_, {&copy, 1}, after, [this](const Functions& call, const Transfer& one) {
    check(call.cuMemcpyDtoDAsync_v2(address(one.to), address(one.from), one.bytes, to_device_), "cuMemcpyDtoDAsync");
  });
}

MarkPtr Gpu::copy_to_host(void* host, const void* device, std::size_t bytes, const Mark& after) {
  const Transfer copy{host, device, bytes};
  const InGpu here(*this);
  check(library().call.cuStreamWaitEvent(to_host_, after.event(), 0), "cuStreamWaitEvent");
  return copy_to_host({&copy, 1}, {});
}

MarkPtr Gpu::copy_to_device(void* device, const void* host, std::size_t bytes, const Mark& after) {
  const Transfer copy{device, host, bytes};
  const InGpu here(*this);
  check(library().call.cuStreamWaitEvent(to_device_, after.event(), 0), "cuStreamWaitEvent");
  return copy_to_device({&copy, 1}, {});
}

Stream Gpu::make_stream() {
  const InGpu here(*this);
  Stream stream = nullptr;
  check(library().call.cuStreamCreate(&stream, kNonBlocking), "cuStreamCreate");
  return stream;
}

void Gpu::end_stream(Stream stream) noexcept {
  if (const InGpu here(context_); here) library().call.cuStreamDestroy_v2(stream);
}

void Gpu::copy_within(void* to, const void* from, std::size_t bytes, Stream stream) {
  const InGpu here(*this);
  check(library().call.cuMemcpyDtoDAsync_v2(address(to), address(from), bytes, stream), "cuMemcpyDtoDAsync");
}

void Gpu::zero(void* memory, std::size_t bytes, Stream stream) {
  const InGpu here(*this);
  check(library().call.cuMemsetD8Async(address(memory), 0, bytes, stream), "cuMemsetD8Async");
}

void Gpu::put_after(Stream stream, const Mark& mark) {
  const InGpu here(*this);
  check(library().call.cuStreamWaitEvent(stream, mark.event(), 0), "cuStreamWaitEvent");
}

void* Gpu::reserve(std::size_t bytes) {
  const Functions& call = library().call;
  const InGpu here(*this);
  Address memory = 0;
  if (const int status = call.cuMemAlloc_v2(&memory, bytes); status != 0)
    raise(ErrorCode::Unavailable, "{} bytes of cuda:{}: {}", bytes, index_, said(call, status));
  return reinterpret_cast<void*>(memory);
}

void* Gpu::load_kernels(const char* ptx) {
  const Functions& call = library().call;
  const InGpu here(*this);
  char text[1024] = {};
  int options[] = {kErrorLog, kErrorLogSize};
  void* values[] = {text, reinterpret_cast<void*>(sizeof text - 1)};
  void* kernels = nullptr;
  if (const int status = call.cuModuleLoadDataEx(&kernels, ptx, 2, options, values); status != 0)
    raise(ErrorCode::Unavailable, "kernels for cuda:{}: {} {}", index_, said(call, status), text);
  return kernels;
}

void* Gpu::find_kernel(void* kernels, const char* name) {
  const InGpu here(*this);
  void* kernel = nullptr;
  check(library().call.cuModuleGetFunction(&kernel, kernels, name), name);
  return kernel;
}

void Gpu::launch(void* kernel, unsigned blocks, unsigned per_block, const void* argument, Stream stream) {
  const InGpu here(*this);
  void* arguments[] = {const_cast<void*>(argument)};
  check(library().call.cuLaunchKernel(kernel, blocks, 1, 1, per_block, 1, 1, 0, stream, arguments, nullptr),
        "cuLaunchKernel");
}

bool Gpu::passed(const Mark& mark) const {
  const InGpu here(*this);
  const int status = library().call.cuEventQuery(mark.event());
  if (status != 0 && status != kNotReady)
    raise(ErrorCode::Internal, "cuda:{}: {}", index_, said(library().call, status));
  return status == 0;
}

void Gpu::wait(const Mark& mark, std::chrono::steady_clock::time_point deadline,
               const std::function<void()>& meanwhile) {
  // A copy takes less time than a sleep: some microseconds for a small buffer, a hundred for a piece of a large one.
  Pauses pauses(std::chrono::microseconds(100), std::chrono::microseconds(200));
  while (!passed(mark)) {
    if (std::chrono::steady_clock::now() >= deadline) {
      raise(ErrorCode::Timeout,
            "cuda:{}: its stream has not come to the operation by the deadline -- a kernel before it hangs, or takes "
            "longer than the operation's timeout",
            index_);
    }
    if (meanwhile) meanwhile();
    pauses.take();
  }
}

}  // namespace cohort::comm::cuda
