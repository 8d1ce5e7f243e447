#include "arrays.h"

#include "arguments.h"
#include "errors.h"

#include <pybind11/stl.h>

#include <cstdint>

namespace cohort::python {
namespace py = pybind11;

namespace {

/// The protocol by which arrays of one Python type are read; determined once per type. Either: a buffer, or DLPack for
/// arrays without one, because arrays of CuPy and JAX have a buffer only if they are in host memory.
enum class Protocol : long { Tensor, Buffer, DLPack, Either, None };

Protocol find_protocol(PyTypeObject* type) {
  PyObject* const as_object = reinterpret_cast<PyObject*>(type);
  if (PyObject_HasAttrString(as_object, "data_ptr") && PyObject_HasAttrString(as_object, "is_contiguous") &&
      PyObject_HasAttrString(as_object, "numel")) {
    return Protocol::Tensor;
  }
  if (type->tp_as_buffer != nullptr && type->tp_as_buffer->bf_getbuffer != nullptr) {
    const bool anywhere = PyObject_HasAttrString(as_object, "__dlpack_device__") != 0 &&
                          PyObject_HasAttrString(as_object, "__array_interface__") == 0;
    return anywhere ? Protocol::Either : Protocol::Buffer;
  }
  return PyObject_HasAttrString(as_object, "__dlpack__") ? Protocol::DLPack : Protocol::None;
}

Protocol protocol_of(py::handle object) {
  // Types are few and mostly live as long as the process; the dictionary keeps them, and is never destroyed.
  static PyObject* const known = PyDict_New();
  PyTypeObject* const type = Py_TYPE(object.ptr());
  PyObject* const as_object = reinterpret_cast<PyObject*>(type);
  if (PyObject* const found = PyDict_GetItem(known, as_object)) return static_cast<Protocol>(PyLong_AsLong(found));
  const Protocol protocol = find_protocol(type);
  const py::int_ number(static_cast<long>(protocol));
  if (PyDict_SetItem(known, as_object, number.ptr()) != 0) throw py::error_already_set();
  return protocol;
}

/// Returns an interned name, never destroyed: attribute look-ups with it only compare pointers.
#define COHORT_NAME(name)                                               \
  [] {                                                                  \
    static PyObject* const interned = PyUnicode_InternFromString(name); \
    return py::handle(interned);                                        \
  }()

py::object call(py::handle object, py::handle name) {
  PyObject* const result = PyObject_CallMethodNoArgs(object.ptr(), name.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

py::object get(py::handle object, py::handle name) {
  PyObject* const result = PyObject_GetAttr(object.ptr(), name.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

bool says_true(py::handle object, py::handle name) {
  const py::object answer = call(object, name);
  const int truth = PyObject_IsTrue(answer.ptr());
  if (truth < 0) throw py::error_already_set();
  return truth == 1;
}

[[noreturn]] void refuse_array(const Role& role, const std::string& why) {
  refuse(role.operation, std::string(role.name) + " " + why);
}

/// Returns the tensor in a capsule that is known to hold one.
const dlpack::Tensor* tensor_of(const py::object& capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    void* const managed = PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned");
    return &static_cast<const dlpack::ManagedTensorVersioned*>(managed)->tensor;
  }
  return &static_cast<const dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor;
}

/// Returns the device's type and number.
std::pair<int, int> dlpack_device(py::handle object) {
  return py::cast<std::pair<int, int>>(object.attr("__dlpack_device__")());
}

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

std::string with_article(const std::string& noun) {
  return (std::string_view("aeiou").find(noun.front()) != std::string_view::npos ? "an " : "a ") + noun;
}

std::string text(py::handle object) { return std::string(py::str(object)); }

// Returns the end of the advice to pass a copy, for an array that is written to.
std::string and_back(Access access) { return access == Access::Write ? ", and copy the result back" : ""; }

}  // namespace

Array::Array(py::handle object, Access access, const Role& role, Where where) {
  switch (protocol_of(object)) {
    case Protocol::Tensor: take_tensor(object, access, role, where); break;
    case Protocol::Buffer: take_buffer(object, access, role); break;
    case Protocol::DLPack: take_dlpack(object, access, role, where); break;
    case Protocol::Either:
      if (dlpack_device(object).first == dlpack::kCpu) {
        take_buffer(object, access, role);
      } else {
        take_dlpack(object, access, role, where);
      }
      break;
    case Protocol::None:
      refuse_array(role, "is " + with_article(type_name(object)) +
                             ", not an array -- pass a torch tensor, a NumPy array, or anything with the buffer "
                             "protocol or __dlpack__ (numpy.asarray makes one of numbers and lists)");
  }
  // For empty arrays libraries return any address, aligned or not.
  if (count_ == 0) data_ = nullptr;
}

void Array::take_tensor(py::handle object, Access access, const Role& role, Where where) {
  const py::object dtype = get(object, COHORT_NAME("dtype"));
  const std::optional<DType> known = tensor_dtype(dtype);
  const py::object device = get(object, COHORT_NAME("device"));
  const py::object device_type = get(device, COHORT_NAME("type"));
  const auto lies_on = [&](const char* name) {
    return PyUnicode_Check(device_type.ptr()) && PyUnicode_CompareWithASCIIString(device_type.ptr(), name) == 0;
  };
  if (where == Where::HostOrGpu && lies_on("cuda")) {
    const py::object stream = py::module_::import("torch").attr("cuda").attr("current_stream")(device);
    device_ = {DeviceType::CUDA, py::cast<int>(get(device, COHORT_NAME("index"))),
               reinterpret_cast<void*>(py::cast<std::uintptr_t>(stream.attr("cuda_stream")))};
    by_stream_ = true;
  } else if (!lies_on("cpu")) {
    refuse_array(role, "lies on " + text(device) + ", and Cohort moves " +
                           (where == Where::HostOrGpu ? "the host's memory and CUDA's" : "the host's memory here") +
                           " -- pass tensor.cpu()" + and_back(access) +
                           "; or leave tensors of that device to its own "
                           "backend (torch.distributed: \"cpu:cohort,cuda:nccl\")");
  }
  // The object torch.strided, kept when seen first, since making its text takes time.
  static PyObject* strided = nullptr;
  const py::object layout = get(object, COHORT_NAME("layout"));
  if (layout.ptr() != strided) {
    if (text(layout) == "torch.strided") {
      strided = py::object(layout).release().ptr();
    } else {
      refuse_array(role, "is of the layout " + text(layout) + " -- pass tensor.to_dense(), or its indices and values");
    }
  }
  if (!known) refuse_array(role, "is of the type " + text(dtype) + ", which Cohort does not know -- " + known_dtypes());
  if (!says_true(object, COHORT_NAME("is_contiguous"))) {
    refuse_array(role, "is not contiguous (shape " + text(py::tuple(object.attr("shape"))) + ", strides " +
                           text(object.attr("stride")()) + ") -- pass tensor.contiguous()" + and_back(access));
  }
  // The memory of conjugated and negated views does not hold the values they stand for.
  if ((is_complex(*known) && says_true(object, COHORT_NAME("is_conj"))) || says_true(object, COHORT_NAME("is_neg"))) {
    refuse_array(role, "is conjugated or negated lazily -- pass tensor.resolve_conj().resolve_neg()");
  }
  dtype_ = *known;
  count_ = py::cast<std::int64_t>(call(object, COHORT_NAME("numel")));
  data_ = reinterpret_cast<void*>(py::cast<std::uintptr_t>(call(object, COHORT_NAME("data_ptr"))));
  if (data_ == nullptr && count_ != 0)
    refuse_array(role, "has no memory -- it is a " + type_name(object) + " of no data");
  kept_ = py::reinterpret_borrow<py::object>(object);
}

void Array::take_buffer(py::handle object, Access access, const Role& role) {
  const int flags = access == Access::Write ? PyBUF_RECORDS : PyBUF_RECORDS_RO;
  view_.reset(new Py_buffer{});
  if (PyObject_GetBuffer(object.ptr(), view_.get(), flags) != 0) {
    py::error_already_set failed;
    if (!failed.matches(PyExc_BufferError) && !failed.matches(PyExc_ValueError)) throw failed;
    // The buffer is read-only, or of a type for which the protocol has no letter.
    if (take_numpy_bfloat16(object, access, role)) return;
    refuse_array(role, "(" + type_name(object) + ") gives no " + (access == Access::Write ? "writable " : "") +
                           "buffer: " + text(failed.value()) +
                           (access == Access::Write ? " -- pass a copy of it, which can be written" : ""));
  }
  const std::optional<DType> known = format_dtype(view_->format, view_->itemsize);
  if (!known) {
    refuse_array(role, "has elements of the format '" + std::string(view_->format != nullptr ? view_->format : "B") +
                           "' (" + std::to_string(view_->itemsize) + " bytes), which Cohort does not know -- " +
                           known_dtypes());
  }
  if (PyBuffer_IsContiguous(view_.get(), 'C') == 0) {
    refuse_array(role, "(" + type_name(object) + ") is not contiguous -- pass numpy.ascontiguousarray(array)" +
                           and_back(access));
  }
  dtype_ = *known;
  data_ = view_->buf;
  count_ = view_->len / view_->itemsize;
}

// NumPy has no bfloat16 of its own; the one of the package ml_dtypes cannot be exported as a buffer.
bool Array::take_numpy_bfloat16(py::handle object, Access access, const Role& role) {
  if (!py::hasattr(object, "__array_interface__") || !py::hasattr(object, "dtype")) return false;
  if (text(object.attr("dtype")) != "bfloat16") return false;
  const py::dict interface = object.attr("__array_interface__");
  const py::tuple place = interface["data"];
  if (access == Access::Write && py::cast<bool>(place[1])) {
    refuse_array(role, "is read-only -- pass a copy of it, which can be written");
  }
  if (!interface["strides"].is_none()) {
    refuse_array(role, "is not contiguous -- pass numpy.ascontiguousarray(array)" + and_back(access));
  }
  dtype_ = DType::BFloat16;
  data_ = reinterpret_cast<void*>(py::cast<std::uintptr_t>(place[0]));
  count_ = py::cast<std::int64_t>(object.attr("size"));
  kept_ = py::reinterpret_borrow<py::object>(object);
  return true;
}

void Array::take_dlpack(py::handle object, Access access, const Role& role, Where where) {
  const auto [type, id] = dlpack_device(object);
  const bool on_gpu = where == Where::HostOrGpu && type == dlpack::kCuda;
  if (!on_gpu && type != dlpack::kCpu && type != dlpack::kCudaHost && type != dlpack::kRocmHost) {
    refuse_array(role, "(" + type_name(object) + ") lies on DLPack's device (" + std::to_string(type) + ", " +
                           std::to_string(id) + "), and Cohort moves " +
                           (where == Where::HostOrGpu ? "the host's memory and CUDA's" : "the host's memory here") +
                           " -- pass a copy in it");
  }
  py::dict asked;
  if (on_gpu) {
    device_ = {DeviceType::CUDA, id, nullptr};
    asked["stream"] = 1;  // CUDA's default stream, to be ordered after the work that makes the array
  }
  py::object capsule;
  try {
    capsule = object.attr("__dlpack__")(**asked, py::arg("max_version") = py::make_tuple(1, 0));
  } catch (py::error_already_set& failed) {
    if (!failed.matches(PyExc_TypeError)) throw;
    capsule = object.attr("__dlpack__")(**asked);
  }
  // The capsule is not consumed, so its destructor frees its contents.
  const dlpack::Tensor* tensor = nullptr;
  bool writable = false;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    const auto* const managed =
        static_cast<const dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != 1) {
      refuse_array(role,
                   "is of DLPack's version " + std::to_string(managed->version.major) + "; version 1 was asked for");
    }
    tensor = &managed->tensor;
    writable = (managed->flags & dlpack::kReadOnly) == 0;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
    tensor = &static_cast<const dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor;
  } else {
    refuse_array(role, "(" + type_name(object) + ") gives something else than a DLPack tensor");
  }
  if (access == Access::Write && !writable) {
    // An old capsule cannot say whether its owner relies on the array not to change, as JAX does.
    refuse_array(role, "(" + type_name(object) +
                           ") does not say that it may be written -- pass a NumPy array or a torch "
                           "tensor as the output");
  }
  const std::optional<DType> known = dlpack_dtype(tensor->dtype);
  if (!known) {
    refuse_array(role, "has elements of DLPack's type (" + std::to_string(tensor->dtype.code) + ", " +
                           std::to_string(tensor->dtype.bits) + " bits), which Cohort does not know -- " +
                           known_dtypes());
  }
  count_ = 1;
  for (std::int32_t i = tensor->ndim; i-- > 0;) {
    if (tensor->strides != nullptr && tensor->shape[i] != 1 && tensor->strides[i] != count_ && count_ != 0) {
      refuse_array(role, "(" + type_name(object) + ") is not contiguous -- pass a contiguous copy");
    }
    count_ *= tensor->shape[i];
  }
  dtype_ = *known;
  data_ = static_cast<char*>(tensor->data) + tensor->byte_offset;
  kept_ = std::move(capsule);
}

std::vector<std::int64_t> Array::shape() const {
  if (view_ && view_->obj != nullptr) return {view_->shape, view_->shape + view_->ndim};
  if (PyCapsule_CheckExact(kept_.ptr()) != 0) {
    const dlpack::Tensor* const tensor = tensor_of(kept_);
    return {tensor->shape, tensor->shape + tensor->ndim};
  }
  std::vector<std::int64_t> lengths;
  const py::object shape = get(kept_, COHORT_NAME("shape"));
  if (PyTuple_Check(shape.ptr()) == 0) return py::cast<std::vector<std::int64_t>>(shape);
  const Py_ssize_t dimensions = PyTuple_GET_SIZE(shape.ptr());
  lengths.reserve(static_cast<std::size_t>(dimensions));
  for (Py_ssize_t i = 0; i < dimensions; ++i) {
    lengths.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i)));
    if (lengths.back() == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  }
  return lengths;
}

std::vector<Array> arrays_of(py::handle group, Access access, const Role& role, Where where) {
  if (!is_group(group)) {
    refuse_array(role, "is a " + type_name(group) + "; a grouped operation takes lists (or tuples) of arrays");
  }
  const py::object items = py::reinterpret_borrow<py::object>(group);
  std::vector<Array> arrays;
  arrays.reserve(py::len(items));
  for (const py::handle item : items) {
    const std::string name = std::string(role.item) + " " + std::to_string(arrays.size());
    arrays.emplace_back(item, access, Role{role.operation, name.c_str()}, where);
  }
  return arrays;
}

std::vector<Buffer> buffers_of(const std::vector<Array>& arrays) {
  std::vector<Buffer> buffers;
  buffers.reserve(arrays.size());
  for (const Array& array : arrays) buffers.push_back(array.buffer());
  return buffers;
}

std::vector<ConstBuffer> const_buffers_of(const std::vector<Array>& arrays) {
  std::vector<ConstBuffer> buffers;
  buffers.reserve(arrays.size());
  for (const Array& array : arrays) buffers.push_back(array.const_buffer());
  return buffers;
}

}  // namespace cohort::python
