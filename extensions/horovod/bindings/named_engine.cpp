// cohort._core.NamedEngine: operations by name. Turns arrays into requests; horovod/named defines their meaning.
#include "arguments.h"
#include "errors.h"
#include "horovod/bindings/named.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace cohort::python {
namespace {

using named::Kind;
using named::Request;

/// The Python object. An engine that Python drops runs until nothing is outstanding.
class PyNamedEngine {
 public:
  explicit PyNamedEngine(std::shared_ptr<NamedWorld> world) noexcept : world_(std::move(world)) {}
  ~PyNamedEngine() {
    if (world_) NamedWorld::let_go(std::move(world_));
  }
  PyNamedEngine(PyNamedEngine&&) = default;
  PyNamedEngine& operator=(PyNamedEngine&&) = delete;
  NamedWorld& world() const noexcept { return *world_; }

 private:
  std::shared_ptr<NamedWorld> world_;
};

using Works = std::vector<std::shared_ptr<NamedOperation>>;

/// A request and the objects it keeps alive.
struct EngineCall {
  Request request;
  std::vector<Array> arrays;
  std::shared_ptr<GpuResult> result;  // null if the operation makes no result in GPU memory
};

EngineCall make(Kind kind, const py::str& name) {
  EngineCall call;
  Py_ssize_t bytes = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(name.ptr(), &bytes);
  if (text == nullptr) throw py::error_already_set();
  call.request.kind = kind;
  call.request.name.assign(text, static_cast<std::size_t>(bytes));
  return call;
}

const char* operation_of(Kind kind) noexcept { return named::name_of(kind).data(); }

Array& add(EngineCall& call, py::handle object, Access access, const char* role) {
  return call.arrays.emplace_back(object, access, Role{operation_of(call.request.kind), role}, Where::HostOrGpu);
}

void reads(EngineCall& call, py::handle input) {
  const Array& array = add(call, input, Access::Read, "the input");
  call.request.input = array.const_buffer();
  call.request.shape = array.shape();
}

struct Scaling {
  ReduceOp op;
  double prescale, postscale;
  WireFormat wire_format = WireFormat::None;
};

EngineCall reduction(Kind kind, const py::str& name, const Scaling& scaling) {
  EngineCall call = make(kind, name);
  call.request.op = scaling.op;
  call.request.prescale = scaling.prescale;
  call.request.postscale = scaling.postscale;
  return call;
}

/// Sets the format in which values travel. Call it when the input is known.
void travels(EngineCall& call, const Scaling& scaling) {
  const bool sums = scaling.op == ReduceOp::Sum || scaling.op == ReduceOp::Average;
  if (call.request.input.dtype == DType::Float32 && sums) call.request.wire_format = scaling.wire_format;
}

EngineCall all_reduce_call(const py::str& name, py::handle input, py::handle output, const Scaling& scaling) {
  EngineCall call = reduction(Kind::AllReduce, name, scaling);
  if (!output.is_none()) {
    call.arrays.reserve(2);
    reads(call, input);
    call.request.output = add(call, output, Access::Write, "the output").buffer();
  } else {
    const Array& array = add(call, input, Access::Write, "the array");
    call.request.input = array.const_buffer();
    call.request.output = array.buffer();
    call.request.shape = array.shape();
  }
  travels(call, scaling);
  return call;
}

EngineCall broadcast_call(const NamedWorld& world, const py::str& name, py::handle data, int root) {
  EngineCall call = make(Kind::Broadcast, name);
  // On the root the array is only read.
  const Access access = world.member().rank == root ? Access::Read : Access::Write;
  const Array& array = add(call, data, access, "the array");
  call.request.output = array.buffer();
  call.request.shape = array.shape();
  call.request.root = root;
  return call;
}

/// Sets up an operation that makes its output.
void gives(EngineCall& call, py::handle input) {
  reads(call, input);
  if (call.request.input.device.type == DeviceType::CPU) return;
  call.result = std::make_shared<GpuResult>(operation_of(call.request.kind), call.request.input);
  // Holds no ownership, because the last owner needs the GIL. The operation owns the result, and is kept until done.
  call.request.allocate = [made = std::weak_ptr(call.result)](std::span<const std::int64_t> shape) {
    const std::shared_ptr<GpuResult> result = made.lock();
    if (!result) throw std::runtime_error("the world has been given up");
    return result->allocate(shape);
  };
}

EngineCall input_call(Kind kind, const py::str& name, py::handle input) {
  EngineCall call = make(kind, name);
  gives(call, input);
  return call;
}

std::shared_ptr<NamedOperation> submit(const PyNamedEngine& self, EngineCall call) {
  NamedWorld& world = self.world();
  world.tidy();
  named::Handle handle = world.engine(operation_of(call.request.kind)).submit(std::move(call.request));
  return world.keep(std::move(handle), std::move(call.arrays), std::move(call.result));
}

Works submit(const PyNamedEngine& self, Kind kind, std::vector<EngineCall> calls) {
  NamedWorld& world = self.world();
  world.tidy();
  std::vector<Request> requests;
  requests.reserve(calls.size());
  for (EngineCall& call : calls) requests.push_back(std::move(call.request));
  const std::vector<named::Handle> handles = world.engine(operation_of(kind)).submit(std::move(requests));
  Works works;
  works.reserve(calls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) {
    works.push_back(world.keep(handles[i], std::move(calls[i].arrays), std::move(calls[i].result)));
  }
  return works;
}

py::str name_of(const py::object& name) {
  if (PyUnicode_Check(name.ptr()) == 0) throw py::type_error("a name has to be a str");
  return py::reinterpret_borrow<py::str>(name);
}

/// Calls `make(i, name)` for each name of a group.
template <class Make>
Works submit_group(const PyNamedEngine& self, Kind kind, const py::sequence& names, const py::sequence& arrays,
                   const Make& make) {
  if (py::len(names) != py::len(arrays)) {
    refuse(operation_of(kind), "a group of " + std::to_string(py::len(names)) + " names and " +
                                   std::to_string(py::len(arrays)) + " arrays -- give each array a name");
  }
  std::vector<EngineCall> calls;
  calls.reserve(py::len(names));
  for (std::size_t i = 0; i < py::len(names); ++i) calls.push_back(make(i, name_of(py::object(names[i]))));
  return submit(self, kind, std::move(calls));
}

Scaling scaling_of(const char* operation, const py::object& op, double prescale, double postscale) {
  return {reduce_op_of(op, operation), prescale, postscale};
}

// --- the methods ---

PyNamedEngine make_engine(const PyCommunicator& comm, std::size_t fusion_threshold, std::size_t cache_capacity,
                          const std::string& joined_average, const py::object& stall_after, const py::object& timeout,
                          const py::object& shutdown_timeout) {
  constexpr auto* kName = "NamedEngine";
  named::EngineOptions options;
  options.fusion_threshold = fusion_threshold;
  options.cache_capacity = cache_capacity;
  if (joined_average == "active") {
    options.joined_average = named::JoinedAverage::ActiveRanks;
  } else if (joined_average != "all") {
    refuse(kName, "joined_average is '" + joined_average + "' -- it is 'all' (as Horovod divides) or 'active'");
  }
  // Longer than any program runs, and can still be added to the clock without an overflow.
  constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365 * 10);
  const auto positive = [&](const py::object& seconds, const char* what) {
    const auto given = milliseconds_of(seconds, kName);
    if (given && given->count() <= 0) refuse(kName, std::string(what) + " has to be positive");
    return given ? std::optional(std::min(*given, kNever)) : std::nullopt;
  };
  options.stall_after = positive(stall_after, "stall_after").value_or(kNever);
  options.timeout = positive(timeout, "timeout");
  if (const auto patience = positive(shutdown_timeout, "shutdown_timeout")) options.shutdown_timeout = *patience;
  return PyNamedEngine(NamedWorld::make(comm.shared(), std::move(options)));
}

// all_reduce is called for every gradient of every step, so it avoids pybind11's dispatcher, its greatest cost.
constexpr const char* kParameters[] = {"name", "input", "output", "op", "prescale", "postscale", "wire_format"};
constexpr std::size_t kPositional = 3;
using Arguments = std::array<PyObject*, std::size(kParameters)>;

[[noreturn]] void refuse_arguments(const std::string& why) { throw py::type_error("all_reduce() " + why); }

Arguments arguments_of(PyObject* const* given, std::size_t count, PyObject* names) {
  static const auto interned = [] {
    std::array<PyObject*, std::size(kParameters)> made{};
    for (std::size_t i = 0; i < made.size(); ++i) made[i] = PyUnicode_InternFromString(kParameters[i]);
    return made;
  }();
  if (count > kPositional) {
    refuse_arguments("takes at most 3 positional arguments (name, input, output), not " + std::to_string(count));
  }
  Arguments arguments{};
  std::copy(given, given + count, arguments.begin());
  const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(names, i);
    auto found = std::find(interned.begin(), interned.end(), name);
    if (found == interned.end()) {
      found = std::find_if(interned.begin(), interned.end(),
                           [&](PyObject* one) { return PyUnicode_Compare(one, name) == 0; });
    }
    const auto text = [&] { return "'" + std::string(py::str(py::handle(name))) + "'"; };
    if (found == interned.end()) refuse_arguments("got an unexpected keyword argument " + text());
    PyObject*& place = arguments[static_cast<std::size_t>(found - interned.begin())];
    if (place != nullptr) refuse_arguments("got multiple values for argument " + text());
    place = given[count + static_cast<std::size_t>(i)];
  }
  if (arguments[0] == nullptr || arguments[1] == nullptr) refuse_arguments("needs a name and an input");
  if (PyUnicode_Check(arguments[0]) == 0) refuse_arguments("needs a str as the name");
  return arguments;
}

double factor_of(PyObject* number) {
  if (number == nullptr) return 1;
  const double value = PyFloat_AsDouble(number);
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

PyObject* named_all_reduce(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* names) noexcept {
  try {
    const Arguments arguments = arguments_of(given, static_cast<std::size_t>(count), names);
    const auto [name, input, output, op, prescale, postscale, wire_format] = arguments;
    const Scaling scaling{
        op != nullptr ? reduce_op_of(op, "all_reduce") : ReduceOp::Average, factor_of(prescale), factor_of(postscale),
        wire_format != nullptr ? wire_format_of("all_reduce", py::reinterpret_borrow<py::object>(wire_format))
                               : WireFormat::None};
    EngineCall call =
        all_reduce_call(py::reinterpret_borrow<py::str>(name), input, output != nullptr ? output : Py_None, scaling);
    return py::cast(submit(py::cast<const PyNamedEngine&>(py::handle(self)), std::move(call))).release().ptr();
  } catch (...) {
    raise_current();
    return nullptr;
  }
}

PyMethodDef kAllReduce = {
    "all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&named_all_reduce)),
    METH_FASTCALL | METH_KEYWORDS,
    "all_reduce($self, /, name, input, output=None, *, op='average', prescale=1.0, postscale=1.0, "
    "wire_format=None)\n--\n\n"
    "Reduces `input` over all ranks, into `output` or in place. Every rank brings the same shape. Integers are scaled "
    "in double precision and rounded toward zero. wire_format='int8' (or another): sums and averages of "
    "float32 travel so between hosts."};

Works all_reduce_group(const PyNamedEngine& self, const py::sequence& names, const py::sequence& inputs,
                       const py::object& outputs, const py::object& op, double prescale, double postscale,
                       const py::object& wire_format) {
  Scaling scaling = scaling_of("all_reduce", op, prescale, postscale);
  scaling.wire_format = wire_format_of("all_reduce", wire_format);
  py::sequence results;
  if (!outputs.is_none()) {
    results = py::cast<py::sequence>(outputs);
    if (py::len(results) != py::len(inputs)) refuse("all_reduce", "a group of as many inputs as outputs is needed");
  }
  return submit_group(self, Kind::AllReduce, names, inputs, [&](std::size_t i, const py::str& name) {
    const py::object output = outputs.is_none() ? py::none() : py::object(results[i]);
    return all_reduce_call(name, py::object(inputs[i]), output, scaling);
  });
}

Works all_gather_group(const PyNamedEngine& self, const py::sequence& names, const py::sequence& inputs,
                       bool needs_all_ranks) {
  return submit_group(self, Kind::AllGather, names, inputs, [&](std::size_t i, const py::str& name) {
    EngineCall call = input_call(Kind::AllGather, name, py::object(inputs[i]));
    call.request.needs_all_ranks = needs_all_ranks;
    return call;
  });
}

Works broadcast_group(const PyNamedEngine& self, const py::sequence& names, const py::sequence& data, int root,
                      bool needs_all_ranks) {
  return submit_group(self, Kind::Broadcast, names, data, [&](std::size_t i, const py::str& name) {
    EngineCall call = broadcast_call(self.world(), name, py::object(data[i]), root);
    call.request.needs_all_ranks = needs_all_ranks;
    return call;
  });
}

Works reduce_scatter_group(const PyNamedEngine& self, const py::sequence& names, const py::sequence& inputs,
                           const py::object& op, double prescale, double postscale, const py::object& wire_format) {
  Scaling scaling = scaling_of("reduce_scatter", op, prescale, postscale);
  scaling.wire_format = wire_format_of("reduce_scatter", wire_format);
  return submit_group(self, Kind::ReduceScatter, names, inputs, [&](std::size_t i, const py::str& name) {
    EngineCall call = reduction(Kind::ReduceScatter, name, scaling);
    gives(call, py::object(inputs[i]));
    travels(call, scaling);
    return call;
  });
}

/// Converts any iterable of integers: lists, and arrays of one dimension.
std::vector<std::int64_t> integers_of(const py::object& numbers) {
  std::vector<std::int64_t> result;
  for (const py::handle number : numbers) {
    const auto integer = py::reinterpret_steal<py::object>(PyNumber_Index(number.ptr()));
    if (!integer) throw py::error_already_set();
    result.push_back(py::cast<std::int64_t>(integer));
  }
  return result;
}

std::shared_ptr<NamedOperation> named_all_to_all(const PyNamedEngine& self, const py::str& name,
                                                 const py::object& input, const py::object& splits) {
  EngineCall call = input_call(Kind::AllToAll, name, input);
  if (!splits.is_none()) {
    call.request.splits = integers_of(splits);
    if (call.request.splits.empty()) refuse("all_to_all", "the splits are empty -- give one for each rank, or None");
  }
  return submit(self, std::move(call));
}

std::shared_ptr<NamedOperation> named_barrier(const PyNamedEngine& self, const py::str& name) {
  return submit(self, make(Kind::Barrier, name));
}

std::shared_ptr<NamedOperation> named_join(const PyNamedEngine& self) {
  NamedWorld& world = self.world();
  return world.keep(world.engine("join").join_async(), {});
}

std::optional<PyCommunicator> form_group(const PyNamedEngine& self, const std::vector<int>& ranks,
                                         const py::object& timeout) {
  NamedWorld& world = self.world();
  const auto limit = milliseconds_of(timeout, "form_group");
  const auto forming = world.keep(world.engine("form_group").form_group_async(ranks), {});
  if (!forming->wait(limit)) {
    throw Error(ErrorCode::Timeout, "form_group: the other ranks have not asked for this group within " +
                                        std::to_string(limit->count()) + " ms -- rank " +
                                        std::to_string(world.member().rank) +
                                        " -- it is still under way -- has every rank called it, with the same list?");
  }
  Communicator group = forming->outcome("form_group").group;
  if (!group) return std::nullopt;
  return PyCommunicator(world.member().add_group(std::move(group)));
}

py::dict statistics(const PyNamedEngine& self) {
  const named::Engine::Statistics now = self.world().statistics();
  py::dict result;
  result["rounds"] = now.rounds;
  result["exchanges"] = now.exchanges;
  result["batches"] = now.batches;
  result["rings"] = now.rings;
  return result;
}

std::string named_describe(const PyNamedEngine& self) {
  const Member& member = self.world().member();
  return "<cohort.NamedEngine rank " + std::to_string(member.rank) + " of " + std::to_string(member.size) +
         (self.world().has_left() ? ", shut down>" : ">");
}

}  // namespace

void bind_horovod(py::module_& module) {
  called_at_leave().push_back(&NamedWorld::forget_all);
  bind_named_calls(module);
  bind_named_result(module);
  bind_named_gpus(module);
  bind_named_work(module);
  const py::arg_v kAverage(py::arg("op") = "average");
  const py::arg_v kSum(py::arg("op") = "sum");
  const py::arg_v kPrescale(py::arg("prescale") = 1.0);
  const py::arg_v kPostscale(py::arg("postscale") = 1.0);
  const py::kw_only kOnly;
  py::class_<PyNamedEngine> engine(
      module, "NamedEngine",
      "Collectives by name: ranks ask for them in any order and from any thread, and each is carried out once all "
      "ranks "
      "have asked for it. Calls return at once; arrays, of the host's memory or a GPU's, are left alone until the "
      "operation is done. A name may be used "
      "again once its operation is done; a name that comes again with the same array shape is negotiated by one bit. "
      "What ranks disagree about fails that name alone, with Mismatch on all of them. The engine takes the "
      "communicator "
      "over: give it a split() of one that others use. It ends with that communicator's world, at the process's end, "
      "or "
      "by shutdown().");
  PyObject* const method = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(engine.ptr()), &kAllReduce);
  if (method == nullptr) throw py::error_already_set();
  engine.attr("all_reduce") = py::reinterpret_steal<py::object>(method);
  engine
      .def(
          py::init(&make_engine), py::arg("comm"), kOnly, py::arg("fusion_threshold") = std::size_t{64} << 20,
          py::arg("cache_capacity") = std::size_t{4096}, py::arg("joined_average") = "all",
          py::arg("stall_after") = 60.0, py::arg("timeout") = py::none(), py::arg("shutdown_timeout") = 30.0,
          "Every rank of `comm` makes one; does not wait for the others. Equal on all ranks: `fusion_threshold` (bytes "
          "that go together at most), `cache_capacity` (names that are remembered), `joined_average` (after a join "
          "averages divide by 'all' ranks or by the 'active' ones). In seconds: `stall_after` (rank 0 warns of names "
          "that some ranks lack for longer; None: never), `timeout` (then they fail with Timeout; None: the "
          "communicator's), `shutdown_timeout` (how long the others may take to notice the end).")
      .def("rank", [](const PyNamedEngine& self) { return self.world().member().rank; })
      .def("size", [](const PyNamedEngine& self) { return self.world().member().size; })
      .def(
          "publish", [](const PyNamedEngine& self, std::uint64_t number) { self.world().publish(number); },
          py::arg("number"),
          "Lets compiled programs of frameworks find this engine by a number, from now on and until it ends. A later "
          "engine of the same number takes its place.")
      .def(
          "allocate", [](const PyNamedEngine& self, std::size_t bytes) { return self.world().allocate(bytes); },
          py::arg("bytes"),
          "Memory that operations of this engine read and write without copies. As Communicator.allocate, which an "
          "engine's communicator refuses.")
      .def("all_reduce_group", &all_reduce_group, py::arg("names"), py::arg("inputs"), py::arg("outputs") = py::none(),
           kOnly, kAverage, kPrescale, kPostscale, py::arg("wire_format") = py::none(),
           "Several at once: all or none are accepted, and they are carried out together.")
      .def("all_gather_group", &all_gather_group, py::arg("names"), py::arg("inputs"), kOnly,
           py::arg("needs_all_ranks") = false,
           "Concatenates each rank's input along dimension 0, which may differ from rank to rank: `result` of the "
           "NamedWork. needs_all_ranks: refused while some ranks have joined, which otherwise bring no rows.")
      .def(
          "broadcast_group", &broadcast_group, py::arg("names"), py::arg("data"), py::arg("root") = 0, kOnly,
          py::arg("needs_all_ranks") = false,
          "Copies the root's arrays into those of the other ranks, in place. needs_all_ranks: refused while some ranks "
          "have joined.")
      .def("reduce_scatter_group", &reduce_scatter_group, py::arg("names"), py::arg("inputs"), kOnly, kSum, kPrescale,
           kPostscale, py::arg("wire_format") = py::none(),
           "Reduces, and gives each rank its rows of the result; where they do not divide, the first ranks get one row "
           "more. `wire_format` as for all_reduce.")
      .def("all_to_all", &named_all_to_all, py::arg("name"), py::arg("input"), py::arg("splits") = py::none(),
           "splits[s] rows of `input` go to rank s (None: equal parts); `result` holds what came, by rank, and "
           "`received_splits` the rows from each.")
      .def("barrier", &named_barrier, py::arg("name"), "Done once every rank has asked for it.")
      .def("join", &named_join,
           "This rank has no more data: it serves the others, without bringing anything, until every rank has joined. "
           "Until then it may not ask for operations.")
      .def(
          "form_group", &form_group, py::arg("ranks"), py::arg("timeout") = py::none(),
          "A Communicator of these ranks, numbered as listed. Every rank asks for the same list; those that are not in "
          "it get None. Blocks; after `timeout` seconds raises Timeout.")
      .def(
          "shutdown", [](const PyNamedEngine& self) { self.world().shutdown(); },
          "Ends the engine on all ranks: what is outstanding fails with Aborted on each. Blocks until the others have "
          "noticed. The communicator has left its world then. Again: does nothing.")
      .def("statistics", &statistics,
           "Counts since the start: rounds of negotiation, exchanges (rounds in which operations were described), "
           "batches (collectives with data), rings (rounds in which peers had to be woken).")
      .def("__repr__", &named_describe);
}

}  // namespace cohort::python
