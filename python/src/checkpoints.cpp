// Files of tensors and folders of checkpoints. The package gives its tensors as bytes with a name, a type and a shape,
// and makes torch tensors from bytes that it gets; formats/ defines the files' layout and checkpoint/ does the rest,
// without the GIL. A save in the background runs in a thread that never uses Python.
#include "arrays.h"
#include "bindings.h"
#include "errors.h"

#include "base/files.h"
#include "telemetry/status_page.h"
#include "train/checkpoint/background.h"
#include "train/checkpoint/checkpoint.h"
#include "train/formats/checkpoint_folder.h"
#include "train/formats/pt.h"
#include "train/formats/safetensors.h"
#include "train/formats/shards.h"
#include "train/formats/tensor.h"
#include "train/formats/weights.h"

#include <cohort/checkpoint_follower.h>
#include <cohort/early_stopping.h>

#include <pybind11/stl.h>

#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace cohort::python {
namespace {

namespace ck = cohort::checkpoint;
namespace ft = cohort::formats;

/// Bytes with an owner: a whole file, or a tensor in it.
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

/// Tensors to be written, as given by Python; keeps their arrays alive.
class Tensors {
 public:
  Tensors() = default;
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

void bind_formats(py::module_& module) {
  py::class_<Bytes>(module, "Bytes", py::buffer_protocol(),
                    "Bytes of a file or of a tensor in it; of this object alone.")
      .def(py::init([](std::size_t size) { return bytes_of(sys::FileBytes(size)); }), py::arg("size"))
      .def("__len__", [](const Bytes& self) { return self.size; })
      .def_buffer([](Bytes& self) {
        // Writable, because each caller has a copy of the file.
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
        const auto weights = without_gil(
            [&] { return std::make_shared<const ft::Weights>(value_or_throw(ft::read_weights(path, {.key = key}))); });
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

namespace {

using Comm = const PyCommunicator*;  // None: only this process
using Sampler = std::optional<std::tuple<std::uint64_t, std::int64_t, std::int64_t, std::int64_t>>;
using File = std::tuple<std::string, py::list, Metadata>;
/// sizes, start, extent, begin, count.
using PyShard = std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, std::vector<std::int64_t>,
                           std::int64_t, std::int64_t>;

ck::ShardName shard_name(const std::string& tensor, const PyShard& shard) {
  const auto& [sizes, start, extent, begin, count] = shard;
  return {tensor, {sizes, start, extent, begin, count}};
}

/// One rank's contribution to a save, and its arrays.
class PyBundle {
 public:
  PyBundle(std::int64_t step, std::int64_t epoch, const std::string& program, const Sampler& sampler,
           const std::map<std::string, ft::ManifestValue>& values, const std::vector<File>& files,
           const py::list& random, const py::list& state, const py::list& shards, const std::vector<PyShard>& parts)
      : random_(random), state_(state), shards_(shards) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto& [name, tensor] = shards_.all().at(i);
      bundle.shards.push_back({shard_name(name, parts[i]), tensor.type, tensor.bytes});
    }
    bundle.manifest.step = step;
    bundle.manifest.epoch = epoch;
    bundle.manifest.program = program;
    bundle.manifest.values = values;
    if (sampler) {
      const auto& [seed, sampler_epoch, cursor, size] = *sampler;
      bundle.manifest.sampler = ft::SamplerPosition{seed, sampler_epoch, cursor, size};
    }
    for (const auto& [name, tensors, metadata] : files) {
      files_.emplace_back(tensors);
      bundle.files.push_back({name, files_.back().all(), metadata});
    }
    bundle.state = state_.all();
    bundle.random = random_.all();
  }

  ck::Bundle bundle;

 private:
  const Tensors random_, state_, shards_;
  std::vector<Tensors> files_;
};

/// Runs a collective function over the ranks of a communicator; without one, only on this process.
template <class T>
T collectively(Comm comm, const char* name, const std::function<T(Communicator&)>& body) {
  const status::Call call(std::string("CheckpointFolder.") + name);
  if (comm != nullptr) return comm->member().call<T>(name, body);
  const py::gil_scoped_release release;
  Communicator alone;
  return body(alone);
}

struct PyPendingSave {
  std::shared_ptr<ck::PendingSave> pending;

  ft::StoredCheckpoint wait() const {
    wait_in_slices([&](std::chrono::nanoseconds slice) { return pending->wait_for(slice); }, std::nullopt);
    return pending->wait();
  }
};

/// The checkpoints of one folder. A world's resources used by background saves end with that world.
class Checkpoints : public Tenant, public std::enable_shared_from_this<Checkpoints> {
 public:
  explicit Checkpoints(ck::FolderOptions options) : options_(std::move(options)), saver_(options_) {}
  ~Checkpoints() override {
    const py::gil_scoped_release release;
    saver_.leave();
  }

  ft::StoredCheckpoint save(Comm comm, const PyBundle& brought) {
    return collectively<ft::StoredCheckpoint>(
        comm, "save", [&](Communicator& world) { return ck::save(world, options_, brought.bundle); });
  }

  PyPendingSave save_async(Comm comm, const PyBundle& brought) {
    constexpr auto* kName = "save_async";
    settle(comm);
    if (collectively<bool>(comm, kName, [&](Communicator& world) { return saver_.needs_communicator(world); })) {
      Member& member = comm->member();
      group_ = member.add_group(
          member.call<Communicator>(kName, [](Communicator& world) { return world.split({.background = true}); }));
      left_ = false;
      saver_.adopt(group_->give_over(kName, weak_from_this()));
    }
    return {collectively<std::shared_ptr<ck::PendingSave>>(
        comm, kName, [&](Communicator& world) { return saver_.start(world, brought.bundle); })};
  }

  void settle(Comm comm) {
    collectively<void>(comm, "save", [&](Communicator& world) { saver_.settle(world); });
  }

  void close() {
    run_interruptibly<void>([self = shared_from_this()] { self->saver_.wait(); }, {});
    saver_.close();
  }

  const ck::FolderOptions& options() const noexcept { return options_; }

  // Leaves the world only when the checkpoint is on the disk, unless this rank has failed.
  void leave(const LeaveOptions& options) override {
    const py::gil_scoped_release release;
    if (options.failed) saver_.abort(options.reason);
    saver_.leave();
    left_ = true;
  }
  bool has_left() const noexcept override { return left_; }

 private:
  const ck::FolderOptions options_;
  std::shared_ptr<Member> group_;
  ck::BackgroundSaver saver_;
  bool left_ = false;
};

CheckpointPlace place_of(const std::string& name) {
  for (const auto place : {CheckpointPlace::Rank0, CheckpointPlace::Shared, CheckpointPlace::Local}) {
    if (name == ck::to_string(place)) return place;
  }
  refuse("CheckpointFolder", "place is '" + name + "' -- it is one of 'rank0', 'shared', 'local'");
}

BestMode mode_of(const char* of, const std::string& name) {
  if (name != "min" && name != "max") refuse(of, "the mode is '" + name + "' -- it is 'min' or 'max'");
  return name == "min" ? BestMode::Min : BestMode::Max;
}

/// An EarlyStopping whose communicator is a Python one, or none.
void bind_early_stopping(py::module_& module) {
  py::class_<EarlyStopping>(module, "EarlyStopping")
      .def(py::init([](int patience, double min_delta, const std::string& mode) {
             return EarlyStopping({patience, min_delta, mode_of("EarlyStopping", mode)});
           }),
           py::arg("patience"), py::arg("min_delta"), py::arg("mode"))
      .def(
          "should_stop",
          [](EarlyStopping& self, double value, Comm comm) {
            const auto ask = [&](Communicator& world) { return self.should_stop(world, value); };
            if (comm != nullptr) return comm->member().call<bool>("should_stop", ask);
            Communicator alone;
            return ask(alone);
          },
          py::arg("value"), py::arg("comm"))
      .def_property_readonly("best", &EarlyStopping::best)
      .def_property_readonly("waited", &EarlyStopping::waited)
      .def_property_readonly("improved", &EarlyStopping::improved)
      .def("state", &EarlyStopping::state)
      .def("load_state", &EarlyStopping::load_state, py::arg("text"));
}

std::optional<py::object> error_of(const Checkpoints& self, const ck::Found& found) {
  if (found.stored || found.passed_over.empty()) return std::nullopt;
  return to_python(ck::all_damaged(self.options(), found.passed_over));
}

py::tuple load_newest(const Checkpoints& self, Comm comm, const std::set<std::string>& unwanted,
                      std::optional<std::int64_t> latest, bool best) {
  ck::Found found = collectively<ck::Found>(comm, best ? "load_best" : "load_latest", [&](Communicator& world) {
    return ck::load_newest(world, self.options(), unwanted, latest,
                           best ? ck::Order::BestFirst : ck::Order::NewestFirst);
  });
  py::dict files;
  for (auto& [name, bytes] : found.files) files[py::str(name)] = bytes_of(std::move(bytes));
  std::optional<Bytes> part;
  if (found.part) part = bytes_of(std::move(*found.part));
  const auto error = error_of(self, found);
  return py::make_tuple(std::move(found.stored), files, part, found.passed_over, error);
}

py::tuple load_shards(const Checkpoints& self, Comm comm, const std::vector<std::pair<std::string, PyShard>>& wanted) {
  std::vector<NamedBytes> all;
  ck::Found found = collectively<ck::Found>(comm, "load_shards", [&](Communicator& world) {
    ck::Found newest = ck::load_newest(world, self.options(), {ck::kModelFile, ck::kOptimizerFile});
    if (!newest.tensors) return newest;
    std::vector<ck::WantedShard> asked;
    for (const auto& [name, part] : wanted) {
      ck::ShardName shard = shard_name(name, part);
      const auto saved = newest.tensors->content.tensors.find(name);
      const auto type = saved == newest.tensors->content.tensors.end() ? ft::ElementType::UInt8 : saved->second.type;
      const auto shape = ft::problem_of(shard.shard) ? std::vector<std::int64_t>{0} : ft::shape_of(shard.shard);
      sys::FileBytes memory(static_cast<std::size_t>(ft::byte_count(type, shape).value_or(0)));
      asked.push_back({std::move(shard), {memory.data(), memory.size()}});
      all.emplace_back(name, std::string(ft::info(type).torch), shape, bytes_of(std::move(memory)));
    }
    ck::read_shards(world, *newest.tensors, asked);
    return newest;
  });
  std::optional<Bytes> part;
  if (found.part) part = bytes_of(std::move(*found.part));
  const auto error = error_of(self, found);
  return py::make_tuple(std::move(found.stored), all, part, found.passed_over, error);
}

py::dict load_parts(const Checkpoints& self, Comm comm, const ft::StoredCheckpoint& stored,
                    const std::set<int>& ranks) {
  auto parts = collectively<std::map<int, sys::FileBytes>>(
      comm, "parts", [&](Communicator& world) { return ck::load_parts(world, self.options(), stored, ranks); });
  py::dict all;
  for (auto& [rank, bytes] : parts) all[py::int_(rank)] = bytes_of(std::move(bytes));
  return all;
}

Sampler sampler_of(const ft::StoredCheckpoint& stored) {
  const auto& sampler = stored.manifest.sampler;
  if (!sampler) return std::nullopt;
  return std::tuple(sampler->seed, sampler->epoch, sampler->cursor, sampler->size);
}

void bind_stored(py::module_& module) {
  using Stored = ft::StoredCheckpoint;
  // Reads all files of the checkpoint.
  const auto require_whole = [](const Stored& stored) {
    const py::gil_scoped_release release;
    value_or_throw(ft::check_checkpoint_files(stored));
  };
  py::class_<Stored>(module, "StoredCheckpoint", "A checkpoint with a sound manifest.")
      .def("require_whole", require_whole, "Raises Corrupt if a file is not as it was written.")
      .def_readonly("folder", &Stored::folder)
      .def_property_readonly("generation", [](const Stored& self) { return self.manifest.generation; })
      .def_property_readonly("step", [](const Stored& self) { return self.manifest.step; })
      .def_property_readonly("epoch", [](const Stored& self) { return self.manifest.epoch; })
      .def_property_readonly("world_size", [](const Stored& self) { return self.manifest.world_size; })
      .def_property_readonly("created", [](const Stored& self) { return self.manifest.created; })
      .def_property_readonly("program", [](const Stored& self) { return self.manifest.program; })
      .def_property_readonly("values", [](const Stored& self) { return self.manifest.values; })
      .def_property_readonly("sampler", &sampler_of, "(seed, epoch, cursor, size), or None.");
  module.def(
      "list_checkpoints",
      [](const std::string& folder) {
        const py::gil_scoped_release release;
        return value_or_throw(ft::list_checkpoints(folder)).sound;
      },
      py::arg("folder"), "Those with a sound manifest, oldest first.");
}

void bind_follower(py::module_& module) {
  const auto milliseconds = [](double seconds) {
    return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
  };
  py::class_<CheckpointFollower>(module, "CheckpointFollower", "Waits for the checkpoints of a training; see follow.")
      .def(py::init([milliseconds](const std::string& folder, std::int64_t after_generation, double look_every,
                                   std::optional<double> timeout) {
             CheckpointFollowerOptions options;
             options.folder = folder;
             options.after_generation = after_generation;
             options.look_every = milliseconds(look_every);
             if (timeout) options.timeout = milliseconds(*timeout);
             return CheckpointFollower(std::move(options));
           }),
           py::arg("folder"), py::arg("after_generation"), py::arg("look_every"), py::arg("timeout"))
      .def(
          "next_within",
          [milliseconds](CheckpointFollower& self, double seconds) {
            const CheckpointFollower::Look look = without_gil([&] { return self.next_within(milliseconds(seconds)); });
            return py::make_tuple(look.came, look.checkpoint ? py::object(py::int_(look.checkpoint->generation))
                                                             : py::object(py::none()));
          },
          py::arg("seconds"), "(whether something came, its generation or None: training is over).")
      .def_property_readonly("training_is_over", &CheckpointFollower::training_is_over);
}

}  // namespace

void bind_checkpoints(py::module_& module) {
  bind_stored(module);
  bind_follower(module);
  bind_early_stopping(module);
  py::class_<PyBundle>(module, "CheckpointBundle", "What one rank brings to a save.")
      .def(py::init<std::int64_t, std::int64_t, const std::string&, const Sampler&,
                    const std::map<std::string, ft::ManifestValue>&, const std::vector<File>&, const py::list&,
                    const py::list&, const py::list&, const std::vector<PyShard>&>(),
           py::kw_only(), py::arg("step"), py::arg("epoch"), py::arg("program"), py::arg("sampler"), py::arg("values"),
           py::arg("files"), py::arg("random"), py::arg("state"), py::arg("shards"), py::arg("parts"));
  py::class_<PyPendingSave>(module, "PendingSave", "A save in the background, under way or over.")
      .def("done", [](const PyPendingSave& self) { return self.pending->done(); })
      .def("wait", &PyPendingSave::wait);
  py::class_<Checkpoints, std::shared_ptr<Checkpoints>>(module, "Checkpoints", "The checkpoints of one folder.")
      .def(py::init([](const std::string& folder, int keep, const std::string& place, int copies,
                       const std::string& best_by, int keep_best, const std::string& best_mode) {
             ck::FolderOptions options{
                 folder, keep, place_of(place), copies, {best_by, mode_of("CheckpointFolder", best_mode), keep_best}};
             ck::check(options);
             return std::make_shared<Checkpoints>(std::move(options));
           }),
           py::arg("folder"), py::arg("keep"), py::arg("place"), py::arg("copies"), py::arg("best_by"),
           py::arg("keep_best"), py::arg("best_mode"))
      .def("save", &Checkpoints::save, py::arg("comm"), py::arg("bundle"))
      .def("save_async", &Checkpoints::save_async, py::arg("comm"), py::arg("bundle"))
      .def("settle", &Checkpoints::settle, py::arg("comm"))
      .def("close", &Checkpoints::close)
      .def("load_newest", &load_newest, py::arg("comm"), py::arg("unwanted"), py::arg("latest"), py::arg("best"),
           "(checkpoint or None, files, this rank's part or None, what was passed over, what to raise if all are "
           "damaged).")
      .def("load_shards", &load_shards, py::arg("comm"), py::arg("wanted"),
           "(checkpoint or None, the tensors as they were asked for, this rank's part or None, what was passed over, "
           "what to raise if all are damaged).")
      .def("load_parts", &load_parts, py::arg("comm"), py::arg("stored"), py::arg("ranks"));
}

}  // namespace cohort::python
