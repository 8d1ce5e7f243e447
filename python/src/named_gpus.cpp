// Results of operations by name in a GPU's memory, and what a program may ask of GPUs.
#include "errors.h"
#include "named.h"
#include "train/named/gpu.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>

namespace cohort::python {

GpuResult::GpuResult(const char* operation, const ConstBuffer& input) : dtype_(input.dtype), device_(input.device) {
  try {
    py::module_::import("torch");
  } catch (const py::error_already_set& failed) {
    refuse(operation, "what it makes in a GPU's memory is a torch tensor, and torch cannot be imported here: " +
                          std::string(failed.what()) + " -- pass an array of the host's memory");
  }
}

void* GpuResult::allocate(std::span<const std::int64_t> shape) {
  const py::gil_scoped_acquire gil;
  try {
    const py::module_ torch = py::module_::import("torch");
    const py::object device = torch.attr("device")("cuda", device_.index);
    const auto make = [&] {
      tensor_ = torch.attr("empty")(py::tuple(py::cast(std::vector<std::int64_t>(shape.begin(), shape.end()))),
                                    py::arg("dtype") = torch.attr(std::string(to_string(dtype_)).c_str()),
                                    py::arg("device") = device);
    };
    // torch gives memory out for one stream: that in which the program goes on.
    if (device_.stream == nullptr) {
      make();
    } else {
      const py::object cuda = torch.attr("cuda");
      const auto address = reinterpret_cast<std::uintptr_t>(device_.stream);
      const py::object in_stream =
          cuda.attr("stream")(cuda.attr("ExternalStream")(address, py::arg("device") = device));
      in_stream.attr("__enter__")();
      const auto leave = [&] { in_stream.attr("__exit__")(py::none(), py::none(), py::none()); };
      try {
        make();
      } catch (...) {  // there may be no memory, and this thread makes more tensors
        leave();
        throw;
      }
      leave();
    }
    return reinterpret_cast<void*>(py::cast<std::uintptr_t>(tensor_.attr("data_ptr")()));
  } catch (const py::error_already_set& failed) {
    throw std::runtime_error(failed.what());
  }
}

void bind_named_gpus(py::module_& module) {
  module.def("gpu_count", &named::gpu_count, "How many NVIDIA GPUs this process sees; 0 without a driver.");
  module.def(
      "nccl_version", &named::nccl_version,
      "The version of the NCCL that carries out operations of GPUs' memory, 23007 for 2.30.7; 0: there is none.");
}

}  // namespace cohort::python
