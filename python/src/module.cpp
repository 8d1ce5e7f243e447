// The compiled module cohort._core: the C++ core for Python. It does not link torch and imports neither torch nor
// NumPy.
#include "arguments.h"
#include "array_types.h"
#include "bindings.h"
#include "errors.h"
#include "named.h"

#include <cohort/join.h>

namespace cohort::python {
namespace {

PyCommunicator join_world(const std::string& init_method, int rank, int world_size, const std::string& secret_file,
                          const std::string& group_name, const std::string& program, const py::object& join_timeout,
                          const py::object& timeout, const std::string& transport, bool alone) {
  JoinOptions options;
  options.init_method = init_method;
  options.rank = rank;
  options.world_size = world_size;
  options.secret_file = secret_file;
  options.group_name = group_name;
  options.program = program;
  if (const auto patience = milliseconds_of(join_timeout, "join")) options.join_timeout = *patience;
  if (const auto deadline = milliseconds_of(timeout, "join")) {
    if (deadline->count() <= 0) refuse("join", "the timeout of operations has to be positive");
    options.timeout = *deadline;
  }
  options.transport = transport;
  options.alone = alone;
  // An interrupt leaves the meeting to its own deadline: there is nobody yet who could be told.
  return PyCommunicator(Member::make(run_interruptibly<Communicator>([options] { return cohort::join(options); }, {})));
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
  bind_named(module);
  bind_formats(module);
  bind_checkpoints(module);
  bind_permutation(module);
  bind_preemption(module);
  bind_values(module);
  bind_status(module);
  bind_job_store(module);
  module.def("join", &join_world, py::arg("init_method"), py::arg("rank"), py::arg("world_size"),
             py::arg("secret_file"), py::arg("group_name"), py::arg("program"), py::arg("join_timeout"),
             py::arg("timeout"), py::arg("transport"), py::arg("alone"));
  module.def(
      "leave_all",
      [](const py::object& grace, const std::string& reason, bool failed) {
        Member::leave_all({milliseconds_of(grace, "shutdown"), reason, failed});
        NamedWorld::forget_all();
      },
      py::arg("grace"), py::arg("reason"), py::arg("failed"));
}
