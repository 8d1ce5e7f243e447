// A worker's way to whoever serves one server's rows now: the process that did, or the one that has taken its place,
// for which the other servers are asked. One thread at a time, but for what says otherwise.
// A worker's way to one server: requests under way, sent again in their order when the connection has broken, so that
// each change is made once. No thread: those that wait move it on. Any thread.
#pragma once

#include "net/rpc.h"
#include "ps/protocol.h"

#include <cohort/ps.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace cohort::ps {

class Route {
 public:
  /// To the rows of `hello.server`.
  Route(const Hello& hello, std::string secret_file);

  struct Met {
    std::shared_ptr<net::RpcClient> rpc;
    Welcome welcome;
  };
  /// Until it has been let in or the deadline has passed: Timeout. Or throws what the server has against it.
  Met meet(Hello hello, net::Deadline deadline);
  /// Whether another process serves the rows by now; asks the other servers for a moment. Any thread.
  bool has_moved();

 private:
  struct Place {
    std::string endpoint;
    std::uint64_t epoch = 0;  ///< 0: nobody would take its place
  };
  /// Nobody, but where it is `elsewhere`, if that is what the process there says.
  Met greet(const net::RpcPlace& at, const Hello& hello, net::Deadline deadline, Place& elsewhere) const;
  /// Goes on through shared memory if the process at `place` is on this host.
  void share_memory(Met& met, net::RpcPlace place, const Hello& hello, net::Deadline deadline) const;
  Place place() const;
  void set(const Place& place);
  /// The newest that the others know.
  Place ask_others(std::chrono::milliseconds each) const;
  void demand_that_it_runs(const std::string& endpoint) const;

  const std::vector<std::string> servers_;
  const std::uint32_t rows_;
  const std::string secret_file_;
  mutable std::mutex mutex_;
  Place place_;
};

/// What the answer said, and what follows it: where it came, maybe in memory that is shared with the server, so to be
/// read once, and not to be kept.
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
  /// Comes as this process of the worker.
  Welcome come(std::uint64_t incarnation, net::Deadline deadline);

  /// Sends what `build` makes: of a change, with its place in the order. Waits for earlier requests where too many
  /// bytes are under way. `room`: bytes of the answer, about, if it has more than few.
  RequestPtr send(Method method, std::string body, std::size_t room = 0);
  RequestPtr send_change(Method method, const std::function<std::string(const Order&)>& build);
  /// For `build`, within it: the memory of an earlier request, which the system need not make anew page by page. Or
  /// none.
  std::string spare_body();
  /// Waits for the answers of all changes that are under way; what they were is for those who `finish` them.
  void drain();
  /// Says a word, so that a connection that has broken is made again, though nobody asks anything.
  void keep_alive() noexcept;
  /// If the server owes an answer for long: looks whether another process has taken its place, and goes there.
  void look_around() noexcept;
  /// From now on no request waits longer.
  void hurry(std::chrono::milliseconds timeout);
  /// Waits for the answer until the request's deadline; throws what the server answered. Once.
  Heard finish(const RequestPtr& request);
  /// The time that is left of it, for requests that the server makes wait.
  std::uint32_t patience_ms() const noexcept;
  /// "parameter server 2 at 10.0.0.1:4711".
  const std::string& name() const noexcept { return name_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  Welcome greet(net::Deadline deadline, const Hello& hello);
  RequestPtr enqueue(Lock& lock, Method method, std::uint64_t sequence, std::string body, std::size_t room);
  void transmit(Request& request);
  /// The connection that has this number is lost: makes another one and sends again what has not been answered.
  void recover(Lock& lock, std::uint64_t connection, net::Deadline deadline);
  void make_room(Lock& lock, std::size_t bytes);
  void keep_spare(std::string body);
  /// Until its answer is there or a deadline has passed. With the lock; lets it go meanwhile.
  void receive(Lock& lock, const RequestPtr& request);

  Route route_;
  const std::string name_;
  Hello hello_;
  std::atomic<std::chrono::milliseconds> timeout_;

  std::mutex mutex_;
  std::condition_variable received_;
  std::shared_ptr<net::RpcClient> rpc_;
  std::uint64_t connection_ = 0;     // counts them
  std::list<RequestPtr> under_way_;  // in the order in which they were sent
  std::size_t bytes_under_way_ = 0;
  std::vector<std::string> spare_;  // bodies of requests that have been answered
  std::uint64_t sequence_ = 0;
  std::chrono::steady_clock::time_point owed_since_{};  // when it answered last, or was asked after it had answered all
  std::chrono::steady_clock::time_point look_{};        // not before, at whether its rows have moved
  bool silent_ = false;                                 // it has not answered within a request's time
  std::optional<Error> dead_;
};

}  // namespace cohort::ps
