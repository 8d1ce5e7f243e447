// A parameter server: rows of sparse tables and dense variables on some processes (servers), read and updated by others
// (workers). Updates are made exactly once, even if connections break and are made again. Needs no libtorch.
//   Server: serves from construction to destruction, on a thread of its own.
//   Client: a worker's. Its methods, and those of its tables and variables, may be called from any thread, and not in
// a forked child. Requests progress while any thread waits for a request; the client's own thread only keeps
// connections alive.
#pragma once

#include <cohort/ps_options.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::ps {

struct ServerOptions {
  /// "HOST:PORT" (port 0: the system chooses one), or "@NAME": a name in Linux's abstract Unix namespace, for this
  /// user's processes on this host, without a secret. Empty: a free port at this host's address that the job's other
  /// processes reach, or in COHORT_NETWORK; at 127.0.0.1 if all processes are on one host, or there is no job.
  std::string endpoint = {};
  /// For TCP: a file as `cohort secret` writes it. Empty: the job's secret.
  std::string secret_file = {};
  /// Bytes that tables and waiting pushes may take; requests that need more are refused (Unavailable). Also counted are
  /// rows that waiting pushes make, changes that the backup has not acknowledged, and rows that change while a snapshot
  /// is written; pushes wait for memory that will become free without further requests. 0: nine tenths of the memory
  /// that the host, or the control group, has left when the server starts.
  std::size_t memory = 0;
  /// Time after which a worker whose connection has ended counts as lost: the others stop waiting for it, and of its
  /// pushes only those of ended clocks count. Above 0.
  std::chrono::milliseconds patience = std::chrono::seconds(3);
  /// A file in which every change is recorded before it is made. A server that is restarted with the journal of a
  /// killed server continues where that server stopped. A damaged journal is refused (Corrupt) and left unchanged.
  /// Empty: no journal. With replicas, copies of other servers' rows have files beside it (`journal`.rows-N).
  std::string journal = {};
  /// When the journal has this many bytes of changes, and at least as many as its rows take, it is rewritten in a new
  /// file, as the rows and the later changes. The server goes on serving meanwhile.
  std::size_t journal_tail = std::size_t{64} << 20;
  /// Uses shared memory for workers on this host, 4 MiB with each. With false, or if there is none, calls go over the
  /// socket.
  bool shared_memory = true;
  /// Number of other servers of the job that keep a copy of this server's contents, command by command, and take over
  /// if it dies: 0 or 1, the same at all servers. 1 needs the store of `cohort run`. nullopt: 1 where the job goes on
  /// when a server dies (--server-restarts, --lost-servers) and there is no journal, else 0.
  std::optional<int> replicas = {};
  /// With replicas, this server's number and the number of servers. Unset: as given by its role.
  std::optional<int> number = {};
  std::optional<int> servers = {};
};

class Server {
 public:
  /// Throws Unavailable if the endpoint or the journal is in use; InvalidArgument, Io, Corrupt.
  explicit Server(const ServerOptions& options);
  /// Makes a server as `serve` does, for a program that does other work until `workers_gone`.
  static std::unique_ptr<Server> of_job(ServerOptions options);
  /// Closes all connections.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// Address at which the server listens, with the port that the system chose, in the form of `ClientOptions::servers`.
  const std::string& endpoint() const noexcept;
  /// True if there were workers and all of them have left or are lost.
  bool workers_gone() const;

 private:
  class Impl;
  Server(const ServerOptions& options, bool begins_anew);
  std::unique_ptr<Impl> impl_;
};

/// Runs a server of `cohort run --servers`: announces its address, and serves until all workers have left or are lost.
/// If `journal` is a folder, each server has a file in it. A server restarted by `cohort run --server-restarts` listens
/// at its predecessor's address; under TF_CONFIG alone a server listens at its address there. Throws as Server, and
/// InvalidArgument in a process that is no server.
void serve(const ServerOptions& options = {});

struct ClientOptions {
  /// Endpoints of all servers, in the same order at all workers. Empty: the job's servers, when all `serve`; `worker`
  /// and `workers` are then `role_number` and `num_workers`.
  std::vector<std::string> servers = {};
  std::string secret_file = {};  ///< the same file as at the servers
  int worker = 0;
  int workers = 1;
  /// Time in which all servers have to be reachable.
  std::chrono::milliseconds connect_timeout = std::chrono::seconds(60);
  /// Timeout of a request, including connecting again. The error names the server, or the worker that the server waits
  /// for.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

/// Result of a pull: how old the read values are.
struct Pulled {
  std::int64_t clock = 0;     ///< the values include all pushes of clocks before this one
  std::int64_t behind = 0;    ///< clocks between `clock` and the reader's own
  std::uint64_t version = 0;  ///< number of row steps in the table so far, over all servers asked
};

/// A request under way. Memory that the request reads or writes has to stay valid until the request is done. One thread
/// at a time.
class [[nodiscard]] Work {
 public:
  struct State;
  explicit Work(std::unique_ptr<State> state);
  Work(Work&&) noexcept;
  Work& operator=(Work&&) = delete;
  /// Waits as `wait` does; logs an error that no `wait` has delivered as a warning.
  ~Work();

  /// Blocks until the request is done. Throws Timeout (names the server, or the workers that delay the others),
  /// PeerLost, Unavailable (no memory), Mismatch, Aborted (the servers count this worker as lost). May be called again.
  Pulled wait();

 private:
  std::unique_ptr<State> state_;
};

struct PushOptions {
  /// Replaces the optimizer's own learning rate, for this step. In Mode::Sync all pushes of a worker to a table in one
  /// clock have to give the same rate (else InvalidArgument), and the lowest worker's rate is used for all workers.
  std::optional<double> lr = {};
};

struct TableStats {
  std::uint64_t rows = 0;     ///< over all servers, like all fields below
  std::uint64_t bytes = 0;    ///< bytes that the rows and their index take
  std::uint64_t created = 0;  ///< rows created; a row that was evicted and came back counts again
  std::uint64_t evicted = 0;
  std::uint64_t dropped = 0;  ///< dropped gradients, of keys that were not admitted
  std::uint64_t steps = 0;    ///< steps of rows
  std::vector<std::uint64_t> rows_of_servers;
};

/// Rows of `dim` floats by 64-bit keys. Keys may come in any order, and repeatedly. Rows lie one after the other in
/// memory.
class Table {
 public:
  struct Impl;
  const TableOptions& options() const noexcept;

  /// Copies the keys' rows to `rows`. For a key without a row it gives the initial values, without creating a row.
  /// Waits as the table's consistency says.
  Work pull(std::span<const std::uint64_t> keys, std::span<float> rows);
  /// Applies an optimizer step with these gradients; gradients of a repeated key are first added, in their order.
  /// Throws NonFinite, naming the key, if a gradient is NaN or infinite; then nothing is sent.
  Work push(std::span<const std::uint64_t> keys, std::span<const float> gradients, const PushOptions& options = {});
  /// Pushes and pulls in one request. The rows read include this push in Mode::Async only; in other modes pushes take
  /// effect with `Client::clock`.
  Work push_pull(std::span<const std::uint64_t> keys, std::span<const float> gradients, std::span<float> rows,
                 const PushOptions& options = {});
  /// Assigns rows as given, immediately in every mode of consistency. For a repeated key the last row counts. Throws
  /// NonFinite as `push`.
  Work assign(std::span<const std::uint64_t> keys, std::span<const float> rows);
  /// Erases rows, as if they had never existed, immediately in every mode of consistency.
  Work erase(std::span<const std::uint64_t> keys);
  TableStats stats();

 private:
  friend class Client;
  friend class Variable;
  explicit Table(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

struct VariableOptions {
  std::int64_t elements = 0;
  double initial = 0;
  Optimizer optimizer = optim::Sgd{};  ///< not RowAdagrad
  Consistency consistency = {};
};

/// A dense array of floats, in slices over all servers.
class Variable {
 public:
  std::int64_t elements() const noexcept;
  /// The same requests as a table's, for all elements.
  Work pull(std::span<float> values);
  Work push(std::span<const float> gradients, const PushOptions& options = {});
  Work push_pull(std::span<const float> gradients, std::span<float> values, const PushOptions& options = {});
  Work assign(std::span<const float> values);

 private:
  friend class Client;
  Variable(Table table, std::int64_t elements);
  Table table_;
  std::int64_t elements_;
};

struct SnapshotOptions {
  int keep = 0;  ///< number of newest checkpoints that stay in the folder, including this one; 0: all
};

class Client {
 public:
  struct Impl;
  /// Throws Timeout, naming a server that is not reachable within `connect_timeout`; PeerLost if a server has ended;
  /// InvalidArgument; Mismatch if the servers know another number of workers, or another process under this worker's
  /// number.
  static Client connect(ClientOptions options = {});
  Client(Client&&) noexcept;
  Client& operator=(Client&&) = delete;
  /// Leaves as `leave` does, without waiting long; errors are logged.
  ~Client();

  int worker() const noexcept;
  int workers() const noexcept;

  /// Returns the table of this name, which the first client to ask creates. Throws Mismatch, naming both options, if
  /// the table exists with other options.
  Table table(std::string_view name, const TableOptions& options);
  Variable variable(std::string_view name, const VariableOptions& options);

  /// Ends this worker's clock, on all servers or on none: waits until all servers have its pushes, then makes them
  /// count. Returns the new clock. A worker that is 16 clocks ahead of the slowest one (more if a `Bounded` table
  /// allows that), because it never pulls, waits for the slowest, and may call again after the Timeout of that wait.
  /// After another Timeout, or PeerLost, it is not known what a server has: later calls throw it again. If this process
  /// dies meanwhile, the servers agree whether the clock has ended.
  std::int64_t clock();
  std::int64_t now() const noexcept;
  /// Waits until all workers have called `barrier` as often as this one. After Timeout, another call waits for the same
  /// one.
  void barrier();
  /// Saves all tables and variables in a new checkpoint in the folder. All servers have to see the folder at the same
  /// path. Returns the checkpoint's own folder. The checkpoint appears as a whole or not at all. With Mode::Sync it has
  /// exactly the pushes of clocks before this worker's present clock. In other modes it is consistent only if no worker
  /// ends a clock, or pushes to tables of Mode::Async, before all servers have begun it: call it between two barriers.
  /// One worker calls it. Servers go on serving while they write: rows that change meanwhile take their memory twice,
  /// and pushes wait if memory is short. The write has to end within the client's `timeout`. Throws Io, Unavailable
  /// (another process is saving there), Timeout.
  std::string snapshot(const std::string& folder, const SnapshotOptions& options = {});
  /// Loads all rows of the newest snapshot in the folder whose files are sound, written by any number of servers, and
  /// creates missing tables. One worker calls it, before any pushes. Clocks do not change; returns the snapshot's
  /// clock. Throws Unavailable if there is no snapshot or not enough memory, Corrupt, Mismatch (a table exists with
  /// other options).
  std::int64_t restore(const std::string& folder);
  /// Leaves: the others stop waiting for this worker. Pushes after the last `clock` are dropped, except in Mode::Async.
  /// All later calls except `leave`, those of tables and variables too, throw InvalidArgument.
  void leave();

 private:
  explicit Client(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace cohort::ps
