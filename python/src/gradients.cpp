// The core of data-parallel training for cohort.nn: torch's autograd hooks are in Python and call it. The GIL is held
// except while starting operations, waiting for them and reading parameters.
#include "arguments.h"
#include "bindings.h"
#include "errors.h"
#include "train/gradients/options.h"
#include "train/gradients/power_sgd.h"
#include "train/gradients/reducer.h"
#include "train/gradients/shares.h"
#include "train/step/methods.h"

#include <fmt/ranges.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace cohort::python {
namespace {

namespace core = cohort::gradients;

class PendingOperation final : public step::Pending {
 public:
  explicit PendingOperation(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}
  ~PendingOperation() override {
    if (!operation_) return;
    const py::gil_scoped_acquire gil;
    if (!operation_->done()) operation_->let_go_at_end();  // a backward has failed
    operation_ = nullptr;
  }
  PendingOperation(const PendingOperation&) = delete;
  PendingOperation& operator=(const PendingOperation&) = delete;
  void wait() override {
    const py::gil_scoped_acquire gil;
    if (operation_) operation_->wait(std::nullopt);
  }
  void synchronize(const Device& stream) override {
    const py::gil_scoped_acquire gil;
    if (operation_) operation_->synchronize(stream);
  }
  std::optional<bool> finite() const override {
    if (!operation_) return std::nullopt;
    const py::gil_scoped_release release;
    return operation_->finite();
  }

 private:
  std::shared_ptr<Operation> operation_;  // none: the operation has finished
};

/// Communication that a user's hook has started; cohort.nn's `finish()` ends it.
class PendingHook final : public step::Pending {
 public:
  explicit PendingHook(py::object hooked) : hooked_(std::move(hooked)) {}
  void wait() override { hooked_.attr("finish")(); }
  void synchronize(const Device& /*stream*/) override { wait(); }
  std::optional<bool> finite() const override { return std::nullopt; }

 private:
  py::object hooked_;
};

class RanksOfMember final : public step::Ranks {
 public:
  explicit RanksOfMember(std::shared_ptr<Member> member) : member_(std::move(member)) {}
  int rank() const override { return member_->rank; }
  int size() const override { return member_->size; }
  int local_size() const override { return member_->local_size; }
  const std::string& host() const override { return member_->host; }
  std::vector<int> hosts() const override { return member_->hosts; }
  Memory allocate(std::size_t bytes) override { return member_->allocate(bytes); }
  std::unique_ptr<step::Pending> start(const char* name, const Start& start,
                                       std::shared_ptr<const void> keep) override {
    const py::gil_scoped_acquire gil;
    return std::make_unique<PendingOperation>(member_->start(name, start, {}, std::move(keep)));
  }

 private:
  std::shared_ptr<Member> member_;
};

/// Wraps a Python object so that it may be released without the GIL.
std::shared_ptr<const void> kept(py::object object) {
  return {object.release().ptr(), [](PyObject* pointer) {
            const py::gil_scoped_acquire gil;
            Py_DECREF(pointer);
          }};
}

/// Calls cohort.nn's Reducer, which owns this object, so the reference to it is weak.
class Hooks final : public core::Autograd, public Observer {
 public:
  explicit Hooks(const py::object& reducer) : reducer_(reducer) {}
  void take_places() override { call("take_places"); }
  bool put_in_place(std::size_t parameter) override { return py::cast<bool>(call("put_in_place", parameter)); }
  void give(std::size_t parameter) override { call("give", parameter); }
  void drop(std::size_t parameter) override { call("drop", parameter); }
  void drop_all() override { call("drop_all"); }
  std::vector<std::span<const std::byte>> values_of(std::span<const int> parameters) override {
    std::vector<std::span<const std::byte>> values;
    for (const py::handle one : call("values_of", std::vector<int>(parameters.begin(), parameters.end()))) {
      const auto [address, bytes] = py::cast<std::pair<std::uintptr_t, std::size_t>>(one);
      values.emplace_back(reinterpret_cast<const std::byte*>(address), bytes);
    }
    return values;
  }
  void compare(std::span<const int> parameters, std::int64_t step) override {
    call("compare", std::vector<int>(parameters.begin(), parameters.end()), step);
  }
  void call_at_end(std::shared_ptr<void> pass) override {
    auto held = std::make_unique<std::shared_ptr<void>>(std::move(pass));
    const py::capsule capsule(held.get(), [](void* one) { delete static_cast<std::shared_ptr<void>*>(one); });
    static_cast<void>(held.release());
    call("call_at_end", capsule);
  }
  void clear(std::size_t parameter) override { call("clear", parameter); }
  void keep(std::size_t parameter) override { call("keep", parameter); }
  void put_back(std::size_t parameter) override { call("put_back", parameter); }
  void drop_kept() override { call("drop_kept"); }
  void put_aside() override { call("put_aside"); }
  Memory allocate(const Device& gpu, std::size_t bytes) override {
    py::object tensor = call("allocate", gpu.index, bytes);
    void* const data = reinterpret_cast<void*>(py::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
    return core::memory_of(data, bytes, kept(std::move(tensor)));
  }
  void* stream_of(const Device& gpu) override {
    return reinterpret_cast<void*>(py::cast<std::uintptr_t>(call("stream_of", gpu.index)));
  }
  bool are_finite(std::span<const int> parameters) override {
    return py::cast<bool>(call("are_finite", std::vector<int>(parameters.begin(), parameters.end())));
  }
  std::vector<std::byte> copy_to_host(std::size_t parameter) override {
    const auto bytes = py::cast<std::string>(call("copy_to_host", parameter));
    const auto* const begin = reinterpret_cast<const std::byte*>(bytes.data());
    return {begin, begin + bytes.size()};
  }
  void on_bucket_ready(const BucketEvent& event) override { call("on_bucket_ready", event.index, event.bytes); }
  template <class... Args>
  py::object call(const char* name, Args&&... args) {
    return reducer_().attr(name)(std::forward<Args>(args)...);
  }

 private:
  py::weakref reducer_;
};

using Described = std::tuple<std::string, std::string, std::vector<std::int64_t>, std::vector<std::int64_t>, int>;

std::vector<core::Parameter> parameters_of(const std::vector<Described>& described) {
  std::vector<core::Parameter> parameters;
  for (const auto& [name, dtype, sizes, strides, gpu] : described) {
    parameters.push_back({.name = name,
                          .dtype = named_dtype(dtype).value(),
                          .sizes = sizes,
                          .strides = strides,
                          .device = gpu < 0 ? Device{} : Device{DeviceType::CUDA, gpu}});
  }
  return parameters;
}

/// Makes the shards; collective.
std::shared_ptr<core::Shards> shards_of(const PyCommunicator& comm, nn::Sharding sharding) {
  if (sharding == nn::Sharding::None) return nullptr;
  return comm.shared()->call<std::shared_ptr<core::Shards>>(
      "DistributedDataParallel", [&](Communicator& world) { return std::make_shared<core::Shards>(world, sharding); });
}

template <class T>
void read_option(const char* name, const py::object& value, T& option) {
  const auto wrong = [&](const std::string& why) {
    refuse("DistributedDataParallel", fmt::format("{}={} {}", name, std::string(py::repr(value)), why));
  };
  if constexpr (std::is_same_v<T, WireFormat>) {
    option = wire_format_of("DistributedDataParallel", value);
  } else if constexpr (std::is_enum_v<T>) {
    const auto names = core::names_of(option);
    const auto found = std::ranges::find(names, std::string(py::str(value)));
    if (found == names.end()) wrong(fmt::format("-- {} are possible", fmt::join(names, ", ")));
    option = static_cast<T>(found - names.begin());
  } else {
    if (!py::detail::make_caster<T>().load(value, true)) wrong("is no value of it");
    option = py::cast<T>(value);
  }
}

/// Returns the options' defaults by name, as Python values.
py::dict standard_options() {
  const nn::DistributedDataParallelOptions standard;
  py::dict all;
  core::visit_options(standard, [&all](const char* name, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, WireFormat>)
      all[name] = py::none();
    else if constexpr (std::is_enum_v<Value>)
      all[name] = std::string(core::names_of(value)[static_cast<std::size_t>(value)]);
    else
      all[name] = value;
  });
  return all;
}

/// `options` has an attribute for each option; None: the defaults.
nn::DistributedDataParallelOptions options_of(const py::object& options, Observer* observer = nullptr) {
  nn::DistributedDataParallelOptions own;
  if (options.is_none()) return own;
  core::visit_options(own, [&](const char* name, auto& option) { read_option(name, options.attr(name), option); });
  if (!options.attr("observer").is_none()) own.observer = observer;
  return own;
}

[[noreturn]] void raise_non_finite(const NonFiniteError& error) {
  const NonFiniteGradient& gradient = error.gradient();
  const py::object raised =
      py::module_::import("cohort.nn._non_finite")
          .attr("error_of")(error.what(), gradient.rank, gradient.host, gradient.parameter, gradient.element.index,
                            py::tuple(py::cast(gradient.element.position)), gradient.element.value, gradient.step);
  raised.attr("rank") = error.context().rank;
  raised.attr("host") = error.context().host;
  raised.attr("operation") = error.context().operation;
  PyErr_SetObject(py::type::handle_of(raised).ptr(), raised.ptr());
  throw py::error_already_set();
}

class GradientReducer {
 public:
  GradientReducer(const PyCommunicator& comm, const std::vector<Described>& parameters, const py::object& options,
                  const py::object& hooks, std::shared_ptr<step::Transaction> transaction)
      : hooks_(hooks),
        member_(comm.shared()),
        core_(std::make_shared<RanksOfMember>(member_), parameters_of(parameters), options_of(options, &hooks_), hooks_,
              core::reduce_by_average, shards_of(comm, options_of(options).sharding), std::move(transaction)) {}
  core::Reducer& core() noexcept { return core_; }

  /// Called if cohort.nn's Reducer has a hook.
  void use_hook() {
    core_.use_hook([this](const core::HookedBucket& hooked) {
      std::vector<std::size_t> offsets;
      for (std::size_t position = 0; position < hooked.bucket.members().size(); ++position) {
        offsets.push_back(hooked.bucket.offset(position) / size_of(hooked.bucket.dtype()));
      }
      return std::make_unique<PendingHook>(hooks_.call("run_hook", hooked.number, hooked.last, hooked.bucket.memory(),
                                                       hooked.bucket.members(), offsets, hooked.share,
                                                       hooked.last_step_refused));
    });
  }
  py::list buckets() const {
    py::list all;
    for (const core::Bucket& bucket : core_.buckets()) {
      std::vector<int> members;  // parameters that have a place
      std::vector<std::size_t> offsets;
      for (std::size_t position = 0; position < bucket.members().size(); ++position) {
        if (bucket.place(position).data == nullptr) continue;
        members.push_back(bucket.members()[position]);
        offsets.push_back(bucket.offset(position) / size_of(bucket.dtype()));
      }
      if (!members.empty()) all.append(py::make_tuple(bucket.memory(), members, offsets));
    }
    return all;
  }
  /// Returns, by parameter, the element of `homes` at which its values belong.
  std::vector<std::size_t> home_offsets() const {
    std::vector<std::size_t> offsets;
    for (std::size_t i = 0; i < core_.parameter_count(); ++i) {
      const Buffer home = core_.division().home_of(i);
      offsets.push_back(elements_between(core_.division().homes(), home));
    }
    return offsets;
  }
  /// Returns (parameter, begin, count, its average's position in `averages`), counted in elements.
  py::list pieces() const {
    py::list all;
    for (const core::Piece& piece : core_.division().pieces()) {
      const std::size_t average =
          core_.divides_gradients() ? elements_between(core_.division().averages(), core_.division().average_of(piece))
                                    : 0;
      all.append(py::make_tuple(piece.parameter, piece.begin, piece.count, average));
    }
    return all;
  }
  void meet() {
    member_->call<void>("Sharded", [&](Communicator&) { core_.division().shards()->meet(); });
  }
  void gather() {
    const Device& device = core_.division().regions().front().values.device;
    void* const stream = device.type == DeviceType::CPU ? nullptr : hooks_.stream_of(device);
    member_->call<void>("Sharded",
                        [&](Communicator&) { core_.division().shards()->gather(core_.division().regions(), stream); });
  }
  void finish() {
    try {
      core_.finish();
    } catch (const NonFiniteError& error) {
      raise_non_finite(error);
    }
  }
  bool reduce_without_backward() {
    try {
      return core_.reduce_without_backward();
    } catch (const NonFiniteError& error) {
      raise_non_finite(error);
    }
  }
  py::dict stats() {
    const nn::ReducerStats& stats = core_.stats();
    using namespace py::literals;
    return py::dict("steps"_a = stats.steps, "non_finite_steps"_a = stats.non_finite_steps,
                    "parameter_comparisons"_a = stats.parameter_comparisons, "buckets"_a = stats.buckets,
                    "bucket_bytes"_a = stats.bucket_bytes,
                    "exposed_communication_seconds"_a = stats.exposed_communication_seconds,
                    "exposed_communication_seconds_total"_a = stats.exposed_communication_seconds_total,
                    "gradients_written"_a = stats.gradients_written, "gradients_moved"_a = stats.gradients_moved);
  }

 private:
  static std::size_t elements_between(const Memory& memory, const Buffer& buffer) {
    return static_cast<std::size_t>(static_cast<std::byte*>(buffer.data) - static_cast<std::byte*>(memory.data())) /
           size_of(buffer.dtype);
  }

  Hooks hooks_;
  std::shared_ptr<Member> member_;
  core::Reducer core_;
};

using Matrix = std::tuple<std::string, std::uintptr_t, std::int64_t, std::int64_t, std::int64_t>;

void start_power_sgd(core::PowerSGD& self, const PyCommunicator& comm, std::uintptr_t address, std::int64_t count,
                     const std::string& dtype, const std::vector<Matrix>& gradients, py::object tensor) {
  std::vector<core::PowerSGD::Matrix> matrices;
  for (const auto& [name, parameter, offset, rows, columns] : gradients) {
    matrices.push_back({reinterpret_cast<const void*>(parameter), offset, rows, columns, name});
  }
  RanksOfMember ranks(comm.shared());
  std::shared_ptr<const void> keep = kept(std::move(tensor));
  const py::gil_scoped_release release;
  self.start(ranks, {reinterpret_cast<void*>(address), count, named_dtype(dtype).value()}, std::move(matrices),
             std::move(keep));
}

void finish_power_sgd(core::PowerSGD& self, const PyCommunicator& comm) {
  RanksOfMember ranks(comm.shared());
  const py::gil_scoped_release release;
  self.finish(ranks);
}

py::bytes bytes_of(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

std::vector<float> floats_of(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

void bind_power_sgd(py::module_& module) {
  using core::PowerSGD;
  py::class_<PowerSGD>(module, "PowerSGD")
      .def(py::init([](std::int64_t rank, std::int64_t start, double rate, bool feedback, bool warm, double epsilon,
                       std::uint64_t seed) {
             return PowerSGD({.matrix_approximation_rank = rank,
                              .start_powerSGD_iter = start,
                              .min_compression_rate = rate,
                              .use_error_feedback = feedback,
                              .warm_start = warm,
                              .orthogonalization_epsilon = epsilon,
                              .random_seed = seed});
           }),
           py::arg("matrix_approximation_rank"), py::arg("start_powerSGD_iter"), py::arg("min_compression_rate"),
           py::arg("use_error_feedback"), py::arg("warm_start"), py::arg("orthogonalization_epsilon"),
           py::arg("random_seed"))
      .def("start", &start_power_sgd, py::arg("comm"), py::arg("address"), py::arg("count"), py::arg("dtype"),
           py::arg("gradients"), py::arg("tensor"))
      .def("finish", &finish_power_sgd, py::arg("comm"))
      .def("forget", &PowerSGD::forget)
      .def("drop_residuals", &PowerSGD::drop_residuals)
      .def_property_readonly("iteration", &PowerSGD::iteration)
      .def("compression_stats", &PowerSGD::compression_stats)
      .def("kept",
           [](const PowerSGD& self) {
             py::list all;
             for (const auto& [key, one] : self.kept()) {
               all.append(py::make_tuple(key, one.rows, one.columns, bytes_of(one.error), bytes_of(one.q)));
             }
             return all;
           })
      .def("restore",
           [](PowerSGD& self, std::int64_t iteration,
              const std::vector<std::tuple<std::string, std::int64_t, std::int64_t, std::string, std::string>>& saved) {
             std::map<std::string, PowerSGD::Kept> all;
             for (const auto& [key, rows, columns, error, q] : saved) {
               all[key] = {.rows = rows, .columns = columns, .error = floats_of(error), .q = floats_of(q)};
             }
             self.restore(iteration, std::move(all));
           });
}

using Named = std::tuple<std::string, std::vector<std::int64_t>, std::size_t, py::object, py::function>;

void require_same_parameters(const PyCommunicator& comm, const std::vector<Named>& named, std::int64_t step) {
  std::vector<Array> arrays;
  std::vector<step::NamedValues> values;
  for (const auto& [name, sizes, element_size, bytes, text] : named) {
    const ConstBuffer buffer =
        arrays.emplace_back(bytes, Access::Read, Role{"require_same_parameters", "tensor"}).const_buffer();
    values.push_back({.name = name,
                      .sizes = sizes,
                      .element_size = element_size,
                      .bytes = {static_cast<const std::uint8_t*>(buffer.data), buffer.bytes()},
                      .text = [function = &text](std::int64_t index) {
                        const py::gil_scoped_acquire gil;
                        return py::cast<std::string>((*function)(index));
                      }});
  }
  RanksOfMember ranks(comm.shared());
  const py::gil_scoped_release release;
  step::require_same_parameters(ranks, values, step);
}

/// State that a Python method keeps between steps.
class KeptInPython final : public step::Kept {
 public:
  explicit KeptInPython(py::function drop) : drop_(std::move(drop)) {}

 private:
  void clear() override { drop_(); }
  py::function drop_;
};

std::shared_ptr<step::Transaction> transaction_of(const std::string& method) {
  const auto of = [](step::Method one) { return std::make_shared<step::Transaction>(std::move(one)); };
  if (method == "Sharded") return of(step::sharded());
  if (method == "LocalSteps") return of(step::local_steps());
  if (method == "divided") return of(step::data_parallel(true));
  return of(step::data_parallel(false));
}

using Shown = std::tuple<std::string, std::uintptr_t, std::string, std::string, std::vector<std::int64_t>, bool>;

void update(step::Transaction& self, const std::vector<Shown>& shown, const char* where, const char* advice) {
  std::vector<step::Shown> all;
  for (const auto& [name, identity, type, device, sizes, requires_grad] : shown) {
    all.push_back({name, reinterpret_cast<const void*>(identity), type, device, sizes, requires_grad});
  }
  self.trained().update(std::move(all), where, advice);
}

void end(step::Transaction& self, const std::string& by, bool accepted) {
  const step::Outcome outcome = accepted ? step::Outcome::Accepted : step::Outcome::NotFinite;
  self.end(by == "averages" ? step::Decision::by_averages(outcome)
           : by == "error"  ? step::Decision::by_error(step::Outcome::Lost)
                            : step::Decision::none());
}

void bind_transaction(py::module_& module) {
  using step::Transaction;
  using Options = std::vector<std::tuple<std::string, std::string, std::string>>;
  py::class_<Transaction, std::shared_ptr<Transaction>>(module, "Transaction")
      .def(py::init(&transaction_of), py::arg("method"))
      .def("update", &update, py::arg("shown"), py::arg("where"), py::arg("advice"))
      .def("unchanged", [](Transaction& self) { self.trained().unchanged(); })
      .def(
          "agree",
          [](Transaction& self, const Options& options) {
            std::vector<step::Option> all;
            for (const auto& [owner, name, value] : options) all.push_back({owner, name, value});
            self.agreement().set(std::move(all));
          },
          py::arg("options"))
      .def(
          "tag", [](Transaction& self, std::uint64_t more) { return self.agreement().tag(more); }, py::arg("more"))
      .def("sums", [](Transaction& self) { return self.agreement().sums(); })
      .def(
          "require",
          [](Transaction& self, const PyCommunicator& comm) {
            RanksOfMember ranks(comm.shared());
            self.agreement().require(ranks);
          },
          py::arg("comm"))
      .def(
          "require_sums",
          [](Transaction& self, const PyCommunicator& comm, const std::vector<double>& sums, const char* where) {
            RanksOfMember ranks(comm.shared());
            self.agreement().require(ranks, sums, where);
          },
          py::arg("comm"), py::arg("sums"), py::arg("where"))
      .def(
          "explain",
          [](Transaction& self, const PyCommunicator& comm, const py::object& error) {
            RanksOfMember ranks(comm.shared());
            self.agreement().explain(ranks, from_python(error));
          },
          py::arg("comm"), py::arg("error"))
      .def(
          "keep",
          [](Transaction& self, const std::string& name, py::function drop) {
            self.keep(name, std::make_shared<KeptInPython>(std::move(drop)));
          },
          py::arg("name"), py::arg("drop"))
      .def("resume", &Transaction::resume)
      .def("end", &end, py::arg("by"), py::arg("accepted"));
}

template <class Function>
auto accumulation(Function function) {
  return [function](GradientReducer& self) { return function(self.core().accumulation()); };
}

}  // namespace

void bind_gradients(py::module_& module) {
  bind_transaction(module);
  module.def("warn_of_unused_shares", &core::warn_of_unused_shares);
  module.def(
      "agreed_options",
      [](const py::object& options) {
        std::vector<std::tuple<std::string, std::string, std::string>> all;
        for (const step::Option& one : core::agreed(options_of(options))) all.emplace_back("", one.name, one.value);
        return all;
      },
      py::arg("options"));
  module.def("standard_options", &standard_options);
  module.def(
      "compute_threads", [](const py::object& options) { return core::threads_of(options_of(options)); },
      py::arg("options"));
  module.def("virtual_seed", &core::virtual_seed, py::arg("seed"), py::arg("epoch"), py::arg("cursor"),
             py::arg("virtual_rank"));
  module.def(
      "block_of",
      [](int virtual_ranks, int ranks, int rank) {
        const core::VirtualRange block = core::block_of(virtual_ranks, ranks, rank);
        return std::pair(block.begin, block.end);
      },
      py::arg("virtual_ranks"), py::arg("ranks"), py::arg("rank"));
  py::class_<core::SampleShares>(module, "SampleShares")
      .def(py::init<const std::string&>(), py::arg("text"))
      .def("require_world", &core::SampleShares::require_world, py::arg("size"))
      .def("part", &core::SampleShares::part, py::arg("total"), py::arg("rank"), py::arg("size"), py::arg("place"))
      .def("bind", [](core::SampleShares& self,
                      const PyCommunicator& comm) { self.bind(std::make_shared<RanksOfMember>(comm.shared())); })
      .def("reset", &core::SampleShares::reset)
      .def("begin_step", &core::SampleShares::begin_step, py::arg("total"), py::arg("drawn"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "end_step", [](core::SampleShares& self, std::int64_t own) { self.end_step(own); }, py::arg("own"));
  py::class_<GradientReducer>(module, "GradientReducer")
      .def(py::init<const PyCommunicator&, const std::vector<Described>&, const py::object&, const py::object&,
                    std::shared_ptr<step::Transaction>>(),
           py::arg("comm"), py::arg("parameters"), py::arg("options"), py::arg("hooks"), py::arg("transaction"))
      .def("lay_out", [](GradientReducer& self) { self.core().lay_out(); })
      .def("use_hook", &GradientReducer::use_hook)
      .def("buckets", &GradientReducer::buckets)
      .def("slot_of",
           [](GradientReducer& self, const std::string& name) {
             const nn::BucketSlot slot = self.core().slot_of(name);
             return py::make_tuple(slot.bucket, reinterpret_cast<std::uintptr_t>(slot.begin), slot.bytes, slot.offset);
           })
      .def_property_readonly("in_no_sync", accumulation([](core::Accumulation& all) { return all.in_no_sync(); }))
      .def_property_readonly("in_step", [](GradientReducer& self) { return self.core().in_step(); })
      .def_property_readonly("step_complete", [](GradientReducer& self) { return self.core().step_complete(); })
      .def_property_readonly("virtual_rank",
                             [](GradientReducer& self) { return self.core().virtual_part()->ranks().due(); })
      .def("count_parts_once", accumulation([](core::Accumulation& all) { all.count_parts_once(); }))
      .def(
          "mean_loss", [](GradientReducer& self, double loss) { return self.core().mean_loss(loss); }, py::arg("loss"))
      .def_property_readonly("has_forward", accumulation([](core::Accumulation& all) { return all.has_forward(); }))
      .def("enter_no_sync", accumulation([](core::Accumulation& all) { all.enter_no_sync(); }))
      .def("leave_no_sync", accumulation([](core::Accumulation& all) { all.leave_no_sync(); }))
      .def("add_forward",
           [](GradientReducer& self, std::optional<std::int64_t> declared, std::optional<std::int64_t> rows,
              std::optional<std::uint64_t> batch,
              std::optional<std::int64_t> epoch) { self.core().add_forward(declared, rows, batch, epoch); })
      .def_property_readonly("wants_batch", [](GradientReducer& self) { return self.core().wants_batch(); })
      .def_property_readonly("in_backward", [](GradientReducer& self) { return self.core().in_backward(); })
      .def("prepare_synchronising_pass", [](GradientReducer& self) { self.core().prepare_synchronising_pass(); })
      .def("require_whole", [](GradientReducer& self) { self.core().require_whole(); })
      .def("begin_backward", [](GradientReducer& self) { self.core().begin_backward(); })
      .def("receive", [](GradientReducer& self, std::size_t parameter) { return self.core().receive(parameter); })
      .def("can_read", [](GradientReducer& self, std::size_t parameter) { return self.core().can_read(parameter); })
      .def("read_from",
           [](GradientReducer& self, std::size_t parameter, std::uintptr_t address, py::object gradient) {
             self.core().read_from(parameter, reinterpret_cast<const void*>(address), kept(std::move(gradient)));
           })
      .def("received", [](GradientReducer& self, std::size_t parameter) { return self.core().received(parameter); })
      .def("is_local", [](GradientReducer& self, std::size_t parameter) { return self.core().is_local(parameter); })
      .def("arrive", [](GradientReducer& self, std::size_t parameter) { self.core().arrive(parameter); })
      .def("finish", &GradientReducer::finish)
      .def("reduce_without_backward", &GradientReducer::reduce_without_backward)
      .def_property_readonly("progress", [](GradientReducer& self) { return self.core().progress(); })
      .def("most_advanced", [](GradientReducer& self) { return self.core().most_advanced(); })
      .def("take_plan_of",
           [](GradientReducer& self, int source, std::int64_t progress) { self.core().take_plan_of(source, progress); })
      .def("count_written", [](GradientReducer& self) { ++self.core().stats().gradients_written; })
      .def("count_moved", [](GradientReducer& self) { ++self.core().stats().gradients_moved; })
      .def("count_parameter_comparison", [](GradientReducer& self) { ++self.core().stats().parameter_comparisons; })
      .def("go_on_from", [](GradientReducer& self, GradientReducer& before) { self.core().go_on_from(before.core()); })
      .def_property_readonly("divides_gradients", [](GradientReducer& self) { return self.core().divides_gradients(); })
      .def_property_readonly("shares_parameters",
                             [](GradientReducer& self) { return self.core().division().shards()->shares_parameters(); })
      .def_property_readonly("writes_shared",
                             [](GradientReducer& self) { return self.core().division().shards()->writes_shared(); })
      .def("homes", [](GradientReducer& self) { return self.core().division().homes(); })
      .def("averages", [](GradientReducer& self) { return self.core().division().averages(); })
      .def("home_offsets", &GradientReducer::home_offsets)
      .def("pieces", &GradientReducer::pieces)
      .def("protect_parameters", [](GradientReducer& self) { self.core().protect_parameters(); })
      .def("allow_writes", [](GradientReducer& self) { self.core().division().allow_writes(); })
      .def("forbid_writes", [](GradientReducer& self) { self.core().division().forbid_writes(); })
      .def("meet", &GradientReducer::meet)
      .def("gather", &GradientReducer::gather)
      .def("reads", [](GradientReducer& self, std::size_t parameter) { return self.core().reads(parameter); })
      .def_property_readonly("in_sync", accumulation([](core::Accumulation& all) { return all.sync(); }))
      .def("residuals",
           [](GradientReducer& self) {
             py::dict views;
             for (const auto& [name, values] : self.core().residuals())
               views[py::str(name)] =
                   py::memoryview::from_memory(values.data(), static_cast<py::ssize_t>(values.size_bytes()));
             return views;
           })
      .def("stats", &GradientReducer::stats);
  bind_power_sgd(module);
  module.def(
      "require_same_on_all_ranks",
      [](const PyCommunicator& comm, const std::vector<std::string>& lines, const std::string& who) {
        RanksOfMember ranks(comm.shared());
        step::require_same_on_all_ranks(ranks, lines, who.c_str());
      },
      py::arg("comm"), py::arg("lines"), py::arg("who"));
  module.def("require_same_parameters", &require_same_parameters, py::arg("comm"), py::arg("named"), py::arg("step"));
  module.def("non_finite_text", [](int rank, const std::string& host, const std::string& parameter,
                                   const std::vector<std::int64_t>& sizes, std::int64_t index, double value,
                                   std::int64_t step) {
    return core::text_of({.rank = rank,
                          .host = host,
                          .parameter = parameter,
                          .element = {.index = index, .position = step::position_of(index, sizes), .value = value},
                          .step = step},
                         sizes);
  });
}

}  // namespace cohort::python
