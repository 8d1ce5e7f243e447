// Memory that a collective reads or writes: a pointer, a count, a type and a device. A Buffer does not own its memory;
// the caller keeps it alive and does not touch it until the operation's Work is done.
#pragma once

#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace cohort {

enum class DeviceType : std::uint8_t { CPU = 0, CUDA = 1 };

/// A C++ type that is a DType's element.
template <class T>
concept Element = requires {
  DTypeOf<std::remove_const_t<T>>::value;
};

/// The device that holds memory.
struct Device {
  DeviceType type = DeviceType::CPU;
  int index = -1;  ///< a GPU's number among those that this process sees, as CUDA counts them
  /// The GPU's CUstream that makes or uses the memory's contents; an operation runs after all work given to that stream
  /// so far. Null: the default stream. Work started on any stream after the operation is done runs after the operation.
  void* stream = nullptr;
};

/// Elements to be read.
struct ConstBuffer {
  const void* data = nullptr;
  std::int64_t count = 0;  ///< elements, not bytes
  DType dtype = DType::Float32;
  Device device = {};

  ConstBuffer() = default;
  ConstBuffer(const void* pointer, std::int64_t elements, DType type, Device where = {})
      : data(pointer), count(elements), dtype(type), device(where) {}
  template <Element T, std::size_t Extent>
  ConstBuffer(std::span<T, Extent> values)  // NOLINT(google-explicit-constructor): `all_reduce(span)` should read well
      : data(values.data()),
        count(static_cast<std::int64_t>(values.size())),
        dtype(DTypeOf<std::remove_const_t<T>>::value) {}

  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count) * size_of(dtype); }
};

/// Elements to be written, or read and written.
struct Buffer {
  void* data = nullptr;
  std::int64_t count = 0;  ///< elements, not bytes
  DType dtype = DType::Float32;
  Device device = {};

  Buffer() = default;
  Buffer(void* pointer, std::int64_t elements, DType type, Device where = {})
      : data(pointer), count(elements), dtype(type), device(where) {}
  template <Element T, std::size_t Extent>
  requires(!std::is_const_v<T>) Buffer(std::span<T, Extent> values)  // NOLINT(google-explicit-constructor)
      : data(values.data()), count(static_cast<std::int64_t>(values.size())), dtype(DTypeOf<T>::value) {}

  operator ConstBuffer() const noexcept { return {data, count, dtype, device}; }  // NOLINT(google-explicit-constructor)
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count) * size_of(dtype); }
};

}  // namespace cohort
