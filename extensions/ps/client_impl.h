// Link: a worker's link to one server. Requests under way are sent again in their order when the connection has broken,
// so that each change is made once. Has no thread of its own: waiting callers advance it. Any thread.
// Client::Impl: state that a client and its tables share: the links to the servers, the clock, a table's numbers there.
// Private to the client's own files (client*.cpp, requests.*). Lives as long as the client, any table or any request of
// it; until then its thread keeps connections alive. Any thread; a table's sum under its mutex.
// Requests: one call on a table, divided into messages of bounded size by server, without duplicate keys; and the
// answers that a Work waits for. Private to the client's own files. One thread at a time.
#pragma once

#include "net/rpc.h"
#include "ps/key_map.h"
#include "ps/protocol.h"
#include "ps/server_map.h"

#include <cohort/ps.h>

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::ps {

/// A worker's route to the process that serves one server's rows now. If the last known process does not answer, the
/// other servers are asked which one has taken its place. One thread at a time, except for members that say otherwise.
class Route {
 public:
  /// Makes a route to the rows of `hello.server`.
  Route(const Hello& hello, std::string secret_file);

  struct Met {
    std::shared_ptr<net::RpcClient> rpc;
    Welcome welcome;
  };
  /// Tries until a server accepts the worker. Throws Timeout at the deadline, or a server's reason for a refusal.
  Met meet(Hello hello, net::Deadline deadline);
  /// Returns whether another process serves the rows now. Asks the other servers, with a short timeout. Any thread.
  bool has_moved();

 private:
  struct Place {
    std::string endpoint;
    std::uint64_t epoch = 0;  ///< 0: no other process would take its place
  };
  /// Greets the process at `at`. Returns no connection, but sets `elsewhere`, if it says that another process serves
  /// the rows.
  Met greet(const net::RpcPlace& at, const Hello& hello, net::Deadline deadline, Place& elsewhere) const;
  /// Replaces the connection by one through shared memory if the process at `place` is on this host.
  void share_memory(Met& met, net::RpcPlace place, const Hello& hello, net::Deadline deadline) const;
  Place place() const;
  void set(const Place& place);
  /// Returns the newest place that the other servers know.
  Place ask_others(std::chrono::milliseconds each) const;
  void demand_that_it_runs(const std::string& endpoint) const;

  const std::vector<std::string> servers_;
  const std::uint32_t rows_;
  const std::string secret_file_;
  mutable std::mutex mutex_;
  Place place_;
};

/// An answer and the payload behind it. The payload stays where it arrived, perhaps in memory shared with the server:
/// read it once, and do not keep it.
struct Heard {
  Answer answer;
  net::RpcAnswer whole;
  std::size_t payload_at = 0;
  std::string_view payload() const noexcept { return whole.body().substr(payload_at); }
};

class Link {
 public:
  struct Request;
  using RequestPtr = std::shared_ptr<Request>;

  Link(const Hello& hello, const std::string& secret_file, std::chrono::milliseconds timeout);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  /// Asks what the server knows of the worker.
  Welcome ask(net::Deadline deadline);
  /// Joins the server as this incarnation of the worker.
  Welcome come(std::uint64_t incarnation, net::Deadline deadline);

  /// Send a request, or a change. `build` makes a change's body, with the change's number. Waits for earlier requests
  /// if too many bytes are under way. `room`: approximate size of the answer if it is large.
  RequestPtr send(Method method, std::string body, std::size_t room = 0);
  RequestPtr send_change(Method method, const std::function<std::string(const Order&)>& build);
  /// Returns the memory of an earlier request, or an empty string, for use within `build`: avoids mapping new pages.
  std::string spare_body();
  /// Waits for the answers of all changes under way; the answers are for the callers of `finish`.
  void drain();
  /// Throws the error after which it is not known which changes the server has made, if there was one.
  void demand_alive();
  /// Returns whether `finish` has thrown that error.
  bool has_reported() const noexcept { return reported_; }
  /// Sends a ping, so that a broken connection is made again even if there are no requests.
  void keep_alive() noexcept;
  /// If an answer is overdue, checks whether another process has taken the server's place, and then reconnects to it.
  void look_around() noexcept;
  /// Limits the wait of all requests, from now on, to `timeout`.
  void hurry(std::chrono::milliseconds timeout);
  /// Waits for the answer until the request's deadline; throws the server's error. May be called once.
  Heard finish(const RequestPtr& request);
  /// Time that the server may let a request wait for others, in milliseconds.
  std::uint32_t patience_ms() const noexcept;
  /// "parameter server 2 at 10.0.0.1:4711".
  const std::string& name() const noexcept { return name_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  Welcome greet(net::Deadline deadline, const Hello& hello);
  RequestPtr enqueue(Lock& lock, Method method, std::uint64_t sequence, std::string body, std::size_t room);
  void transmit(Request& request);
  /// Called when the connection of this number is lost: makes another one and sends unanswered requests again.
  void recover(Lock& lock, std::uint64_t connection, net::Deadline deadline);
  void go_on_after(std::uint64_t mark);
  void make_room(Lock& lock, std::size_t bytes);
  void keep_spare(std::string body);
  /// Blocks until the request's answer is there or its deadline has passed. Releases the lock while it waits.
  void receive(Lock& lock, const RequestPtr& request);

  Route route_;
  const std::string name_;
  Hello hello_;
  std::atomic<std::chrono::milliseconds> timeout_;

  std::mutex mutex_;
  std::condition_variable received_;
  std::shared_ptr<net::RpcClient> rpc_;
  std::uint64_t connection_ = 0;     // number of the present connection
  std::list<RequestPtr> under_way_;  // in the order of sending
  std::size_t bytes_under_way_ = 0;
  std::vector<std::string> spare_;                      // bodies of requests that have been answered
  std::uint64_t sequence_ = 0;                          // the last change's
  std::uint64_t made_ = 0;                              // number of the last change that was answered without error
  std::chrono::steady_clock::time_point owed_since_{};  // time of the last answer, or of the first unanswered request
  std::chrono::steady_clock::time_point look_{};        // earliest time of the next `has_moved`
  bool silent_ = false;                                 // the server has not answered a request within its timeout
  std::optional<Error> dead_;
  std::atomic<bool> reported_{false};  // a caller knows of `dead_`
};

struct Client::Impl {
  ClientOptions options;
  Placement placement;
  std::deque<Link> links;
  std::atomic<std::int64_t> clock{0};
  std::uint64_t barrier = 0;
  std::atomic<bool> left{false};

  /// Throws if pushes of one clock to a table in Mode::Sync differ in the learning rate, since each row has one step.
  void demand_one_rate(const Table::Impl& table, std::optional<double> lr);
  std::mutex rates_mutex;
  std::map<std::uint32_t, std::pair<std::int64_t, double>> rates;  // by table: the last clock with a push, and its rate

  /// Bounds how far a worker that only pushes runs ahead: servers hold the pushes of its clocks in memory.
  void wait_for_slower();
  std::atomic<std::int64_t> most_ahead{0};  // clocks; 0: no table of this client waits for other workers
  std::int64_t ended_by_all = 0;            // clocks, at the last request

  /// Sends requests to all servers, passes each answer to `take`, and only then throws the first failure.
  using Take = std::function<void(std::size_t server, const Heard&)>;
  void ask_all(const std::function<Link::RequestPtr(std::size_t server)>& ask, const Take& take = {});
  void change_all(Method method, const std::function<std::string(const Order&)>& build, const Take& take = {}) {
    ask_all([&](std::size_t server) { return links[server].send_change(method, build); }, take);
  }

  // Connections that break while there are no requests are made again, since a server takes a disconnected worker for
  // lost.
  std::mutex mutex;
  std::condition_variable stopping;
  bool stopped = false;
  std::thread keeper;
  pid_t process = ::getpid();

  ~Impl();
  void keep();
  /// Throws InvalidArgument if the worker has left: servers would answer as to a worker that is gone.
  void demand_here(const char* what) const;
  /// Stops keeping connections, since servers close them and end when all workers have left.
  void stop_keeping();
};

struct Table::Impl {
  std::shared_ptr<Client::Impl> client;
  std::string name;
  TableOptions options;
  std::int64_t elements = 0;
  std::vector<std::uint32_t> numbers;  // the table's number on each server
  std::mutex mutex;
  KeyedSum sum;  // under the mutex

  std::size_t dim() const noexcept { return static_cast<std::size_t>(options.dim); }
  std::uint32_t server_of(std::uint64_t key) const noexcept {
    return client->placement.server_of_row(key, elements, options.dim);
  }
};

/// The keys of a call that go to one server in one message.
struct Part {
  std::uint32_t server;
  std::vector<std::uint32_t> places;  // indices among the unique keys
};

struct Work::State {
  struct Sent {
    Link* link;
    Link::RequestPtr request;
    std::vector<std::uint32_t> places = {};  // indices of the rows that it reads, among the unique keys
    bool reads = false;
  };

  std::shared_ptr<Client::Impl> client;
  std::int64_t clock = 0;
  std::vector<Sent> sent = {};
  std::vector<std::uint32_t> unique_of = {};  // by input: index of its unique key; empty for a variable
  std::vector<std::uint32_t> first_of = {};   // by unique key: its first input
  std::span<float> rows = {};                 // memory for the results; a variable's last row may be shorter
  std::size_t dim = 0;
  bool finished = false;
  Pulled pulled = {};
  std::optional<Error> failed = {};

  void finish();
  void take_rows(const Sent& one, std::string_view payload) const;
};

/// Requests of one call on a table.
class Requests {
 public:
  explicit Requests(Table::Impl& table);

  void pull(std::span<const std::uint64_t> keys, std::span<float> rows);
  /// Adds gradients of duplicate keys.
  void push(std::span<const std::uint64_t> keys, std::span<const float> gradients, std::optional<double> lr);
  /// Assigns the last row of a duplicate key.
  void assign(std::span<const std::uint64_t> keys, std::span<const float> rows);
  void erase(std::span<const std::uint64_t> keys);

  // For a variable, whose keys are its pieces: values are sent from, and received into, the caller's memory.
  void pull_pieces(std::span<float> values);
  void push_pieces(std::span<const float> gradients, std::optional<double> lr);
  void assign_pieces(std::span<const float> values);

  Work take() { return Work(std::move(state_)); }

 private:
  void demand_rate(std::optional<double> lr) const;
  void demand_rows(const char* what, std::size_t keys, std::size_t floats) const;
  /// Throws unless all values are finite. `what` and `noun` name `rows` in the message: "push", "gradient".
  void demand_finite(const char* what, const char* noun, const std::vector<std::uint64_t>& unique,
                     std::span<const float> rows) const;
  std::vector<std::uint64_t> pieces(std::size_t floats) const;
  void ask(const std::vector<std::uint64_t>& unique);
  std::vector<Part> parts(const std::vector<std::uint64_t>& unique, std::size_t bytes) const;
  /// Pads a last row that is not whole with zeros.
  void change(Method method, const std::vector<std::uint64_t>& unique, std::span<const float> rows,
              std::optional<double> lr);

  Table::Impl& table_;
  std::unique_ptr<Work::State> state_;
};

}  // namespace cohort::ps
