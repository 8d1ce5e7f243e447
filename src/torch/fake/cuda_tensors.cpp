// For tests: "cuda" tensors in a libtorch without CUDA, in memory of the fake driver (comm/gpu/fake). The CPU's
// operations run on copies of the tensors that they read and write. Loaded into a process once; any thread.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/ivalue.h>  // first, for clang 14
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#if TORCH_VERSION_MAJOR >= 2
#include <ATen/DeviceAccelerator.h>
#endif

#include <dlfcn.h>

#include <chrono>
#include <cstddef>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace {

template <class Function>
Function* of_driver(const char* name) {
  static void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  void* const found = library != nullptr ? ::dlsym(library, name) : nullptr;
  if (found == nullptr) throw std::runtime_error(std::string("no fake CUDA driver: ") + name);
  return reinterpret_cast<Function*>(found);
}

/// Waits until the default stream, which runs a program's kernels, has finished all its work.
void wait_for_default_stream() {
  void* event = nullptr;
  of_driver<int(void**, unsigned)>("cuEventCreate")(&event, 0);
  of_driver<int(void*, void*)>("cuEventRecord")(event, nullptr);
  while (of_driver<int(void*)>("cuEventQuery")(event) == 600)
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  of_driver<int(void*)>("cuEventDestroy_v2")(event);
}

// ---------------------------------------------------------------------------------------------------- memory

thread_local c10::DeviceIndex current = 0;

/// Keeps freed blocks for the next request of the same size, like libtorch's allocator, since the driver would wait for
/// all streams.
struct Blocks {
  using Kind = std::pair<int, std::size_t>;  // the GPU, and bytes
  std::mutex mutex;
  std::map<void*, Kind> kinds;
  std::map<Kind, std::vector<void*>> free;

  static Blocks& all() {
    static auto* const one = new Blocks;
    return *one;
  }
  void* take(std::size_t bytes) {
    const std::lock_guard lock(mutex);
    const Kind kind(current, bytes);
    std::vector<void*>& fitting = free[kind];
    if (!fitting.empty()) {
      void* const data = fitting.back();
      fitting.pop_back();
      return data;
    }
    unsigned long long address = 0;
    if (of_driver<int(unsigned long long*, std::size_t)>("cuMemAlloc_v2")(&address, bytes) != 0) {
      throw std::runtime_error("out of fake memory");
    }
    void* const data = reinterpret_cast<void*>(address);
    kinds[data] = kind;
    return data;
  }
  void give_back(void* data) {
    const std::lock_guard lock(mutex);
    free[kinds.at(data)].push_back(data);
  }
};

void free_memory(void* data) {
  if (data != nullptr) Blocks::all().give_back(data);
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr make(std::size_t bytes) const {
    void* const data = bytes > 0 ? Blocks::all().take(bytes) : nullptr;
    return {data, data, &free_memory, c10::Device(c10::kCUDA, current)};
  }
#if TORCH_VERSION_MAJOR < 2
  c10::DataPtr allocate(std::size_t bytes) const override { return make(bytes); }
#else
  c10::DataPtr allocate(std::size_t bytes) override { return make(bytes); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    auto* const behind = of_driver<void*(const void*, std::size_t)>("fake_cuda_bytes");
    std::memcpy(behind(to, bytes), behind(from, bytes), bytes);
  }
#endif
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
};

Allocator& allocator() {
  static auto* const one = new Allocator;
  return *one;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void* getStreamNativeHandle(const c10::Stream) const { return nullptr; }
  // Operations have ended when their call returns, so no event is ever waited for.
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getDefaultStream(device); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override {
    int count = 0;
    of_driver<int(int*)>("cuDeviceGetCount")(&count);
    return static_cast<c10::DeviceIndex>(count);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

/// Torch's DistributedDataParallel needs a timer of the device.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device) {}
  c10::optional<std::int64_t> measureDifference(Event, Event) override { return {}; }
};
using c10d::RegistererTimerRegistry;
using c10d::TimerRegistry;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, Timer);

/// Stands for a GPU's generator, whose state has another size than the CPU's.
const at::Generator& generator_of(c10::DeviceIndex index) {
  static auto* const all = new std::map<c10::DeviceIndex, at::Generator>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return all->try_emplace(index, at::detail::createCPUGenerator()).first->second;
}

// Reports that there is CUDA, as libtorch asks before it looks for streams.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return Guard().deviceCount(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
#if TORCH_VERSION_MAJOR < 2
  void initCUDA() const override {}
  bool isPinnedPtr(void*) const override { return true; }
  bool hasPrimaryContext(std::int64_t) const override { return true; }
  const at::Generator& getDefaultCUDAGenerator(c10::DeviceIndex index) const override { return generator_of(index); }
#else
  void init() const override {}
  bool isPinnedPtr(const void*) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generator_of(index); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
#endif
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

#if TORCH_VERSION_MAJOR >= 2
}  // namespace

// Replaces libtorch's function, whose result depends on libtorch's build.
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::kCUDA; }
}  // namespace at::accelerator

namespace {
#endif

// ---------------------------------------------------------------------------------------------------- tensors

at::ScalarType type_of(c10::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}

/// Makes new tensors on the named device.
struct On {
  explicit On(c10::optional<at::Device> device) : before(current) {
    if (device && device->has_index()) current = device->index();
  }
  ~On() { current = before; }
  c10::DeviceIndex before;
};

at::Tensor empty(at::IntArrayRef size, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                 c10::optional<at::Device> device, c10::optional<bool>, c10::optional<at::MemoryFormat> format) {
  const On on(device);
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), type_of(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, c10::optional<at::ScalarType> dtype,
                         c10::optional<at::Layout>, c10::optional<at::Device> device, c10::optional<bool>) {
  const On on(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           type_of(dtype));
}

/// Returns a host tensor over the memory that kernels would see.
at::Tensor seen(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor.detach();
  const at::TensorOptions type = at::TensorOptions().dtype(tensor.dtype());
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), type);
  std::int64_t extent = 1;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) extent += (tensor.size(d) - 1) * tensor.stride(d);
  auto* const behind = of_driver<void*(const void*, std::size_t)>("fake_cuda_bytes");
  void* const data = behind(tensor.data_ptr(), static_cast<std::size_t>(extent) * tensor.element_size());
  if (data == nullptr) throw std::runtime_error("a tensor of cuda whose memory is no GPU's");
  return at::from_blob(data, tensor.sizes(), tensor.strides(), type);
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool /*non_blocking*/) {
  wait_for_default_stream();
  seen(self).copy_(seen(from));
  return self;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, c10::optional<at::MemoryFormat>) {
  auto* const impl = self.unsafeGetTensorImpl();
  std::int64_t count = impl->storage_offset();
  std::int64_t elements = 1;
  for (const std::int64_t length : size) elements *= length;
  const auto bytes = static_cast<std::size_t>(count + elements) * self.element_size();
  c10::StorageImpl& storage = *impl->storage().unsafeGetStorageImpl();
  if (storage.nbytes() < bytes) {
    const at::Tensor before = self.numel() > 0 ? seen(self).clone() : at::Tensor();
    storage.set_data_ptr(allocator().make(bytes));
    storage.set_nbytes(bytes);
    if (before.defined()) seen(self).copy_(before);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  at::Tensor written = to;
  return copy(written, self, false);
}

// Needs its own function, since the schema does not say that running statistics are written.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input,
                                                          const c10::optional<at::Tensor>& weight,
                                                          const c10::optional<at::Tensor>& bias,
                                                          const c10::optional<at::Tensor>& mean,
                                                          const c10::optional<at::Tensor>& variance, bool training,
                                                          double momentum, double epsilon) {
  wait_for_default_stream();
  const auto seen_if = [](const c10::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? c10::optional<at::Tensor>(seen(*tensor)) : c10::nullopt;
  };
  auto [output, saved_mean, saved_variance] = at::native_batch_norm(
      seen(input), seen_if(weight), seen_if(bias), seen_if(mean), seen_if(variance), training, momentum, epsilon);
  return {output.to(input.device()), saved_mean.to(input.device()), saved_variance.to(input.device())};
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("native_batch_norm", TORCH_FN(batch_norm));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view)));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
}

#if TORCH_VERSION_MAJOR >= 2
// Operations that make sparse tensors from their parts, and return the parts.
TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(at::native::new_with_dims_and_tensor_sparse_symint));
  m.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  m.impl("_values", TORCH_FN(at::native::_values_sparse));
  m.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  m.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  m.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  m.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  m.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
}
#endif

const bool kRegistered = [] {
  c10::SetAllocator(c10::kCUDA, &allocator());
  return true;
}();

}  // namespace
