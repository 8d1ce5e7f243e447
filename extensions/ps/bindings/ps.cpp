// The parameter server for cohort.ps: options, a server, a worker's client, its tables and variables. Waits without the
// GIL; a KeyboardInterrupt ends the wait, but not the request.
#include "arrays.h"
#include "bindings.h"
#include "errors.h"
#include "ps/protocol.h"
#include "waiting.h"

#include <cohort/ps.h>

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace cohort::python {
namespace {

using std::chrono::milliseconds;

milliseconds milliseconds_from(double seconds) {
  return milliseconds(static_cast<std::int64_t>(std::min(seconds, 1e6) * 1000));
}

/// clock, behind, version.
using PyPulled = std::tuple<std::int64_t, std::int64_t, std::uint64_t>;

/// Keys of a request.
struct Keys {
  Keys(const py::object& given, const char* operation) : array(given, Access::Read, {operation, "keys"}) {
    const ConstBuffer buffer = array.const_buffer();
    if (buffer.dtype != DType::Int64 && buffer.dtype != DType::UInt64)
      refuse(operation, "keys have to be int64 or uint64, and these are " + std::string(to_string(buffer.dtype)));
    span = {static_cast<const std::uint64_t*>(buffer.data), static_cast<std::size_t>(buffer.count)};
  }
  Array array;
  std::span<const std::uint64_t> span;
};

/// Numbers that a request reads, or that it writes until it is done.
struct Floats {
  Floats(const py::object& given, Access access, const Role& role)
      : array(std::make_shared<Array>(given, access, role)) {
    const Buffer buffer = array->buffer();
    if (buffer.dtype != DType::Float32) {
      refuse(role.operation, std::string(role.name) + ": an array of " + std::string(to_string(buffer.dtype)) +
                                 " -- float32 is wanted");
    }
    span = {static_cast<float*>(buffer.data), static_cast<std::size_t>(buffer.count)};
  }
  std::shared_ptr<Array> array;
  std::span<float> span;
};

/// A request under way, and the arrays to which it writes.
class PyPsWork {
 public:
  PyPsWork(ps::Work work, std::shared_ptr<Array> kept)
      : held_(std::make_shared<Held>(std::move(work), std::move(kept))) {}

  PyPulled wait() {
    const ps::Pulled pulled = run_interruptibly<ps::Pulled>(
        [held = held_] {
          const std::lock_guard lock(held->mutex);
          return held->work.wait();
        },
        {});
    return {pulled.clock, pulled.behind, pulled.version};
  }

 private:
  struct Held {
    Held(ps::Work given, std::shared_ptr<Array> array) : work(std::move(given)), kept(std::move(array)) {}
    ~Held() {
      // The last owner may not hold the GIL, but Python objects are released here.
      const py::gil_scoped_acquire gil;
      {
        const py::gil_scoped_release release;
        const ps::Work ended = std::move(work);
      }
      kept.reset();
    }
    std::mutex mutex;
    ps::Work work;
    std::shared_ptr<Array> kept;
  };
  std::shared_ptr<Held> held_;
};

/// Starts a request that writes to the array `written`; null: it writes to no Python array.
template <class Body>
PyPsWork start(const Body& body, std::shared_ptr<Array> written = nullptr) {
  return {without_gil(body), std::move(written)};
}

PyPsWork table_pull(ps::Table& table, const py::object& keys, const py::object& out) {
  const Keys from(keys, "pull");
  const Floats to(out, Access::Write, {"pull", "out"});
  return start([&] { return table.pull(from.span, to.span); }, to.array);
}

PyPsWork table_push(ps::Table& table, const py::object& keys, const py::object& gradients, std::optional<double> lr) {
  const Keys to(keys, "push");
  const Floats from(gradients, Access::Read, {"push", "gradients"});
  return start([&] { return table.push(to.span, from.span, {lr}); });
}

PyPsWork table_push_pull(ps::Table& table, const py::object& keys, const py::object& gradients, const py::object& out,
                         std::optional<double> lr) {
  const Keys named(keys, "push_pull");
  const Floats from(gradients, Access::Read, {"push_pull", "gradients"});
  const Floats to(out, Access::Write, {"push_pull", "out"});
  return start([&] { return table.push_pull(named.span, from.span, to.span, {lr}); }, to.array);
}

PyPsWork table_assign(ps::Table& table, const py::object& keys, const py::object& values) {
  const Keys to(keys, "assign");
  const Floats from(values, Access::Read, {"assign", "rows"});
  return start([&] { return table.assign(to.span, from.span); });
}

PyPsWork table_erase(ps::Table& table, const py::object& keys) {
  const Keys gone(keys, "erase");
  return start([&] { return table.erase(gone.span); });
}

py::dict table_stats(ps::Table& table) {
  const ps::TableStats stats = without_gil([&] { return table.stats(); });
  py::dict out;
  out["rows"] = stats.rows;
  out["bytes"] = stats.bytes;
  out["created"] = stats.created;
  out["evicted"] = stats.evicted;
  out["dropped"] = stats.dropped;
  out["steps"] = stats.steps;
  out["rows_of_servers"] = stats.rows_of_servers;
  return out;
}

PyPsWork variable_pull(ps::Variable& variable, const py::object& out) {
  const Floats to(out, Access::Write, {"pull", "out"});
  return start([&] { return variable.pull(to.span); }, to.array);
}

PyPsWork variable_push(ps::Variable& variable, const py::object& gradients, std::optional<double> lr) {
  const Floats from(gradients, Access::Read, {"push", "gradients"});
  return start([&] { return variable.push(from.span, {lr}); });
}

PyPsWork variable_push_pull(ps::Variable& variable, const py::object& gradients, const py::object& out,
                            std::optional<double> lr) {
  const Floats from(gradients, Access::Read, {"push_pull", "gradients"});
  const Floats to(out, Access::Write, {"push_pull", "out"});
  return start([&] { return variable.push_pull(from.span, to.span, {lr}); }, to.array);
}

PyPsWork variable_assign(ps::Variable& variable, const py::object& values) {
  const Floats from(values, Access::Read, {"assign", "values"});
  return start([&] { return variable.assign(from.span); });
}

using ClientPtr = std::shared_ptr<ps::Client>;

ClientPtr connect(const std::vector<std::string>& servers, int worker, int workers, const std::string& secret_file,
                  double connect_timeout, double timeout) {
  ps::ClientOptions options;
  options.servers = servers;
  options.worker = worker;
  options.workers = workers;
  options.secret_file = secret_file;
  options.connect_timeout = milliseconds_from(connect_timeout);
  options.timeout = milliseconds_from(timeout);
  return run_interruptibly<ClientPtr>(
      [options] {
        return ClientPtr(new ps::Client(ps::Client::connect(options)), [](ps::Client* client) {
          if (PyGILState_Check() == 0) return delete client;
          const py::gil_scoped_release release;  // leaving may take a moment
          delete client;
        });
      },
      {});
}

ps::TableOptions table_options(std::int64_t dim, const ps::Initializer& initializer, const ps::Optimizer& optimizer,
                               const ps::Consistency& consistency, std::int64_t admission, std::int64_t max_age,
                               std::int64_t max_rows, const std::string& victim, std::uint64_t seed) {
  ps::TableOptions options;
  options.dim = dim;
  options.initializer = initializer;
  options.optimizer = optimizer;
  options.consistency = consistency;
  options.admission = admission;
  options.eviction.age = std::chrono::seconds(max_age);
  options.eviction.rows = max_rows;
  if (victim != "least_recent" && victim != "least_frequent")
    refuse("table", "victim is \"least_recent\" or \"least_frequent\", and this is \"" + victim + "\"");
  options.eviction.victim =
      victim == "least_recent" ? ps::Eviction::Victim::LeastRecent : ps::Eviction::Victim::LeastFrequent;
  options.seed = seed;
  return options;
}

/// Binds options that can be copied and pickled, by the fields that messages have.
template <class Kind>
py::class_<Kind> bind_option(py::module_& module, const char* name) {
  return py::class_<Kind>(module, name)
      .def(py::pickle([](const Kind& option) { return py::bytes(codec::encode(option)); },
                      [](const py::bytes& fields) {
                        return value_or_throw(codec::decode<Kind>(static_cast<std::string>(fields)));
                      }));
}

/// Makes an object from its fields, in their order.
template <class Kind, class... Fields>
void bind_optimizer(py::module_& module, const char* name) {
  bind_option<Kind>(module, name).def(py::init<Fields...>()).def_readonly("lr", &Kind::lr);
}

void bind_options(py::module_& module) {
  namespace optim = ps::optim;
  bind_optimizer<optim::Sgd, double, double, double, double, bool>(module, "PsSgd");
  bind_optimizer<optim::Adagrad, double, double, double, double, double>(module, "PsAdagrad");
  bind_optimizer<optim::RowAdagrad, double, double, double>(module, "PsRowAdagrad");
  bind_optimizer<optim::Adam, double, double, double, double, double>(module, "PsAdam");
  bind_optimizer<optim::AdamW, double, double, double, double, double>(module, "PsAdamW");
  bind_optimizer<optim::Ftrl, double, double, double, double>(module, "PsFtrl");
  bind_option<ps::Initializer>(module, "PsInitializer")
      .def_static("constant", &ps::Initializer::constant, py::arg("value"))
      .def_static("uniform", &ps::Initializer::uniform, py::arg("low"), py::arg("high"))
      .def_static("normal", &ps::Initializer::normal, py::arg("mean"), py::arg("deviation"));
  bind_option<ps::Consistency>(module, "PsConsistency")
      .def_static("sync", &ps::Consistency::sync)
      .def_static("bounded", &ps::Consistency::bounded, py::arg("staleness"))
      .def_static("asynchronous", &ps::Consistency::async)
      .def_property_readonly("adds_workers",
                             [](const ps::Consistency& consistency) { return consistency.mode == ps::Mode::Sync; });
}

}  // namespace

void bind_ps(py::module_& module) {
  bind_options(module);
  py::class_<PyPsWork>(module, "PsWork").def("wait", &PyPsWork::wait);
  py::class_<ps::Table>(module, "PsTable")
      .def_property_readonly("dim", [](const ps::Table& table) { return table.options().dim; })
      .def("pull", &table_pull, py::arg("keys"), py::arg("out"))
      .def("push", &table_push, py::arg("keys"), py::arg("gradients"), py::arg("lr"))
      .def("push_pull", &table_push_pull, py::arg("keys"), py::arg("gradients"), py::arg("out"), py::arg("lr"))
      .def("assign", &table_assign, py::arg("keys"), py::arg("rows"))
      .def("erase", &table_erase, py::arg("keys"))
      .def("stats", &table_stats);
  py::class_<ps::Variable>(module, "PsVariable")
      .def_property_readonly("elements", &ps::Variable::elements)
      .def("pull", &variable_pull, py::arg("out"))
      .def("push", &variable_push, py::arg("gradients"), py::arg("lr"))
      .def("push_pull", &variable_push_pull, py::arg("gradients"), py::arg("out"), py::arg("lr"))
      .def("assign", &variable_assign, py::arg("values"));
  py::class_<ps::Client, ClientPtr>(module, "PsClient")
      .def(py::init(&connect), py::arg("servers"), py::arg("worker"), py::arg("workers"), py::arg("secret_file"),
           py::arg("connect_timeout"), py::arg("timeout"))
      .def_property_readonly("worker", &ps::Client::worker)
      .def_property_readonly("workers", &ps::Client::workers)
      .def_property_readonly("now", &ps::Client::now)
      .def(
          "table",
          [](const ClientPtr& client, const std::string& name, std::int64_t dim, const ps::Initializer& initializer,
             const ps::Optimizer& optimizer, const ps::Consistency& consistency, std::int64_t admission,
             std::int64_t max_age, std::int64_t max_rows, const std::string& victim, std::uint64_t seed) {
            const ps::TableOptions options =
                table_options(dim, initializer, optimizer, consistency, admission, max_age, max_rows, victim, seed);
            const py::gil_scoped_release release;
            return client->table(name, options);
          },
          py::arg("name"), py::arg("dim"), py::arg("initializer"), py::arg("optimizer"), py::arg("consistency"),
          py::arg("admission"), py::arg("max_age"), py::arg("max_rows"), py::arg("victim"), py::arg("seed"))
      .def(
          "variable",
          [](const ClientPtr& client, const std::string& name, std::int64_t elements, double initial,
             const ps::Optimizer& optimizer, const ps::Consistency& consistency) {
            const py::gil_scoped_release release;
            return client->variable(name, {elements, initial, optimizer, consistency});
          },
          py::arg("name"), py::arg("elements"), py::arg("initial"), py::arg("optimizer"), py::arg("consistency"))
      .def("clock",
           [](const ClientPtr& client) {
             return run_interruptibly<std::int64_t>([client] { return client->clock(); }, {});
           })
      .def("barrier", [](const ClientPtr& client) { run_interruptibly<void>([client] { client->barrier(); }, {}); })
      .def(
          "snapshot",
          [](const ClientPtr& client, const std::string& folder, int keep) {
            return run_interruptibly<std::string>([client, folder, keep] { return client->snapshot(folder, {keep}); },
                                                  {});
          },
          py::arg("folder"), py::arg("keep"))
      .def(
          "restore",
          [](const ClientPtr& client, const std::string& folder) {
            return run_interruptibly<std::int64_t>([client, folder] { return client->restore(folder); }, {});
          },
          py::arg("folder"))
      .def("leave", [](const ClientPtr& client) { run_interruptibly<void>([client] { client->leave(); }, {}); });
  py::class_<ps::Server>(module, "PsServer")
      .def(py::init([](const std::string& endpoint, const std::string& secret_file, std::size_t memory, double patience,
                       const std::string& journal, std::optional<int> replicas, bool of_job) {
             ps::ServerOptions options;
             options.endpoint = endpoint;
             options.secret_file = secret_file;
             options.memory = memory;
             options.patience = milliseconds_from(patience);
             options.journal = journal;
             options.replicas = replicas;
             const py::gil_scoped_release release;
             return of_job ? ps::Server::of_job(options) : std::make_unique<ps::Server>(options);
           }),
           py::arg("endpoint"), py::arg("secret_file"), py::arg("memory"), py::arg("patience"), py::arg("journal"),
           py::arg("replicas"), py::arg("of_job"))
      .def_property_readonly("endpoint", &ps::Server::endpoint)
      .def_property_readonly("workers_gone", &ps::Server::workers_gone);
}

}  // namespace cohort::python
