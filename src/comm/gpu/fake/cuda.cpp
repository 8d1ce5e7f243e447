// For tests: a fake CUDA driver (libcuda.so.1). A GPU's memory is memory of this process. Nobody can read or write it
// at the address that programs get; copies use another address. Streams are threads. It delays, fails and hangs on
// demand. Of graphs, it knows only that a stream is captured, and what destroys a capture. FAKE_CUDA_GPUS: number of
// GPUs, at most the default four. FAKE_CUDA_KERNELS=0: refuses kernels. Any thread.
#include "comm/gpu/fake/kernels.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using cohort::comm::cuda::FoldArguments;
using cohort::comm::cuda::PretendedKernel;

constexpr int kGpus = 4;
constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidPtx = 218, kNotFound = 500, kNotReady = 600;
constexpr int kCaptureUnsupported = 900, kCaptureInvalidated = 901;
using Address = unsigned long long;

struct Memory {
  std::byte* behind;  // what can be read and written
  std::size_t bytes;
};
struct Flag {
  std::mutex mutex;
  std::condition_variable changed;
  bool set = false;
};

std::atomic<int> events{0};
struct Event {
  Event() { ++events; }
  ~Event() { --events; }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  std::mutex mutex;
  std::shared_ptr<Flag> recorded;  // null: not recorded, which counts as passed
};

class Stream;
/// All streams of the process. Never destroyed.
std::mutex& streams_mutex() {
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
}
std::vector<std::shared_ptr<Stream>>& streams() {
  static auto* const all = new std::vector<std::shared_ptr<Stream>>;
  return *all;
}

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  static Stream* make() {
    auto made = std::make_shared<Stream>();
    std::thread([made] { made->run(); }).detach();
    const std::lock_guard lock(streams_mutex());
    streams().push_back(made);
    return made.get();
  }
  /// Returns false if the stream has been ended.
  bool put(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    if (ended_) return false;
    works_.push_back(std::move(work));
    come_.notify_one();
    return true;
  }
  /// Its thread ends once it has done the work that it has.
  void end() {
    const auto self = shared_from_this();
    {
      const std::lock_guard lock(streams_mutex());
      std::erase(streams(), self);
    }
    const std::lock_guard lock(mutex_);
    ended_ = true;
    works_.push_back(nullptr);
    come_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        come_.wait(lock, [this] { return !works_.empty(); });
        work = std::move(works_.front());
        works_.pop_front();
      }
      if (!work) return;
      work();
    }
  }
  std::mutex mutex_;
  std::condition_variable come_;
  std::deque<std::function<void()>> works_;
  bool ended_ = false;
};

struct Driver {
  std::mutex mutex;
  std::map<Address, Memory> memories;
  std::map<const void*, std::size_t> pinned;
  std::list<std::string> modules;  // nobody unloads them
  bool pins = true;
  void (*watch)(int way, Address device, std::size_t bytes) = nullptr;
  int fail_status = 0;  // status with which the next copy fails; later events report it, too
  int broken = 0;
};

Driver& driver() {
  static Driver* const one = new Driver;
  return *one;
}

Stream& stream_of(void* stream) {
  static Stream* const usual = Stream::make();
  return stream == nullptr ? *usual : *static_cast<Stream*>(stream);
}

void wait_for_streams() {
  std::vector<std::shared_ptr<Stream>> all;
  {
    const std::lock_guard lock(streams_mutex());
    all = streams();
  }
  for (const auto& stream : all) {
    auto passed = std::make_shared<Flag>();
    const bool goes_on = stream->put([passed] {
      const std::lock_guard lock(passed->mutex);
      passed->set = true;
      passed->changed.notify_all();
    });
    std::unique_lock lock(passed->mutex);
    passed->changed.wait(lock, [&] { return !goes_on || passed->set; });
  }
}

/// The memory behind an address as a program knows it; null if it is not GPU memory.
std::byte* behind(Address address, std::size_t bytes) {
  const std::lock_guard lock(driver().mutex);
  auto found = driver().memories.upper_bound(address);
  if (found == driver().memories.begin()) return nullptr;
  --found;
  const std::size_t offset = address - found->first;
  if (offset > found->second.bytes || bytes > found->second.bytes - offset) return nullptr;
  return found->second.behind + offset;
}

/// Maps the file as memory of a GPU.
bool map(int from, std::size_t bytes, Address* address) {
  void* const seen = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, from, 0);
  void* const used = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, from, 0);
  if (seen == MAP_FAILED || used == MAP_FAILED) return false;
  *address = reinterpret_cast<Address>(seen);
  const std::lock_guard lock(driver().mutex);
  driver().memories[*address] = {static_cast<std::byte*>(used), bytes};
  return true;
}

std::size_t pages(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// Capture, as in CU_STREAM_CAPTURE_MODE_GLOBAL. While a stream is captured, nothing that is put into it is done,
// nothing can be captured here, and threads without relaxed mode may not query, allocate, free or pin.
std::atomic<void*> captured{nullptr};  // a stream
std::atomic<bool> capture_is_whole{true};
constexpr int kGlobal = 0, kRelaxed = 2;
thread_local int capture_mode = kGlobal;

/// Invalidates the capture under way if `does`; returns whether there was one.
bool destroys(bool does) {
  if (!does || captured == nullptr) return false;
  capture_is_whole = false;
  return true;
}
bool is_prohibited() { return destroys(capture_mode != kRelaxed); }
bool is_captured(void* stream) { return destroys(stream != nullptr && stream == captured); }

std::atomic<int> folds{0}, looks{0};

enum Way { kToHost, kToDevice, kWithin };

int copy(void* to, const void* from, std::size_t bytes, void* stream, Way way, Address device) {
  {
    const std::lock_guard lock(driver().mutex);
    if (driver().fail_status != 0) driver().broken = std::exchange(driver().fail_status, 0);
    if (driver().broken != 0) return driver().broken;
  }
  if (to == nullptr || from == nullptr) return kInvalidValue;
  stream_of(stream).put([=] {
    void (*watch)(int, Address, std::size_t) = nullptr;
    {
      const std::lock_guard lock(driver().mutex);
      watch = driver().watch;
    }
    if (watch != nullptr) watch(way, device, bytes);
    std::memcpy(to, from, bytes);
  });
  return kSuccess;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return kSuccess; }
int cuDriverGetVersion(int* version) {
  *version = 12040;
  return kSuccess;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == kOutOfMemory ? "out of memory" : status == kInvalidValue ? "invalid argument" : "fake failure";
  return kSuccess;
}
int cuDeviceGetCount(int* count) {
  const char* const asked = std::getenv("FAKE_CUDA_GPUS");
  *count = asked != nullptr ? std::min(std::atoi(asked), kGpus) : kGpus;
  return kSuccess;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  static int contexts[kGpus];
  *context = &contexts[device];
  return kSuccess;
}
int cuDeviceGetUuid(void* uuid, int device) {
  std::memset(uuid, 0, 16);
  *static_cast<unsigned char*>(uuid) = static_cast<unsigned char>(device + 1);
  return kSuccess;
}
int cuCtxPushCurrent_v2(void*) { return kSuccess; }
int cuCtxPopCurrent_v2(void**) { return kSuccess; }

int cuMemAlloc_v2(Address* address, std::size_t bytes) {
  if (is_prohibited()) return kCaptureUnsupported;
  const std::size_t size = pages(bytes);
  const int fd = ::memfd_create("fake-gpu", MFD_CLOEXEC);
  const bool mapped = fd >= 0 && ::ftruncate(fd, static_cast<off_t>(size)) == 0 && map(fd, size, address);
  if (fd >= 0) ::close(fd);
  return mapped ? kSuccess : kOutOfMemory;
}
int cuMemFree_v2(Address address) {
  if (is_prohibited()) return kCaptureUnsupported;
  wait_for_streams();  // like the real driver, since work under way may use the memory
  const std::lock_guard lock(driver().mutex);
  const auto found = driver().memories.find(address);
  if (found == driver().memories.end()) return kInvalidValue;
  ::munmap(reinterpret_cast<void*>(address), found->second.bytes);
  ::munmap(found->second.behind, found->second.bytes);
  driver().memories.erase(found);
  return kSuccess;
}
int cuMemsetD8Async(Address address, unsigned char value, std::size_t bytes, void* stream) {
  std::byte* const memory = behind(address, bytes);
  if (memory == nullptr) return kInvalidValue;
  stream_of(stream).put([memory, value, bytes] { std::memset(memory, value, bytes); });
  return kSuccess;
}
int cuMemHostRegister_v2(void* host, std::size_t bytes, unsigned) {
  if (is_prohibited()) return kCaptureUnsupported;
  const std::lock_guard lock(driver().mutex);
  if (!driver().pins) return kOutOfMemory;
  driver().pinned[host] = bytes;
  return kSuccess;
}
int cuMemHostUnregister(void* host) {
  const std::lock_guard lock(driver().mutex);
  return driver().pinned.erase(host) == 1 ? kSuccess : kInvalidValue;
}

int cuMemcpyDtoHAsync_v2(void* host, Address device, std::size_t bytes, void* stream) {
  return copy(host, behind(device, bytes), bytes, stream, kToHost, device);
}
int cuMemcpyHtoDAsync_v2(Address device, const void* host, std::size_t bytes, void* stream) {
  return copy(behind(device, bytes), host, bytes, stream, kToDevice, device);
}
int cuMemcpyDtoDAsync_v2(Address to, Address from, std::size_t bytes, void* stream) {
  return copy(behind(to, bytes), behind(from, bytes), bytes, stream, kWithin, to);
}

int cuStreamCreate(void** stream, unsigned) {
  *stream = Stream::make();
  return kSuccess;
}
int cuStreamDestroy_v2(void* stream) {
  static_cast<Stream*>(stream)->end();
  return kSuccess;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  if (is_captured(stream)) return kCaptureUnsupported;
  auto* const one = static_cast<Event*>(event);
  std::shared_ptr<Flag> flag;
  {
    const std::lock_guard lock(one->mutex);
    flag = one->recorded;
  }
  if (!flag) return kSuccess;
  stream_of(stream).put([flag] {
    std::unique_lock lock(flag->mutex);
    flag->changed.wait(lock, [&] { return flag->set; });
  });
  return kSuccess;
}
int cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return kSuccess;
}
int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return kSuccess;
}
int cuEventRecord(void* event, void* stream) {
  if (is_captured(stream)) return kCaptureUnsupported;
  auto flag = std::make_shared<Flag>();
  {
    auto* const one = static_cast<Event*>(event);
    const std::lock_guard lock(one->mutex);
    one->recorded = flag;
  }
  stream_of(stream).put([flag] {
    {
      const std::lock_guard lock(flag->mutex);
      flag->set = true;
    }
    flag->changed.notify_all();
  });
  return kSuccess;
}
int cuEventQuery(void* event) {
  if (is_prohibited()) return kCaptureUnsupported;
  {
    const std::lock_guard lock(driver().mutex);
    if (driver().broken != 0) return driver().broken;
  }
  auto* const one = static_cast<Event*>(event);
  const std::lock_guard lock(one->mutex);
  if (!one->recorded) return kSuccess;
  const std::lock_guard inner(one->recorded->mutex);
  return one->recorded->set ? kSuccess : kNotReady;
}

int cuStreamIsCapturing(void* stream, int* state) {
  *state = stream == nullptr || stream != captured ? 0 : capture_is_whole ? 1 : 2;
  return kSuccess;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}
// Only one capture at a time.
int cuStreamBeginCapture_v2(void* stream, int mode) {
  if (stream == nullptr || mode != kGlobal || captured != nullptr) return kInvalidValue;
  capture_is_whole = true;
  captured = stream;
  return kSuccess;
}
int cuStreamEndCapture(void* stream, void** graph) {
  if (stream != captured) return kInvalidValue;
  captured = nullptr;
  *graph = nullptr;
  return capture_is_whole ? kSuccess : kCaptureInvalidated;
}

// Programs put their own work into a stream by this function; here that is kernels.
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  stream_of(stream).put([function, data] { function(data); });
  return kSuccess;
}

int cuDeviceGetAttribute(int* value, int, int) {
  *value = 1;
  return kSuccess;
}
int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
  const char* const takes = std::getenv("FAKE_CUDA_KERNELS");
  if (takes != nullptr && *takes == '0') return kInvalidPtx;
  const std::lock_guard lock(driver().mutex);
  *module = &driver().modules.emplace_back(static_cast<const char*>(image));
  return kSuccess;
}
int cuModuleGetFunction(void** kernel, void* module, const char* name) {
  *kernel = const_cast<PretendedKernel*>(cohort::comm::cuda::fake_kernel(name));
  const bool there = static_cast<std::string*>(module)->find(std::string(".entry ") + name + "(") != std::string::npos;
  return *kernel != nullptr && there ? kSuccess : kNotFound;
}
int cuLaunchKernel(void* kernel, unsigned blocks, unsigned, unsigned, unsigned per_block, unsigned, unsigned, unsigned,
                   void* stream, void** arguments, void**) {
  constexpr unsigned kLikeThreads = 3;  // run one after the other
  const auto& one = *static_cast<const PretendedKernel*>(kernel);
  FoldArguments job = *static_cast<const FoldArguments*>(arguments[0]);
  if (blocks == 0 || per_block == 0 || per_block > 1024) return kInvalidValue;
  if (job.count > 0) {
    const std::size_t bytes = job.count * one.part;
    const auto reach = [](auto& memory, std::size_t most) {
      memory = behind(reinterpret_cast<Address>(memory), most);
      return memory != nullptr;
    };
    if (!reach(job.output, one.folds ? bytes : 4)) return kInvalidValue;
    for (int k = 0; k < job.input_count; ++k) {
      if (!reach(job.inputs[k], bytes)) return kInvalidValue;
    }
  }
  if (job.count > 0) ++(one.folds ? folds : looks);
  stream_of(stream).put([&one, job] {
    for (unsigned own = 0; own < kLikeThreads; ++own) one.run(job, own, kLikeThreads);
  });
  return kSuccess;
}

/// Returns the address at which a kernel finds the memory that programs know by this address.
void* fake_cuda_memory(void* address) { return behind(reinterpret_cast<Address>(address), 1); }
/// The same for `bytes` bytes; null if they are not all memory of one GPU.
void* fake_cuda_bytes(const void* address, std::size_t bytes) {
  return behind(reinterpret_cast<Address>(address), bytes);
}
/// Bytes of GPU memory that this process holds.
std::size_t fake_cuda_allocated() {
  const std::lock_guard lock(driver().mutex);
  std::size_t all = 0;
  for (const auto& [address, memory] : driver().memories) all += memory.bytes;
  return all;
}
/// Number of events that it holds.
int fake_cuda_events() { return events; }
/// Number of folds by kernels in this process.
int fake_cuda_folds() { return folds; }
/// Number of searches for non-finite values by kernels in this process.
int fake_cuda_looks() { return looks; }
/// Sets whether memory of the host can be pinned from now on.
void fake_cuda_pins(bool pins) {
  const std::lock_guard lock(driver().mutex);
  driver().pins = pins;
}
/// Bytes of the host's memory that are pinned.
std::size_t fake_cuda_pinned() {
  const std::lock_guard lock(driver().mutex);
  std::size_t all = 0;
  for (const auto& [host, bytes] : driver().pinned) all += bytes;
  return all;
}
/// Sets a function that the stream's thread calls before each copy. `way`: 0 to the host, 1 to the device, 2 within it;
/// `device`: address on it.
void fake_cuda_watch(void (*watch)(int way, Address device, std::size_t bytes)) {
  const std::lock_guard lock(driver().mutex);
  driver().watch = watch;
}
/// The next copy fails with this status, and so does everything after it. 0: nothing fails any more.
void fake_cuda_fail(int status) {
  const std::lock_guard lock(driver().mutex);
  driver().fail_status = status;
  if (status == 0) driver().broken = 0;
}
}
