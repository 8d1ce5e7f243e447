// The parts of an elastic training, for cohort.elastic: makes Python callables parts and values of the C++ State.
// The core calls them on its caller's thread, and waits for other ranks without the GIL.
#include "arrays.h"
#include "bindings.h"
#include "errors.h"
#include "telemetry/status_page.h"
#include "train/elastic/progress.h"

#include <cohort/digest.h>
#include <cohort/elastic.h>

#include <fmt/format.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace cohort::python {
namespace {

/// A Python function that may be released without the GIL.
template <class T = py::object>
std::shared_ptr<const T> shared(T object) {
  return {new T(std::move(object)), [](const T* one) {
            const py::gil_scoped_acquire gil;
            delete one;
          }};
}

using Callable = std::shared_ptr<const py::function>;

/// Bytes in several pieces of memory, read when a value is requested.
class Pieces {
 public:
  explicit Pieces(const py::list& arrays) : arrays_(arrays_of(arrays, Access::Read, {"Pieces", "array"})) {}

  void read(std::string& bytes) const {
    bytes.clear();
    for (const Array& array : arrays_) {
      const ConstBuffer piece = array.const_buffer();
      if (piece.bytes() > 0) bytes.append(static_cast<const char*>(piece.data), piece.bytes());
    }
  }

 private:
  std::vector<Array> arrays_;
};

/// Detects whether memory has changed since the last call.
class Watch {
 public:
  Watch(std::uintptr_t address, std::size_t bytes) : memory_(reinterpret_cast<const char*>(address)), bytes_(bytes) {}
  bool changed() {
    if (!copy_.empty() && std::memcmp(copy_.data(), memory_, bytes_) == 0) return false;
    copy_.assign(memory_, bytes_);
    return true;
  }
  const std::string& copy() const noexcept { return copy_; }

 private:
  const char* memory_;
  std::size_t bytes_;
  std::string copy_;
};

/// Returns a view that is valid during a call. (Writable, since libraries warn of read-only memory; nobody may write.)
py::memoryview view_of(const void* data, std::size_t bytes) {
  return py::memoryview::from_memory(const_cast<void*>(data), static_cast<py::ssize_t>(bytes));
}

class PyPart final : public elastic::Part {
 public:
  PyPart(Callable contents, Callable assign, Callable version)
      : contents_(std::move(contents)), assign_(std::move(assign)), version_(std::move(version)) {}

  elastic::Contents contents() override {
    const py::gil_scoped_acquire gil;
    const auto [layout, items] = py::cast<std::pair<std::string, py::list>>((*contents_)());
    std::vector<Array> arrays;
    elastic::Contents contents{layout};
    for (const py::handle item : items) {
      const auto [name, data] = py::cast<std::pair<std::string, py::object>>(item);
      arrays.emplace_back(data, Access::Read, Role{"elastic.State", name.c_str()});
      contents.items.push_back({name, arrays.back().const_buffer()});
    }
    contents.owner = shared(std::move(arrays));
    return contents;
  }

  void assign(const elastic::Contents& contents) override {
    const py::gil_scoped_acquire gil;
    py::list items;
    for (const auto& [name, memory] : contents.items) {
      items.append(py::make_tuple(name, view_of(memory.data, memory.bytes())));
    }
    (*assign_)(py::bytes(contents.layout), items);
  }

  std::uint64_t version() override {
    const py::gil_scoped_acquire gil;
    const py::object number = (*version_)();
    const std::uint64_t version = PyLong_AsUnsignedLongLongMask(number.ptr());
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return version;
  }

 private:
  const Callable contents_, assign_, version_;
};

void read(const py::object& value, std::string& bytes) {
  if (py::isinstance<Pieces>(value))
    py::cast<const Pieces&>(value).read(bytes);
  else
    bytes = py::cast<std::string_view>(value);
}

class ElasticState {
 public:
  ElasticState() : state_(std::make_unique<elastic::State>()) {}
  ~ElasticState() {
    const py::gil_scoped_release release;
    world_.reset();
    state_.reset();
  }

  void add_part(const std::string& name, py::function contents, py::function assign, py::function version) {
    state_->add(name, std::make_shared<PyPart>(shared(std::move(contents)), shared(std::move(assign)),
                                               shared(std::move(version))));
  }
  void add_value(const std::string& name, py::function get, py::function set, bool per_rank) {
    elastic::Value value;
    value.save = [get = shared(std::move(get))](std::string& bytes) {
      const py::gil_scoped_acquire gil;
      read((*get)(), bytes);
    };
    value.load = [set = shared(std::move(set))](const std::string& bytes) {
      const py::gil_scoped_acquire gil;
      (*set)(py::bytes(bytes));
    };
    value.scope = per_rank ? elastic::Value::Scope::Rank : elastic::Value::Scope::World;
    state_->add(name, std::move(value));
  }
  void add_samples(const std::string& name, py::function position) {
    state_->add_samples(name, [position = shared(std::move(position))] {
      const py::gil_scoped_acquire gil;
      const auto [epoch, cursor] = py::cast<std::pair<std::int64_t, std::int64_t>>((*position)());
      return elastic::SamplePosition{epoch, cursor};
    });
  }
  void on_change(py::function callback) {
    state_->on_change([callback = shared(std::move(callback))](const elastic::World& world) {
      const py::gil_scoped_acquire gil;
      (*callback)(world.rank(), world.size(), world.first_size());
    });
  }

  void after_step(py::function callback) {
    state_->after_step([callback = shared(std::move(callback))] {
      const py::gil_scoped_acquire gil;
      (*callback)();
    });
  }

  // Seldom waits, because the others' reports on the last step have usually arrived when this step has been reduced.
  void step() {
    const py::gil_scoped_release release;
    state_->step();
  }
  void advance() { state_->advance(); }
  std::int64_t steps() const { return state_->steps(); }
  void set_steps(std::int64_t steps) { state_->set_steps(steps); }

  int enter(const PyCommunicator& comm, std::optional<std::uint64_t> epoch, const std::string& ledger) {
    comm.member().call<void>("elastic.run", [&](Communicator& communicator) {
      world_.emplace(communicator, epoch);
      state_->enter(*world_, ledger);
    });
    return world_->first_size();
  }
  bool leave(const py::object& error) {
    const Error own = from_python(error);
    const std::string text = py::str(error);
    const bool planned = py::isinstance(error, py::module_::import("cohort.elastic").attr("MembershipChanged"));
    const py::gil_scoped_release release;
    const bool goes_on = planned ? state_->leave(elastic::MembershipChanged(own.code(), text))
                                 : state_->leave(Error(own.code(), text, own.context()));
    if (goes_on) world_.reset();
    return goes_on;
  }
  void finish() {
    const py::gil_scoped_release release;
    state_->finish();
  }
  bool ends_without_world(const py::object& error) {
    const Error own = from_python(error);
    const py::gil_scoped_release release;
    return state_->ends_without_world(own);
  }
  std::string await_members() {
    const py::gil_scoped_release release;
    switch (state_->await_members()) {
      case elastic::State::Wait::Over: return "over";
      case elastic::State::Wait::Save: return "save";
      case elastic::State::Wait::End: return "end";
    }
    return {};
  }
  bool told_to_end() const { return state_->told_to_end(); }
  bool told_to_leave() const { return state_->told_to_leave(); }

 private:
  std::unique_ptr<elastic::State> state_;
  std::optional<elastic::World> world_;
};

}  // namespace

void bind_elastic(py::module_& module) {
  module.def(
      "has_state", [] { return status::StatusPage::own().layout().has_state.load() != 0; },
      "Whether this process has what its job has trained (`note_state`).");
  module.def(
      "lost_training",
      [](std::int64_t steps) -> std::string {
        const py::gil_scoped_release release;
        try {
          const auto reached = elastic::reached();
          const auto lost = reached ? elastic::lost_state(*reached, steps) : std::nullopt;
          return lost ? lost->what() : "";
        } catch (const Error& error) {
          return fmt::format("whether others had trained before these ranks came cannot be asked: {}", error.what());
        }
      },
      py::arg("steps"),
      "Why ranks that have all come anew, with the state after so many steps (-1: not known), cannot begin: others "
      "had\n"
      "trained in this attempt of the job. Empty: they can.");
  module.def(
      "note_trained",
      [](std::int64_t steps) {
        static auto* const progress = new elastic::Progress();  // never destroyed, because its own thread writes
        progress->note(steps);
      },
      py::arg("steps"), "A step has ended, as the first rank says it; 0: the number is not known.");
  py::class_<Pieces>(module, "Pieces", "What several arrays hold, read at the time it is asked for.")
      .def(py::init<const py::list&>(), py::arg("arrays"))
      .def("__bytes__", [](const Pieces& self) {
        std::string bytes;
        self.read(bytes);
        return py::bytes(bytes);
      });
  py::class_<Watch>(module, "Watch", "Whether memory, which has to stay, has changed since it was asked last.")
      .def(py::init<std::uintptr_t, std::size_t>(), py::arg("address"), py::arg("bytes"))
      .def("changed", &Watch::changed)
      .def_property_readonly("copy", [](const Watch& self) { return py::bytes(self.copy()); });
  module.def(
      "digest",
      [](const py::list& arrays) {
        static const DigestKey key = make_digest_key();
        const std::vector<Array> all = arrays_of(arrays, Access::Read, {"digest", "array"});
        const py::gil_scoped_release release;
        std::uint64_t sum = 0;
        for (const Array& array : all) {
          const Digest one = digest_of(array.const_buffer(), key);
          sum = sum * 0x9e3779b97f4a7c15 + one[0];
        }
        return sum;
      },
      py::arg("arrays"), "64 bits that differ if the arrays do, in this process.");
  py::class_<ElasticState>(module, "ElasticState", "See cohort::elastic::State.")
      .def(py::init<>())
      .def("add_part", &ElasticState::add_part, py::arg("name"), py::arg("contents"), py::arg("assign"),
           py::arg("version"))
      .def("add_value", &ElasticState::add_value, py::arg("name"), py::arg("get"), py::arg("set"), py::arg("per_rank"))
      .def("add_samples", &ElasticState::add_samples, py::arg("name"), py::arg("position"))
      .def("on_change", &ElasticState::on_change, py::arg("callback"))
      .def("after_step", &ElasticState::after_step, py::arg("callback"))
      .def("step", &ElasticState::step)
      .def("advance", &ElasticState::advance)
      .def_property_readonly("steps", &ElasticState::steps)
      .def("set_steps", &ElasticState::set_steps, py::arg("steps"))
      .def("enter", &ElasticState::enter, py::arg("comm"), py::arg("epoch"), py::arg("ledger"))
      .def("leave", &ElasticState::leave, py::arg("error"))
      .def("ends_without_world", &ElasticState::ends_without_world, py::arg("error"))
      .def("await_members", &ElasticState::await_members)
      .def("finish", &ElasticState::finish)
      .def_property_readonly("told_to_end", &ElasticState::told_to_end)
      .def_property_readonly("told_to_leave", &ElasticState::told_to_leave);
}

}  // namespace cohort::python
