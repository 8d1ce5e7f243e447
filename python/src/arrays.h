// A Python array as elements in memory, without a copy. torch's tensors are known by what they can do (torch is not
// imported), NumPy's and others by the buffer protocol, the rest by DLPack. An Array keeps the Python object, and its
// buffer, alive. Needs the GIL, its destructor too.
#pragma once

#include <cohort/buffer.h>

#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

namespace cohort::python {

/// How the elements are to be used.
enum class Access { Read, Write };

/// For error messages: "all_reduce: the input ...".
struct Role {
  const char* operation;
  const char* name;
};

class Array {
 public:
  /// Throws InvalidArgument, naming the role, for what is no dense array in the host's memory of a known type, and for
  /// read-only memory that is to be written.
  Array(pybind11::handle object, Access access, const Role& role);
  ~Array();
  Array(Array&& other) noexcept
      : data_(other.data_),
        count_(other.count_),
        dtype_(other.dtype_),
        kept_(std::move(other.kept_)),
        view_(other.view_),
        has_view_(std::exchange(other.has_view_, false)) {}
  Array& operator=(Array&&) = delete;

  Buffer buffer() const noexcept { return {data_, count_, dtype_}; }
  ConstBuffer const_buffer() const noexcept { return {data_, count_, dtype_}; }

 private:
  void take_tensor(pybind11::handle object, const Role& role);
  void take_buffer(pybind11::handle object, Access access, const Role& role);
  bool take_numpy_bfloat16(pybind11::handle object, Access access, const Role& role);
  void take_dlpack(pybind11::handle object, Access access, const Role& role);

  void* data_ = nullptr;
  std::int64_t count_ = 0;
  DType dtype_ = DType::Float32;
  pybind11::object kept_;
  Py_buffer view_{};
  bool has_view_ = false;
};

/// Whether a call means its grouped form.
inline bool is_group(pybind11::handle object) noexcept {
  return PyList_Check(object.ptr()) != 0 || PyTuple_Check(object.ptr()) != 0;
}

std::vector<Array> arrays_of(pybind11::handle group, Access access, const Role& role);
std::vector<Buffer> buffers_of(const std::vector<Array>& arrays);
std::vector<ConstBuffer> const_buffers_of(const std::vector<Array>& arrays);

}  // namespace cohort::python
