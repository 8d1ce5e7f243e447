// Files of tensors, and folders of checkpoints, as bytes with a name, a type and a shape: the package makes torch's
// tensors of them. What the files look like is decided in formats/.
#include "arrays.h"
#include "bindings.h"
#include "errors.h"

#include "formats/checkpoint_folder.h"
#include "formats/pt.h"
#include "formats/safetensors.h"
#include "formats/weights.h"

#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace cohort::python {
namespace {

namespace ft = cohort::formats;

/// Bytes that somebody owns: a whole file, or a tensor in it.
struct Bytes {
  std::shared_ptr<const void> owner;
  const std::byte* data = nullptr;
  std::size_t size = 0;

  std::span<const std::byte> span() const noexcept { return {data, size}; }
};

Bytes bytes_of(sys::FileBytes file) {
  const auto owner = std::make_shared<const sys::FileBytes>(std::move(file));
  return {owner, owner->data(), owner->size()};
}

/// (name, type as torch calls it, shape, bytes).
using NamedBytes = std::tuple<std::string, std::string, std::vector<std::int64_t>, Bytes>;
using Metadata = std::map<std::string, std::string>;

std::vector<NamedBytes> named_bytes(const std::vector<ft::NamedTensor>& tensors,
                                    const std::shared_ptr<const void>& owner) {
  std::vector<NamedBytes> all;
  for (const auto& [name, tensor] : tensors) {
    all.emplace_back(name, std::string(ft::info(tensor.type).torch), tensor.shape,
                     Bytes{owner, tensor.bytes.data(), tensor.bytes.size()});
  }
  return all;
}

/// What Python gives to be written; keeps its arrays.
class Tensors {
 public:
  explicit Tensors(const py::list& items) {
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
  const std::vector<ft::NamedTensor>& all() const noexcept { return tensors_; }

 private:
  std::vector<Array> arrays_;
  std::vector<ft::NamedTensor> tensors_;
};

using Sampler = std::optional<std::tuple<std::uint64_t, std::int64_t, std::int64_t, std::int64_t>>;

ft::CheckpointWriter begin(const std::string& folder, std::int64_t step, std::int64_t epoch, int world_size,
                           const std::string& program, const Sampler& sampler,
                           const std::map<std::string, ft::ManifestValue>& values) {
  ft::Manifest manifest;
  manifest.step = step;
  manifest.epoch = epoch;
  manifest.world_size = world_size;
  manifest.program = program;
  manifest.values = values;
  if (sampler) {
    manifest.sampler =
        ft::SamplerPosition{std::get<0>(*sampler), std::get<1>(*sampler), std::get<2>(*sampler), std::get<3>(*sampler)};
  }
  const py::gil_scoped_release release;
  return value_or_throw(ft::CheckpointWriter::begin(folder, std::move(manifest)));
}

Sampler sampler_of(const ft::StoredCheckpoint& stored) {
  const auto& sampler = stored.manifest.sampler;
  if (!sampler) return std::nullopt;
  return std::tuple(sampler->seed, sampler->epoch, sampler->cursor, sampler->size);
}

std::map<std::string, std::uint64_t> sizes_of(const ft::StoredCheckpoint& stored) {
  std::map<std::string, std::uint64_t> sizes;
  for (const auto& [name, digest] : stored.manifest.files) sizes[name] = digest.bytes;
  return sizes;
}

void bind_checkpoints(py::module_& module) {
  py::class_<ft::StoredCheckpoint>(module, "StoredCheckpoint", "A checkpoint with a sound manifest.")
      .def_readonly("folder", &ft::StoredCheckpoint::folder)
      .def_property_readonly("generation", [](const ft::StoredCheckpoint& self) { return self.manifest.generation; })
      .def_property_readonly("step", [](const ft::StoredCheckpoint& self) { return self.manifest.step; })
      .def_property_readonly("epoch", [](const ft::StoredCheckpoint& self) { return self.manifest.epoch; })
      .def_property_readonly("world_size", [](const ft::StoredCheckpoint& self) { return self.manifest.world_size; })
      .def_property_readonly("created", [](const ft::StoredCheckpoint& self) { return self.manifest.created; })
      .def_property_readonly("program", [](const ft::StoredCheckpoint& self) { return self.manifest.program; })
      .def_property_readonly("values", [](const ft::StoredCheckpoint& self) { return self.manifest.values; })
      .def_property_readonly("sampler", &sampler_of, "(seed, epoch, cursor, size), or None.")
      .def_property_readonly("files", &sizes_of, "Bytes of each file.")
      .def("text", [](const ft::StoredCheckpoint& self) { return value_or_throw(ft::to_json(self.manifest)); })
      .def_static(
          "parse",
          [](const std::string& text, const std::string& folder) {
            return ft::StoredCheckpoint{folder, value_or_throw(ft::parse_manifest(text, folder))};
          },
          py::arg("text"), py::arg("folder"))
      .def(
          "read",
          [](const ft::StoredCheckpoint& self, const std::string& name) {
            const py::gil_scoped_release release;
            return bytes_of(value_or_throw(ft::read_checkpoint_file(self, name)));
          },
          py::arg("name"), "One of its files, compared with its digest.");
  py::class_<ft::CheckpointWriter>(module, "CheckpointWriter", "One checkpoint being written.")
      .def(py::init(&begin), py::arg("folder"), py::arg("step"), py::arg("epoch"), py::arg("world_size"),
           py::arg("program"), py::arg("sampler"), py::arg("values"))
      .def(
          "add",
          [](ft::CheckpointWriter& self, const std::string& name, const py::list& tensors, const Metadata& metadata) {
            const Tensors all(tensors);
            const py::gil_scoped_release release;
            value_or_throw(
                self.add(name, [&](const ft::Sink& sink) { return ft::write_safetensors(sink, all.all(), metadata); }));
          },
          py::arg("name"), py::arg("tensors"), py::arg("metadata"), "Writes and syncs one safetensors file.")
      .def(
          "commit",
          [](ft::CheckpointWriter& self, int keep) {
            const py::gil_scoped_release release;
            return value_or_throw(self.commit(keep));
          },
          py::arg("keep"));
  module.def(
      "list_checkpoints",
      [](const std::string& folder) {
        ft::CheckpointList list = [&] {
          const py::gil_scoped_release release;
          return value_or_throw(ft::list_checkpoints(folder));
        }();
        py::list damaged;
        for (const Error& error : list.damaged) damaged.append(to_python(error));
        return std::pair(std::move(list.sound), damaged);
      },
      py::arg("folder"), "(sound ones, oldest first; what is wrong with the others).");
}

}  // namespace

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
  bind_checkpoints(module);
}

}  // namespace cohort::python
