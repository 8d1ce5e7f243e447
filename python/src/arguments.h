// Converts Python's arguments to the core's options: seconds, names of reductions, and element types of torch, of the
// buffer protocol and of DLPack, which become a DType. Needs the GIL.
#pragma once

#include <cohort/dtype.h>

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cohort::python {

/// Converts seconds, a number or a datetime.timedelta, rounded up to milliseconds; None is nullopt. Throws
/// InvalidArgument.
std::optional<std::chrono::milliseconds> milliseconds_of(pybind11::handle seconds, const char* operation);

/// Converts a ReduceOp or its name ("sum", "Sum"). Throws InvalidArgument.
ReduceOp reduce_op_of(pybind11::handle op, const char* operation);

// The part of DLPack's C structures that is needed to read a tensor, as defined by https://dmlc.github.io/dlpack (ABI
// versions 0 and 1). Plain data.
namespace dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kRocmHost = 11 };
enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kComplex = 5, kBool = 6 };
inline constexpr std::uint64_t kReadOnly = 1;

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: contiguous
  std::uint64_t byte_offset;
};

/// The contents of a capsule named "dltensor".
struct ManagedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

/// The contents of a capsule named "dltensor_versioned".
struct ManagedTensorVersioned {
  struct {
    std::uint32_t major;
    std::uint32_t minor;
  } version;
  void* manager;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

}  // namespace dlpack

/// Returns the DType of a torch.dtype, recognized by its text, so that torch need not be imported.
std::optional<DType> tensor_dtype(pybind11::handle dtype);
/// Returns the DType of one element of a Py_buffer, from its size and its format (letters of Python's module struct).
std::optional<DType> format_dtype(const char* format, Py_ssize_t itemsize) noexcept;
std::optional<DType> dlpack_dtype(const dlpack::DataType& type) noexcept;
dlpack::DataType dlpack_type(DType dtype) noexcept;
/// Returns the DType of a name ("float32", "torch.float32") or of an object whose text ends like that (torch.float32).
std::optional<DType> named_dtype(const std::string& name) noexcept;
/// Converts None, a name ("int8"), or torch.bfloat16.
WireFormat wire_format_of(const char* function, const pybind11::object& format);

/// Returns a torch tensor over memory that has the buffer protocol; the tensor keeps the memory alive.
pybind11::object torch_over(const pybind11::object& memory, DType dtype, const std::vector<std::int64_t>& shape);

/// Returns "it knows float32, float64, ...", for error messages.
std::string known_dtypes();

}  // namespace cohort::python
