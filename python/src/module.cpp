// The compiled module cohort._core: the C++ core for Python. It does not link torch and imports neither torch nor
// NumPy.
#include "arguments.h"
#include "bindings.h"
#include "errors.h"
#include "extensions.h"

#include "base/env.h"
#include "net/interfaces.h"
#include "rendezvous/detect.h"
#include "rendezvous/epochs.h"
#include "telemetry/status_page.h"

#include <cohort/init.h>

#include <pybind11/stl.h>

namespace cohort::python {
namespace {

/// Calls `call(key, mine, seconds)`, from any thread.
ShareFunction share_of(const py::object& call) {
  const std::shared_ptr<py::object> kept(new py::object(call), [](py::object* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  });
  return [kept](const std::string& key, const std::optional<std::string>& mine, std::chrono::milliseconds patience) {
    const py::gil_scoped_acquire gil;
    const double seconds = std::chrono::duration<double>(patience).count();
    return py::cast<std::string>((*kept)(key, mine ? py::object(py::str(*mine)) : py::none(), seconds));
  };
}

PyCommunicator init_world(const std::string& init_method, int rank, int world_size, const std::string& secret_file,
                          const std::string& group_name, const std::string& program, const py::object& init_timeout,
                          const py::object& timeout, const std::string& transport, bool alone, bool trust_network,
                          const py::object& share, const std::string& share_name) {
  InitOptions options;
  options.init_method = init_method;
  options.rank = rank;
  options.world_size = world_size;
  options.secret_file = secret_file;
  options.group_name = group_name;
  options.program = program;
  if (const auto patience = milliseconds_of(init_timeout, "init")) options.init_timeout = *patience;
  if (const auto deadline = milliseconds_of(timeout, "init")) {
    if (deadline->count() <= 0) refuse("init", "the timeout of operations has to be positive");
    options.timeout = *deadline;
  }
  options.transport = transport;
  options.alone = alone;
  options.trust_network = trust_network;
  if (!share.is_none()) options.share = share_of(share);
  if (!share_name.empty()) options.share_name = share_name;
  // An interrupt leaves the meeting to its own deadline, because there are no ranks to inform yet.
  return PyCommunicator(Member::make(run_interruptibly<Communicator>([options] { return cohort::init(options); }, {})));
}

PyCommunicator init_part(const std::string& world, const std::string& group_name, int rank, int world_size,
                         const py::object& init_timeout, const py::object& timeout) {
  InitOptions options;
  options.group_name = group_name;
  options.rank = rank;
  options.world_size = world_size;
  options.init_timeout = milliseconds_of(init_timeout, "init").value_or(options.init_timeout);
  options.timeout = milliseconds_of(timeout, "init").value_or(options.timeout);
  return PyCommunicator(
      Member::make(run_interruptibly<Communicator>([=] { return cohort::init_part(world, options); }, {})));
}

std::vector<PyCommunicator> form_threads(int size, const py::object& timeout, const PyCommunicator* across) {
  ThreadWorldOptions options;
  if (const auto deadline = milliseconds_of(timeout, "run_on_threads")) {
    if (deadline->count() <= 0) refuse("run_on_threads", "the timeout of operations has to be positive");
    options.timeout = *deadline;
  }
  const auto form = [&](const Communicator& processes) {
    options.across = processes;
    return form_thread_world(size, options);
  };
  std::vector<Communicator> formed;
  if (across != nullptr) {
    formed = across->member().call<std::vector<Communicator>>("run_on_threads", form);
  } else {
    const py::gil_scoped_release release;
    formed = form({});
  }
  std::vector<PyCommunicator> ranks;
  for (Communicator& rank : formed) ranks.emplace_back(Member::make(std::move(rank)));
  return ranks;
}

std::string rendezvous_method(int rank, int world_size) {
  const py::gil_scoped_release release;
  switch (cohort::rendezvous_method(rank, world_size)) {
    case RendezvousMethod::Secret: return "secret";
    case RendezvousMethod::Launcher: return "launcher";
    case RendezvousMethod::TorchsStore: return "torch's store";
    case RendezvousMethod::None: break;
  }
  return "";
}

/// Returns false if nothing in the environment gives this process's rank and the world's size. `init` reports errors in
/// these.
bool has_launcher() {
  const auto said = rendezvous::detect(rendezvous::current_environment());
  return !said || !said->launcher.empty() || said->alone || env::get(env::kInit);
}

}  // namespace

void bind_types(py::module_& module) {
  py::enum_<ReduceOp>(module, "ReduceOp",
                      "How values of several ranks become one; wherever one is asked for, its name "
                      "('sum', 'average', ...) will do.")
      .value("Sum", ReduceOp::Sum)
      .value("Average", ReduceOp::Average)
      .value("Min", ReduceOp::Min)
      .value("Max", ReduceOp::Max)
      .value("Product", ReduceOp::Product)
      .value("BitAnd", ReduceOp::BitAnd)
      .value("BitOr", ReduceOp::BitOr)
      .value("BitXor", ReduceOp::BitXor);
  module.def(
      "supports",
      [](const py::object& dtype, const py::object& op) {
        const std::string name{py::str(dtype)};
        const std::optional<DType> known = named_dtype(name);
        return known && cohort::supports(*known, reduce_op_of(op, "supports"));
      },
      py::arg("dtype"), py::arg("op"),
      "Whether the reduction exists for elements of a type: its name, or a dtype of torch or NumPy.");
  module.def(
      "environment_value", [](const std::string& name) { return value_or_throw(env::value(name)); }, py::arg("name"),
      "The value of a variable of the table that `cohort help environment` lists, by its type; None where it has "
      "none.");
}

}  // namespace cohort::python

PYBIND11_MODULE(_core, module) {
  using namespace cohort::python;
  module.attr("__version__") = COHORT_VERSION;
  module.doc() = "The C++ core of Cohort. Use it through the package cohort.";
  watch_forks();
  translate_errors();
  bind_types(module);
  bind_memory(module);
  bind_work(module);
  bind_communicator(module);
  bind_formats(module);
  bind_checkpoints(module);
  bind_track(module);
  bind_gradients(module);
  bind_slots(module);
  bind_process(module);
  bind_elastic(module);
  bind_extensions(module);
  module.def("init", &init_world, py::arg("init_method"), py::arg("rank"), py::arg("world_size"),
             py::arg("secret_file"), py::arg("group_name"), py::arg("program"), py::arg("init_timeout"),
             py::arg("timeout"), py::arg("transport"), py::arg("alone"), py::arg("trust_network"), py::arg("share"),
             py::arg("share_name"));
  module.def(
      "form_thread_world",
      [](int size, const py::object& timeout, const PyCommunicator* across) {
        py::list ranks;
        for (PyCommunicator& rank : form_threads(size, timeout, across)) ranks.append(py::cast(std::move(rank)));
        return ranks;
      },
      py::arg("size"), py::arg("timeout"), py::arg("across").none(true));
  module.def("has_launcher", &has_launcher);
  module.def("offered_addresses", [] { return cohort::value_or_throw(cohort::net::offered_addresses()); });
  module.def("rendezvous_method", &rendezvous_method, py::arg("rank"), py::arg("world_size"));
  module.def("is_elastic", [] { return cohort::env::get(cohort::env::kWorker).has_value(); });
  module.def("removed_from_job", &cohort::rendezvous::removed_from_job);
  module.def("init_part", &init_part, py::arg("world"), py::arg("group_name"), py::arg("rank"), py::arg("world_size"),
             py::arg("init_timeout"), py::arg("timeout"));
  const std::string world(cohort::rendezvous::kWorld);
  module.def("formed_epoch", &cohort::rendezvous::formed_epoch, py::arg("world") = world);
  module.def(
      "job_news",
      [](const std::string& name) -> py::object {
        const auto news = [&] {
          const py::gil_scoped_release release;
          return cohort::rendezvous::news_since_formed(cohort::status::StatusPage::own().announced_epoch(), name);
        }();
        return news ? py::object(py::make_tuple(news->epoch, news->came, news->left)) : py::none();
      },
      py::arg("world") = world);
  module.def(
      "leave_all",
      [](const py::object& grace, const std::string& reason, bool failed) {
        Member::leave_all({milliseconds_of(grace, "shutdown"), reason, failed});
        for (const auto leave : called_at_leave()) leave();
        const py::gil_scoped_release release;
        Held::stop();
      },
      py::arg("grace"), py::arg("reason"), py::arg("failed"));
}
