// A parameter server: rows of sparse tables and dense variables on some processes (servers), read and updated by others
// (workers). Updates are made exactly once, whatever connections break and are made again. Without libtorch.
//   Server: serves from construction to destruction, on a thread of its own.
//   Client: a worker's. Its methods, and those of its tables and variables, may be called from any thread, and not in
//   a forked child. Requests go on while anybody waits for one; a thread of its own only keeps connections alive.
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
  /// user's processes on this host, without a secret. Empty: a free port at the address of this host that the other
  /// processes of its job reach, or of COHORT_NETWORK; 127.0.0.1 where all are on one host, or in no job.
  std::string endpoint = {};
  /// For TCP: a file as `cohort secret` writes it. Empty: the job's secret.
  std::string secret_file = {};
  /// Bytes that tables, and pushes that wait, may take; what needs more is refused (Unavailable). With it count the
  /// rows that waiting pushes make, changes that the backup has not acknowledged, and rows that change while a snapshot
  /// is written; for what is free again by itself pushes wait. 0: nine tenths of what the host, or the control group,
  /// has left when the server starts.
  std::size_t memory = 0;
  /// Time after which a worker whose connection has ended counts as lost: the others do not wait for it any more, and
  /// of its pushes those of ended clocks count. Above 0.
  std::chrono::milliseconds patience = std::chrono::seconds(3);
  /// A file in which every change is noted before it is made. A server that is started again with it goes on where the
  /// one that was killed had been; one that is damaged is refused (Corrupt) and stays as it is. Empty: none.
  std::string journal = {};
  /// Once there are so many bytes of changes in it, and as many as its rows take there, it is written anew beside, as
  /// the rows and what comes after. The server goes on meanwhile.
  std::size_t journal_tail = std::size_t{64} << 20;
  /// Uses shared memory for workers on this host, 4 MiB with each. With false, or if there is none, calls go over the
  /// socket.
  bool shared_memory = true;
  /// How many other servers of the job have a copy of what this one has, command by command, and go on in its place if
  /// it dies: 0 or 1, the same at all servers. It needs the store of `cohort run`, and for now no journal. nullopt: 1
  /// where the job goes on when a server dies (--server-restarts, --lost-servers) and there is no journal, else 0.
  std::optional<int> replicas = {};
  /// This server's number and how many there are, with replicas. Nothing: as its role says.
  std::optional<int> number = {};
  std::optional<int> servers = {};
};

class Server {
 public:
  /// Throws Unavailable if the place or the journal is taken, InvalidArgument, Io, Corrupt.
  explicit Server(const ServerOptions& options);
  /// One of `serve`, for a program that does something of its own until `workers_gone`.
  static std::unique_ptr<Server> of_job(ServerOptions options);
  /// Closes all connections.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// Address it listens at, with the port that the system chose, in the form of `ClientOptions::servers`.
  const std::string& endpoint() const noexcept;
  /// True if there have been workers and all of them have left or are lost.
  bool workers_gone() const;

 private:
  class Impl;
  Server(const ServerOptions& options, bool begins_anew);
  std::unique_ptr<Impl> impl_;
};

/// Runs a server of `cohort run --servers`: announces its address, and serves until all workers have left or are lost.
/// A `journal` that is a folder gets a file of each server. A server that `cohort run --server-restarts` has started
/// again listens where its predecessor did; under TF_CONFIG alone it is at its address there. Throws as Server, and
/// InvalidArgument in a process that is no server.
void serve(const ServerOptions& options = {});

struct ClientOptions {
  /// Endpoints of all servers, in the same order at all workers. Empty: those of this job, once all `serve`, and this
  /// process's number (`role_number`, `num_workers`) in place of the two below.
  std::vector<std::string> servers = {};
  std::string secret_file = {};  ///< as the servers'
  int worker = 0;
  int workers = 1;
  /// For all servers to be there.
  std::chrono::milliseconds connect_timeout = std::chrono::seconds(60);
  /// Timeout of a request, including connecting again. The error names the server, or the worker that is waited for.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

/// Result of a pull: what was read, and how old it is.
struct Pulled {
  std::int64_t clock = 0;     ///< all pushes of clocks before this one are in it
  std::int64_t behind = 0;    ///< clocks between that and the reader's own
  std::uint64_t version = 0;  ///< steps of rows that the table has had, over all servers asked
};

/// A request under way. The memory that it reads or writes has to stay until it is done. One thread at a time.
class [[nodiscard]] Work {
 public:
  struct State;
  explicit Work(std::unique_ptr<State> state);
  Work(Work&&) noexcept;
  Work& operator=(Work&&) = delete;
  /// Waits as `wait` does; an error that nobody waited for is logged as a warning.
  ~Work();

  /// Throws Timeout (names the server, or the workers that hold the others up), PeerLost, Unavailable (no memory),
  /// Mismatch, Aborted (this worker is taken for lost). May be called again.
  Pulled wait();

 private:
  std::unique_ptr<State> state_;
};

struct PushOptions {
  /// Replaces the optimizer's own rate, for this step. In Mode::Sync all pushes of a worker to a table in one clock
  /// have to say the same (InvalidArgument), and the lowest worker's counts for all.
  std::optional<double> lr = {};
};

struct TableStats {
  std::uint64_t rows = 0;     ///< over all servers, as all below
  std::uint64_t bytes = 0;    ///< that the rows and their index take
  std::uint64_t created = 0;  ///< rows; those that came back count again
  std::uint64_t evicted = 0;
  std::uint64_t dropped = 0;  ///< gradients of keys that were not admitted
  std::uint64_t steps = 0;    ///< of rows
  std::vector<std::uint64_t> rows_of_servers;
};

/// Rows of `dim` floats by 64-bit keys. Keys may stand in any order, and several times. Rows lie behind each other.
class Table {
 public:
  struct Impl;
  const TableOptions& options() const noexcept;

  /// Copies the keys' rows to `rows`; keys without a row give what it would begin as, and get none. Waits as the
  /// table's consistency says.
  Work pull(std::span<const std::uint64_t> keys, std::span<float> rows);
  /// A step of the optimizer by these gradients; those of a key that stands several times are added first, in the order
  /// in which they stand. Throws NonFinite, naming the key, for what is NaN or infinite: nothing is sent then.
  Work push(std::span<const std::uint64_t> keys, std::span<const float> gradients, const PushOptions& options = {});
  /// Both. The rows read include the push in Mode::Async only; in the others pushes take effect with `Client::clock`.
  Work push_pull(std::span<const std::uint64_t> keys, std::span<const float> gradients, std::span<float> rows,
                 const PushOptions& options = {});
  /// Assigns rows as given, at once whatever the consistency. If a key stands several times the last one counts. Throws
  /// NonFinite as `push`.
  Work assign(std::span<const std::uint64_t> keys, std::span<const float> rows);
  /// Rows that are as if they had never been, at once whatever the consistency.
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
  /// Requests as those of a table, for all elements.
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
  int keep = 0;  ///< the newest so many checkpoints stay in the folder, this one among them; 0: all
};

class Client {
 public:
  struct Impl;
  /// Throws Timeout if a server is not there by then (names it), PeerLost if it has ended, InvalidArgument, Mismatch
  /// (the servers know another number of workers, or another process that says it is this worker).
  static Client connect(ClientOptions options = {});
  Client(Client&&) noexcept;
  Client& operator=(Client&&) = delete;
  /// As `leave`, without waiting long; errors are logged.
  ~Client();

  int worker() const noexcept;
  int workers() const noexcept;

  /// The table of this name, made by its first client. Throws Mismatch, naming both, if it has other options.
  Table table(std::string_view name, const TableOptions& options);
  Variable variable(std::string_view name, const VariableOptions& options);

  /// Ends this worker's clock, on all servers or on none: waits until all servers have its pushes, then makes them
  /// count. Returns the new clock. A worker that is 16 clocks ahead of the slowest (more where a `Bounded` table allows
  /// it), as one that never pulls, waits for that. If this process dies meanwhile, servers settle among them whether it
  /// has ended. With backup workers it waits until the clock has ended, by those that count or without this worker, and
  /// returns the clock at which this one goes on; pushes of other threads wait meanwhile. After Timeout it may be
  /// called again.
  std::int64_t clock();
  std::int64_t now() const noexcept;
  /// How many of its clocks had ended without this worker (SyncOptions): what it had pushed for them was dropped.
  std::int64_t late_clocks() const noexcept;
  /// Waits until all workers have come here as often. After Timeout it may be called again, for the same time.
  void barrier();
  /// Saves all tables and variables in a new checkpoint in the folder, which all servers have to see at the same path;
  /// returns the checkpoint's own folder. The checkpoint is there as a whole or not at all. With Mode::Sync it has
  /// exactly the pushes of clocks before this worker's present one; else, and with backup workers, it is consistent
  /// only if no worker ends a clock, or pushes to tables of Mode::Async, before it is begun on all servers: between two
  /// barriers. One worker calls it. Servers go on while they write: rows that change meanwhile take their memory
  /// twice, and pushes wait if there is none. It has to be written within the client's `timeout`. Throws Io,
  /// Unavailable (another process is saving there), Timeout.
  std::string snapshot(const std::string& folder, const SnapshotOptions& options = {});
  /// Takes all rows of the newest snapshot in the folder whose files are sound, whatever number of servers wrote it,
  /// and makes the tables that are not there. One worker calls it, before any pushes. Clocks stay as they are; returns
  /// the snapshot's. Throws Unavailable if there is none or memory does not do, Corrupt, Mismatch (a table exists with
  /// other options).
  std::int64_t restore(const std::string& folder);
  /// The others do not wait for this worker any more. Pushes after the last `clock` are dropped, but in Mode::Async.
  /// All later calls but this one, of its tables and variables too, throw InvalidArgument.
  void leave();

 private:
  explicit Client(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace cohort::ps
