// A Python array as elements in memory, without a copy. torch's tensors are recognized by their attributes (torch is
// not imported), NumPy's and other arrays by the buffer protocol, the rest by DLPack. An Array keeps the Python object,
// and its buffer, alive. Needs the GIL, also in its destructor.
#pragma once

#include <cohort/buffer.h>

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

namespace cohort::python {

/// How a call uses the elements.
enum class Access { Read, Write };

/// Memory that an array may be in. Most operations read and write the elements on the CPU and accept only host memory.
enum class Where { Host, HostOrGpu };

/// The array's role in a call, for error messages: "all_reduce: the input ...".
struct Role {
  const char* operation;
  const char* name;
  const char* item = "element";  ///< in a group: "element 0"
};

struct ReleaseBuffer {
  void operator()(Py_buffer* view) const noexcept {
    if (view->obj != nullptr) PyBuffer_Release(view);
    delete view;
  }
};

class Array {
 public:
  /// Throws InvalidArgument, naming the role, unless the object is a dense array of a known type in memory of this
  /// kind, and for read-only memory that is to be written. A GPU array is ordered after the work in torch's current
  /// stream, or after the work that made another library's array.
  Array(pybind11::handle object, Access access, const Role& role, Where where = Where::Host);
  Buffer buffer() const noexcept { return {data_, count_, dtype_, device_}; }
  ConstBuffer const_buffer() const noexcept { return {data_, count_, dtype_, device_}; }
  /// True if freed memory of the array's kind is reused in the order of its stream, as torch's is. Memory of other
  /// libraries comes with the default stream, but is reused in the order of their own streams.
  bool goes_by_stream() const noexcept { return by_stream_; }
  /// Returns the lengths of the dimensions; empty for a scalar.
  std::vector<std::int64_t> shape() const;

 private:
  void take_tensor(pybind11::handle object, Access access, const Role& role, Where where);
  void take_buffer(pybind11::handle object, Access access, const Role& role);
  bool take_numpy_bfloat16(pybind11::handle object, Access access, const Role& role);
  void take_dlpack(pybind11::handle object, Access access, const Role& role, Where where);

  void* data_ = nullptr;
  std::int64_t count_ = 0;
  DType dtype_ = DType::Float32;
  Device device_ = {};
  bool by_stream_ = false;
  pybind11::object kept_;
  std::unique_ptr<Py_buffer, ReleaseBuffer> view_;  // a Py_buffer may point into itself, so it is never moved
};

/// Returns true if the argument selects a call's grouped form.
inline bool is_group(pybind11::handle object) noexcept {
  return PyList_Check(object.ptr()) != 0 || PyTuple_Check(object.ptr()) != 0;
}

std::vector<Array> arrays_of(pybind11::handle group, Access access, const Role& role, Where where = Where::Host);
std::vector<Buffer> buffers_of(const std::vector<Array>& arrays);
std::vector<ConstBuffer> const_buffers_of(const std::vector<Array>& arrays);

}  // namespace cohort::python
