// cohort.Communicator: who it is, groups, memory, and how it ends. The operations are in collectives.cpp.
#include "arguments.h"
#include "bindings.h"

#include <pybind11/stl.h>

namespace cohort::python {
namespace {

using Result = std::optional<PyCommunicator>;  // none where this rank is in no group

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

}  // namespace cohort::python
