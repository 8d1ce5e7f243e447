// What this process is for in its job, and cohort.ClusterSpec: TensorFlow's description of a cluster.
#include "bindings.h"

#include <cohort/cluster_spec.h>
#include <cohort/role.h>
#include <cohort/servers.h>

#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <string>
#include <utility>

namespace cohort::python {
namespace {

/// {"worker": ["a:1", "b:1"]}, or {"worker": {0: "a:1", 2: "c:1"}}, or a ClusterSpec.
ClusterSpec spec_of(const py::object& cluster) {
  if (py::isinstance<ClusterSpec>(cluster)) return cluster.cast<ClusterSpec>();
  if (!py::isinstance<py::dict>(cluster))
    throw py::type_error("ClusterSpec: a dict from job to addresses is wanted, or a ClusterSpec");
  std::map<std::string, ClusterSpec::Tasks> jobs;
  for (const auto& [name, addresses] : cluster.cast<py::dict>()) {
    const auto job = name.cast<std::string>();
    try {
      if (py::isinstance<py::dict>(addresses)) {
        jobs[job] = addresses.cast<ClusterSpec::Tasks>();
        continue;
      }
      if (py::isinstance<py::str>(addresses)) throw py::cast_error();  // a sequence of letters
      int index = 0;
      ClusterSpec::Tasks& tasks = jobs[job];
      for (std::string& address : addresses.cast<std::vector<std::string>>())
        tasks.emplace(index++, std::move(address));
    } catch (const py::cast_error&) {
      throw py::type_error("ClusterSpec: " + job +
                           ": a list of addresses is wanted, or a dict from index to address; each is \"HOST:PORT\"");
    }
  }
  return ClusterSpec(std::move(jobs));
}

/// With None where there is no task of an index.
py::list listed(const ClusterSpec::Tasks& tasks) {
  py::list out;
  for (const auto& [index, address] : tasks) {
    while (static_cast<int>(out.size()) < index) out.append(py::none());
    out.append(address);
  }
  return out;
}

py::dict dict_of(const ClusterSpec& spec) {
  py::dict out;
  for (const auto& [job, tasks] : spec.as_dict()) {
    const bool dense = tasks.empty() || tasks.rbegin()->first + 1 == static_cast<int>(tasks.size());
    out[py::str(job)] = dense ? py::object(listed(tasks)) : py::cast(tasks);
  }
  return out;
}

}  // namespace

void bind_roles(py::module_& module) {
  module.def(
      "role", [] { return std::string(to_string(role())); },
      "What this process is for in its job: \"worker\", a rank of the world; \"server\"; or \"evaluator\".\n\n"
      "Said by `cohort run --servers` and --evaluator, TF_CONFIG and DMLC_ROLE; without them \"worker\". Raises\n"
      "InvalidArgument where the variables contradict each other; so do the others below.");
  module.def("role_number", &role_number,
             "This process's number among those of its role, from 0: of a worker its rank in the world.");
  module.def("num_workers", &num_workers, "How many ranks the job's world has, whatever this process is.");
  module.def("num_servers", &num_servers, "How many servers the job has.");
  module.def(
      "announce_server", &announce_server, py::arg("address"), py::call_guard<py::gil_scoped_release>(),
      "Says where this server listens, for `server_addresses` of the job's other processes; once it does.\n\n"
      "address: what others reach it by, e.g. \"10.0.0.7:4711\". Raises InvalidArgument in a process that is no\n"
      "server, Unavailable without `cohort run`. Under TF_CONFIG alone the cluster says it, and nothing is to be\n"
      "done.");
  module.def(
      "server_addresses",
      [](double timeout) { return server_addresses(std::chrono::milliseconds(std::llround(timeout * 1000))); },
      py::arg("timeout") = 60.0, py::call_guard<py::gil_scoped_release>(),
      "Where the job's servers listen, by number, once all have said so; [] where there are none.\n\n"
      "Under TF_CONFIG, without `cohort run`, the addresses of its ps tasks. Raises Timeout after `timeout` seconds,\n"
      "naming the servers that have not said it, Unavailable naming one that has ended before it did.");

  py::class_<ClusterSpec>(module, "ClusterSpec",
                          "A cluster as TensorFlow describes it: jobs, their tasks, and where each of them listens.\n\n"
                          "    ClusterSpec({\"worker\": [\"a:2222\", \"b:2222\"], \"ps\": [\"c:2222\"]})\n\n"
                          "A job is a list of addresses, or a dict from index to address where some are not named.\n"
                          "Raises InvalidArgument (a ValueError) for what is no HOST:PORT, naming job and index.")
      .def(py::init(&spec_of), py::arg("cluster"))
      .def_static("from_tf_config", &ClusterSpec::from_tf_config, py::arg("text"),
                  "The cluster in the value of TF_CONFIG. Raises InvalidArgument, naming the key.")
      .def("to_tf_config", &ClusterSpec::to_tf_config, py::arg("task_type"), py::arg("task_index"),
           "The value of TF_CONFIG for one task.")
      .def_property_readonly("jobs", &ClusterSpec::jobs, "Their names, in alphabetical order.")
      .def("num_tasks", &ClusterSpec::num_tasks, py::arg("job_name"))
      .def("task_indices", &ClusterSpec::task_indices, py::arg("job_name"))
      .def("task_address", &ClusterSpec::task_address, py::arg("job_name"), py::arg("task_index"))
      .def(
          "job_tasks",
          [](const ClusterSpec& spec, const std::string& job_name) { return listed(spec.job_tasks(job_name)); },
          py::arg("job_name"), "The addresses by index, None where there is no task.")
      .def("as_dict", &dict_of, "By job: a list, or a dict from index to address where some are not named.")
      .def("__bool__", [](const ClusterSpec& spec) { return !spec.empty(); })
      .def(
          "__eq__",
          [](const ClusterSpec& spec, const py::object& other) {
            return py::isinstance<ClusterSpec>(other) && spec == other.cast<ClusterSpec>();
          },
          py::arg("other"))
      .def("__repr__",
           [](const ClusterSpec& spec) { return "ClusterSpec(" + std::string(py::repr(dict_of(spec))) + ")"; });
}

}  // namespace cohort::python
