// cohort.Communicator: its rank and size, groups, memory, and end; and cohort.Work. The operations are in
// collectives.cpp.
#include "arguments.h"
#include "bindings.h"
#include "errors.h"

#include <pybind11/stl.h>

namespace cohort::python {
namespace {

using Result = std::optional<PyCommunicator>;  // none if this rank is in no group

Result group_of(Member& member, Communicator formed) {
  if (!formed) return std::nullopt;
  return PyCommunicator(member.add_group(std::move(formed)));
}

Result split(const PyCommunicator& self, std::optional<int> color, int key, const py::object& timeout) {
  const SplitOptions options{color.value_or(kNoColor), key, milliseconds_of(timeout, "split")};
  return group_of(self.member(),
                  self.member().call<Communicator>("split", [&](Communicator& world) { return world.split(options); }));
}

Result group(const PyCommunicator& self, const std::vector<int>& ranks, const py::object& timeout) {
  const GroupOptions options{milliseconds_of(timeout, "group")};
  return group_of(self.member(), self.member().call<Communicator>(
                                     "group", [&](Communicator& world) { return world.group(ranks, options); }));
}

int join(const PyCommunicator& self, const py::object& timeout) {
  const BarrierOptions options{milliseconds_of(timeout, "join")};
  return self.member().call<int>("join", [&](Communicator& world) { return world.join(options); });
}

std::string describe(const PyCommunicator& self) {
  const Member& member = self.member();
  return "<cohort.Communicator rank " + std::to_string(member.rank) + " of " + std::to_string(member.size) + " on " +
         member.host + (member.has_left() ? ", left>" : ">");
}

}  // namespace

void bind_communicator(py::module_& module) {
  py::class_<PyCommunicator> communicator(
      module, "Communicator",
      "N ranks that act as one: collectives over a fixed set of processes. Operations take effect in the order of the "
      "calls, which has to be the same on all ranks: what differs is refused (Mismatch). After Timeout, PeerLost or "
      "Aborted it is never used again. Calls of several threads are carried out one after the other; give each thread "
      "a communicator of its own (split) if the order matters. A forked child may ask who it is, and nothing else.");
  communicator.def("rank", [](const PyCommunicator& self) { return self.member().rank; })
      .def("size", [](const PyCommunicator& self) { return self.member().size; })
      .def(
          "local_rank", [](const PyCommunicator& self) { return self.member().local_rank; },
          "Among the ranks of this host.")
      .def("local_size", [](const PyCommunicator& self) { return self.member().local_size; })
      .def(
          "cross_rank", [](const PyCommunicator& self) { return self.member().cross_rank; },
          "This host's number among the hosts that have this local rank.")
      .def("cross_size", [](const PyCommunicator& self) { return self.member().cross_size; })
      .def("host", [](const PyCommunicator& self) { return self.member().host; })
      .def(
          "timeout",
          [](const PyCommunicator& self) { return static_cast<double>(self.member().timeout.count()) / 1e3; },
          "The deadline, in seconds, of operations that give none of their own.")
      .def("split", &split, py::arg("color") = 0, py::arg("key") = 0, py::kw_only(), py::arg("timeout") = py::none(),
           "Every rank calls it. Ranks of the same color form a Communicator of their own, numbered by ascending key, "
           "and by rank where keys are equal. None as the color: in none, and None is returned. Blocks.")
      .def(
          "group", &group, py::arg("ranks"), py::kw_only(), py::arg("timeout") = py::none(),
          "The group of these ranks, numbered as listed. Every rank calls it with the same list; those that are not in "
          "it get None. Blocks.")
      .def("join", &join, py::kw_only(), py::arg("timeout") = py::none(),
           "This rank has no more input: takes part in all further operations of the others without bringing anything, "
           "until every rank has called it. Blocks; returns the rank that called it last.")
      .def(
          "allocate", [](const PyCommunicator& self, std::size_t bytes) { return self.member().allocate(bytes); },
          py::arg("bytes"),
          "Memory for collectives without copies. Local, not collective. Unavailable when the host "
          "cannot give that much.")
      .def(
          "abort", [](const PyCommunicator& self, const std::string& reason) { self.member().abort(reason); },
          py::arg("reason"),
          "Ends the world: every rank's pending and further operations raise Aborted with this "
          "reason and this rank. Any thread.")
      .def(
          "leave",
          [](const PyCommunicator& self, const py::object& grace, const std::string& reason) {
            self.member().leave({milliseconds_of(grace, "leave"), reason, false});
          },
          py::kw_only(), py::arg("grace") = py::none(), py::arg("reason") = "the rank has left",
          "Waits for what is unfinished, at most `grace` seconds (default: until its own deadlines), aborts the rest "
          "with the reason given, and leaves this world and its groups.")
      .def_property_readonly("has_left", [](const PyCommunicator& self) { return self.member().has_left(); })
      .def("__repr__", &describe);
  bind_collectives(communicator);
}

namespace {

bool wait(const PyWork& work, const py::object& timeout) {
  if (!work.operation) return true;
  const std::shared_ptr<Operation> operation = work.operation;
  return operation->wait(milliseconds_of(timeout, "wait"));
}

/// Returns the CUstream of an address or of a stream object (torch's, CuPy's). For None, torch's current stream,
/// or without torch the default stream.
void* stream_of(const py::object& stream, int gpu) {
  py::object address = stream;
  if (stream.is_none()) {
    const auto modules = py::module_::import("sys").attr("modules").cast<py::dict>();
    if (!modules.contains("torch")) return nullptr;
    address = py::object(modules["torch"]).attr("cuda").attr("current_stream")(gpu).attr("cuda_stream");
  } else if (py::hasattr(stream, "cuda_stream")) {
    address = stream.attr("cuda_stream");  // torch's
  } else if (py::hasattr(stream, "__cuda_stream__")) {
    address = py::object(stream.attr("__cuda_stream__")()).cast<py::tuple>()[1];
  } else if (py::hasattr(stream, "ptr")) {
    address = stream.attr("ptr");  // CuPy's
  }
  if (!PyLong_Check(address.ptr())) {
    refuse("synchronize", "stream is a CUDA stream of torch's or CuPy's, or its address -- and not " +
                              std::string(py::str(py::type::handle_of(stream).attr("__name__"))));
  }
  return reinterpret_cast<void*>(address.cast<std::uintptr_t>());
}

void synchronize(const PyWork& work, const py::object& stream) {
  const std::shared_ptr<Operation> operation = work.operation;
  const std::optional<int> gpu = operation ? operation->gpu() : std::nullopt;
  const Device device = gpu ? Device{DeviceType::CUDA, *gpu, stream_of(stream, *gpu)} : Device{};
  if (operation) operation->synchronize(device);
}

py::object error(const PyWork& work) {
  if (!work.operation) return py::none();
  const std::optional<Error> failed = work.operation->error();
  return failed ? to_python(*failed) : py::none();
}

std::optional<bool> finite(const PyWork& work) {
  if (!work.operation) return std::nullopt;
  const std::shared_ptr<Operation> operation = work.operation;
  const py::gil_scoped_release release;
  return operation->finite();
}

}  // namespace

void bind_work(py::module_& module) {
  py::class_<PyWork>(module, "Work",
                     "An operation under way, as `async_op=True` returns it. It goes on unattended, and keeps its "
                     "arrays alive, also if this object is dropped. Any thread may use it.")
      .def("wait", &wait, py::arg("timeout") = py::none(),
           "Blocks until the operation has finished and returns True. Raises its error: Mismatch, PeerLost, Aborted, "
           "Timeout. After `timeout` seconds (a number or a timedelta) it gives up waiting, not the operation, and "
           "returns False. A KeyboardInterrupt ends the waiting, not the operation.")
      .def("synchronize", &synchronize, py::arg("stream") = py::none(),
           "Of GPU memory that NCCL carries out: blocks until all ranks have agreed on the operation and the GPU has "
           "been given it, and puts what `stream` is given from now on after its result, which the host does not wait "
           "for. `stream` is torch's, CuPy's, or an address; default: torch's current one, without torch the default "
           "one. Tensors of torch's that came in this stream are kept no longer: torch reuses memory in its order. Of "
           "all other operations it is `wait()`. Raises what `wait()` does if the operation has failed by then. "
           "If it fails later (a rank is lost, within a second; NCCL or the stream hangs until the deadline) the world "
           "ends, the stream goes on, and what is in the array is undefined: `wait()`, `error()`, `done()`, and the "
           "next "
           "operation of this communicator, say so.")
      .def(
          "done", [](const PyWork& work) { return !work.operation || work.operation->done(); },
          "True once the operation has finished, with or without an error. Never blocks.")
      .def("error", &error, "The error of a finished operation; None while it runs and when it succeeded.")
      .def(
          "finite", &finite,
          "Of a successful all_reduce with check_finite=True: False if the result (of a list, any of them) holds a NaN "
          "or an infinity; the same on all ranks that ask, if it is asked before the result is changed: over several "
          "hosts, and in a world of one, it is read here. None for everything else. Never blocks.")
      .def(
          "source", [](const PyWork& work) { return work.operation ? work.operation->source() : std::nullopt; },
          "Of a successful recv from any source: the rank, in its communicator, whose message it took. None for "
          "everything else. Never blocks.");
}

}  // namespace cohort::python
