#include "formats.h"

#include "bindings.h"
#include "errors.h"

#include "train/formats/pt.h"
#include "train/formats/safetensors.h"
#include "train/formats/weights.h"

#include <pybind11/stl.h>

#include <tuple>
#include <utility>

namespace cohort::python {
namespace {

namespace ft = cohort::formats;

std::vector<NamedBytes> named_bytes(const std::vector<ft::NamedTensor>& tensors,
                                    const std::shared_ptr<const void>& owner) {
  std::vector<NamedBytes> all;
  for (const auto& [name, tensor] : tensors) {
    all.emplace_back(name, std::string(ft::info(tensor.type).torch), tensor.shape,
                     Bytes{owner, tensor.bytes.data(), tensor.bytes.size()});
  }
  return all;
}

}  // namespace

Bytes bytes_of(sys::FileBytes file) {
  const auto owner = std::make_shared<const sys::FileBytes>(std::move(file));
  return {owner, owner->data(), owner->size()};
}

Tensors::Tensors(const py::list& items) {
  for (const py::handle item : items) {
    const auto [name, type, shape, data] =
        py::cast<std::tuple<std::string, std::string, std::vector<std::int64_t>, py::object>>(item);
    const ft::ElementTypeInfo* const known = ft::find_torch_type(type);
    if (known == nullptr) {
      refuse("cannot save tensor '" + name + "'", "files have no type " + type + " -- convert it first");
    }
    arrays_.emplace_back(data, Access::Read, Role{"save", "tensor"});
    const ConstBuffer bytes = arrays_.back().const_buffer();
    tensors_.push_back({name, {known->type, shape, {static_cast<const std::byte*>(bytes.data), bytes.bytes()}}});
  }
}

void bind_formats(py::module_& module) {
  py::class_<Bytes>(module, "Bytes", py::buffer_protocol(),
                    "Bytes of a file or of a tensor in it; of this object alone.")
      .def(py::init([](std::size_t size) { return bytes_of(sys::FileBytes(size)); }), py::arg("size"))
      .def("__len__", [](const Bytes& self) { return self.size; })
      .def_buffer([](Bytes& self) {
        // Whoever asks has a file's copy to himself: it may be written.
        return py::buffer_info(const_cast<std::byte*>(self.data), 1, py::format_descriptor<std::uint8_t>::format(),
                               static_cast<py::ssize_t>(self.size));
      });
  module.def(
      "parse_safetensors",
      [](const Bytes& bytes, const std::string& name) {
        const ft::Safetensors parsed = value_or_throw(ft::parse_safetensors(bytes.span(), name));
        return std::pair(named_bytes(parsed.tensors, bytes.owner), parsed.metadata);
      },
      py::arg("bytes"), py::arg("name"));
  module.def(
      "read_weights",
      [](const std::string& path, const std::string& key) {
        std::shared_ptr<const ft::Weights> weights;
        {
          const py::gil_scoped_release release;
          weights = std::make_shared<const ft::Weights>(value_or_throw(ft::read_weights(path, {.key = key})));
        }
        return std::pair(named_bytes(weights->tensors, weights), weights->metadata);
      },
      py::arg("path"), py::arg("key"));
  module.def(
      "write_weights",
      [](const std::string& path, const py::list& tensors, bool pt) {
        const Tensors all(tensors);
        const py::gil_scoped_release release;
        if (!pt) {
          value_or_throw(ft::write_safetensors(path, all.all(), {{"format", "pt"}}));
          return;
        }
        ft::PtDict dict;
        for (const auto& [name, tensor] : all.all()) dict.add(name, ft::pt_tensor(tensor));
        value_or_throw(ft::write_pt(path, std::make_shared<const ft::PtDict>(std::move(dict))));
      },
      py::arg("path"), py::arg("tensors"), py::arg("pt"));
}

}  // namespace cohort::python
