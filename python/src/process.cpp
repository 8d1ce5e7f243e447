// The process that runs Python: its reports to the agent that started it; the signals that ask it to save, noticed in
// C++, so that no Python code has to run; its role in the job and cohort.ClusterSpec, TensorFlow's description of a
// cluster; and values of any length in the job's store: calls that `cohort.run` sends to ranks that cannot read its
// folder, their results, servers' addresses, and functions that a coordinator schedules.
#include "bindings.h"
#include "errors.h"

#include "base/signals.h"
#include "net/store.h"
#include "telemetry/last_words.h"
#include "telemetry/status_page.h"
#include "telemetry/timeline.h"
#include "telemetry/trace_writer.h"

#include <cohort/cluster_spec.h>
#include <cohort/preemption.h>
#include <cohort/role.h>
#include <cohort/servers.h>

#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::python {
namespace {

/// Handles signals, and tells the agent that this process saves because of them.
class PreemptionSignals {
 public:
  explicit PreemptionSignals(const std::vector<int>& signals) : latch_(made(signals)) {
    status::StatusPage::own().announce_saving();
  }
  ~PreemptionSignals() { status::StatusPage::own().withdraw_saving(); }
  PreemptionSignals(const PreemptionSignals&) = delete;
  PreemptionSignals& operator=(const PreemptionSignals&) = delete;

  int received() noexcept {
    const int signal = latch_.received();
    if (signal != 0) latch_.keep_handlers();
    return signal;
  }
  void say_yes(int signal) {
    latch_.keep_handlers();
    status::StatusPage::own().note_preemption(signal);
  }

 private:
  static sys::SignalLatch made(const std::vector<int>& signals) {
    auto latch = sys::SignalLatch::create(signals);
    if (!latch) raise(latch.error().code(), "Preemption: {}", latch.error().what());
    return *std::move(latch);
  }
  sys::SignalLatch latch_;
};

/// Converts {"worker": ["a:1", "b:1"]}, or {"worker": {0: "a:1", 2: "c:1"}}, or a ClusterSpec.
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
      if (py::isinstance<py::str>(addresses)) throw py::cast_error();  // a str is a sequence of letters
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

/// Returns a list with None for an index without a task.
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

store::Store::Deadline deadline_of(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
}

class JobStore {
 public:
  explicit JobStore(double timeout) : store_(store::connect_job_store(deadline_of(timeout))) {}
  void put(const std::string& key, const py::bytes& value) {
    const std::string text = value;
    const py::gil_scoped_release release;
    store::set_large(*store_, key, text);
  }
  py::bytes wait(const std::string& key, double timeout) {
    return without_gil([&] { return store::get_large(*store_, key, deadline_of(timeout)); });
  }
  std::optional<py::bytes> get(const std::string& key, double timeout) {
    const auto value = without_gil([&] { return store::try_get_large(*store_, key, deadline_of(timeout)); });
    return value ? std::optional(py::bytes(*value)) : std::nullopt;
  }
  void remove(const std::string& key) {
    const py::gil_scoped_release release;
    store::delete_large(*store_, key);
  }

 private:
  std::shared_ptr<store::Store> store_;
};

}  // namespace

void bind_process(py::module_& module) {
  module.def(
      "status_fd", [] { return status::StatusPage::own().fd(); },
      "The agent's file for stacks; -1 where no agent started this process.");
  module.def(
      "begin_init", [](int size) { status::StatusPage::own().begin_init(size); }, py::arg("size"),
      "This process waits for the others of a world of so many, until end_init: for the launcher.");
  module.def(
      "end_init", [](bool formed) { status::StatusPage::own().end_init(formed); }, py::arg("formed"),
      "It waits no more.");
  module.def(
      "note_state", [] { status::StatusPage::own().note_state(); },
      "This process has what its job has trained, so that others can have it from here: for the launcher.");
  module.def(
      "count_step", [] { status::StatusPage::own().count_step(); }, "Another step of an optimizer is done.");
  module.def(
      "begin_call", [](const std::string& name) { status::StatusPage::own().begin_call(name); }, py::arg("name"),
      "The program is in this, which consists of operations, until `end_call`.");
  module.def("end_call", [] { status::StatusPage::own().end_call(); });
  module.def(
      "traced", [] { return status::timeline::on(); }, "Whether somebody takes spans: `cohort run --trace`.");
  module.def(
      "add_span",
      [](const std::string& name, std::int64_t begun_ns) {
        using status::timeline::Clock;
        const Clock::time_point begun{std::chrono::nanoseconds(begun_ns)};
        status::timeline::add(
            {status::TimelineKind::Span, name, begun, Clock::now(), status::timeline::this_thread(), 0, 0, {}});
      },
      py::arg("name"), py::arg("begun_ns"), "Something that this thread did from then (time.monotonic_ns) until now.");
  module.def(
      "trace_event",
      [](std::uint64_t row, const std::string& name, std::int64_t begun_ns, std::optional<std::int64_t> ended_ns,
         const std::string& error) {
        std::string text;
        status::TraceEvent event{row, 0, name};
        event.begun_ns = begun_ns;
        event.ended_ns = ended_ns.value_or(begun_ns);
        event.moment = !ended_ns;
        event.error = error;
        status::append_event(text, event);
        return text;
      },
      py::arg("row"), py::arg("name"), py::arg("begun_ns"), py::arg("ended_ns") = py::none(), py::arg("error") = "",
      "An event as it stands in a trace: a comma, and a line. Without an end it is a moment.");
  module.def(
      "trace_row",
      [](std::uint64_t row, const std::string& name) {
        std::string text;
        status::append_process(text, row, name);
        return text;
      },
      py::arg("row"), py::arg("name"), "The name of a row, likewise.");
  module.def(
      "say_last_words",
      [](const std::string& words, const py::object& cause) {
        auto& page = status::StatusPage::own();
        if (!cause.is_none()) page.note_end(from_python(cause));
        return page.say_last_words(words);
      },
      py::arg("words"), py::arg("cause") = py::none(),
      "What ends this process, and the cohort.Error that it comes from. Only the first call counts; it returns True.");
  module.def("keep_last_words", &status::keep_last_words,
             "From now on fatal signals and uncaught C++ exceptions leave word with the agent.");
  module.def("add_to_last_words", &status::add_to_last_words, py::arg("fd"),
             "What this file holds by the time of a fatal signal becomes part of the last words.");
  module.def(
      "announce_stacks", [] { status::StatusPage::own().announce_stacks(); },
      "Tells the agent that SIGQUIT makes this process write its stacks to the file.");
  py::class_<PreemptionSignals>(module, "PreemptionSignals")
      .def(py::init<const std::vector<int>&>(), py::arg("signals"))
      .def("received", &PreemptionSignals::received, "The first of the signals that has come; 0: none has.")
      .def("say_yes", &PreemptionSignals::say_yes, py::arg("signal"),
           "All ranks save and end because of this signal: the agent is told, and the handlers stay from now on.");
  module.attr("REQUEUE_STATUS") = kRequeueStatus;
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
  py::class_<JobStore>(module, "JobStore",
                       "A connection to the store of this process's job. One call at a time.\n\n"
                       "timeout: seconds to connect. Raises Unavailable where there is no job of `cohort run`.")
      .def(py::init([](double timeout) {
             const py::gil_scoped_release release;
             return std::make_unique<JobStore>(timeout);
           }),
           py::arg("timeout"))
      .def("put", &JobStore::put, py::arg("key"), py::arg("value"), "Bytes of any length.")
      .def("get", &JobStore::get, py::arg("key"), py::arg("timeout"), "None if nothing is there.")
      .def("wait", &JobStore::wait, py::arg("key"), py::arg("timeout"),
           "What is put there, once it is. Raises Timeout.")
      .def("remove", &JobStore::remove, py::arg("key"));
}

}  // namespace cohort::python
