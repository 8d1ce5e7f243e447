#include "store/server.h"

#include "base/log.h"
#include "net/acceptor.h"
#include "net/socket.h"
#include "store/protocol.h"
#include "store/table.h"

#include <asio/executor_work_guard.hpp>
#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/post.hpp>
#include <asio/steady_timer.hpp>

#include <algorithm>
#include <future>
#include <map>
#include <set>
#include <thread>
#include <unordered_map>

namespace cohort::store {
namespace {

using Descriptor = asio::posix::stream_descriptor;

constexpr std::size_t kUnsentLimit = 4 << 20;  // a client that does not read is not read from either

struct Session;

// A request that waits for keys.
struct Waiter {
  Waiter(asio::io_context& io, std::shared_ptr<Session> asker, Request asked)
      : session(std::move(asker)), request(std::move(asked)), timer(io) {}
  std::weak_ptr<Session> session;
  Request request;
  asio::steady_timer timer;
  std::vector<std::string> parked_under;
};

struct Session {
  Session(asio::io_context& io, net::SecureConnection accepted)
      : connection(std::move(accepted)), descriptor(io, connection.fd()) {}
  ~Session() { descriptor.release(); }  // the descriptor belongs to the connection

  net::SecureConnection connection;
  Descriptor descriptor;
  bool greeted = false;
  bool said_good_bye = false;
  bool dropped = false;
  bool reading = false;
  bool writing = false;
  std::map<std::string, std::string> wills;
  std::set<std::shared_ptr<Waiter>> waiters;
};

using SessionPtr = std::shared_ptr<Session>;
using WaiterPtr = std::shared_ptr<Waiter>;

}  // namespace

class StoreServer::Impl {
 public:
  explicit Impl(const StoreServerOptions& options)
      : options_(options), work_(asio::make_work_guard(io_)), entrance_(io_) {
    if (!options.endpoint.is_unix() && !options.secret) {
      raise(ErrorCode::InvalidArgument,
            "a store server at {} needs a secret: without one it listens on Unix names only",
            net::to_string(options.endpoint));
    }
    sys::UniqueFd fd = value_or_throw(net::listen_on(options.endpoint));
    endpoint_ = value_or_throw(net::local_endpoint(fd.get()));
    net::Acceptor::Options accepting;
    accepting.secret = options.secret;
    accepting.secure = {.purpose = "store", .longest_message = kLongestMessage};
    accepting.most_pending = options.half_open_limit;
    accepting.patience = options.handshake_timeout;
    accepting.on_refused = [this](const net::Acceptor::Refusal& refused) { left(refused.why); };
    std::vector<sys::UniqueFd> listeners;
    listeners.push_back(std::move(fd));
    acceptor_.emplace(std::move(listeners), std::move(accepting));
    entrance_.assign(acceptor_->fd());
    accept_when_ready();
    thread_ = std::thread([this] { run(); });
  }

  ~Impl() {
    asio::post(io_, [this] {
      let_nobody_in();
      while (!sessions_.empty()) drop(*sessions_.begin());
      work_.reset();  // what has been cancelled ends in its handler, then the loop does
    });
    thread_.join();
  }

  const net::Endpoint& endpoint() const noexcept { return endpoint_; }

  void close_listener() {
    std::promise<void> closed;
    asio::post(io_, [this, &closed] {
      let_nobody_in();
      closed.set_value();
    });
    closed.get_future().wait();
  }

 private:
  void run() {
    while (!io_.stopped()) {
      try {
        io_.run();
      } catch (const std::exception& error) {  // out of memory for one client must not end the others
        log::error("store", "store server at {}: {}", net::to_string(endpoint_), error.what());
      }
    }
  }

  void let_nobody_in() {
    if (acceptor_) entrance_.release();  // the descriptor belongs to the acceptor
    acceptor_.reset();
  }

  void accept_when_ready() {
    entrance_.async_wait(Descriptor::wait_read, [this](const asio::error_code& error) {
      if (!error && acceptor_) accept_all();
    });
  }

  void accept_all() {
    try {
      while (auto accepted = acceptor_->next()) welcome(*std::move(accepted));
    } catch (const std::exception& error) {  // the next one is let in again
      complain(Error(ErrorCode::Io, error.what()));
    }
    accept_when_ready();
  }

  void welcome(net::Acceptor::Accepted accepted) {
    const auto session = std::make_shared<Session>(io_, std::move(accepted.connection));
    sessions_.insert(session);
    handle(session, accepted.first);
    on_ready(session);
  }

  // One line a second is enough for whoever knocks at the door.
  void complain(const Error& error) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_complaint_ < std::chrono::seconds(1)) {
      log::debug("store", "refused a connection: {}", error.what());
      return;
    }
    last_complaint_ = now;
    log::warn("store", "store server at {} refused a connection: {}", net::to_string(endpoint_), error.what());
  }

  // Of all addresses that are offered to a client it tries several, and goes from the others once one has answered.
  void left(const Error& error) {
    if (error.code() != ErrorCode::Unavailable) return complain(error);
    log::debug("store", "{}", error.what());
  }

  void arm(const SessionPtr& session) {
    if (session->dropped) return;
    if (!session->reading && session->connection.unsent_bytes() < kUnsentLimit) {
      session->reading = true;
      session->descriptor.async_wait(Descriptor::wait_read, [this, session](const asio::error_code& error) {
        session->reading = false;
        if (!error) on_ready(session);
      });
    }
    if (!session->writing && session->connection.wants_write()) {
      session->writing = true;
      session->descriptor.async_wait(Descriptor::wait_write, [this, session](const asio::error_code& error) {
        session->writing = false;
        if (!error) on_ready(session);
      });
    }
  }

  void on_ready(const SessionPtr& session) {
    if (session->dropped) return;
    const auto advanced = session->connection.advance();
    while (!session->dropped) {
      const auto message = session->connection.next_message();
      if (!message) break;
      handle(session, *message);
    }
    if (session->dropped) return;
    if (!advanced || session->connection.at_end()) return drop(session);
    arm(session);
  }

  void drop(const SessionPtr& given) {
    const SessionPtr session = given;  // `given` may be the set's own
    if (session->dropped) return;
    session->dropped = true;
    session->descriptor.cancel();
    for (const WaiterPtr& waiter : session->waiters) {
      unpark(waiter);
      waiter->timer.cancel();
    }
    session->waiters.clear();
    sessions_.erase(session);
    if (session->said_good_bye) return;
    for (const auto& [key, value] : session->wills) {
      if (table_.find(key) == nullptr && table_.set(key, value)) wake(key);
    }
  }

  void answer(const SessionPtr& session, const Reply& reply) {
    if (session->dropped) return;
    if (session->connection.queue(encode(reply))) {
      arm(session);
    } else {
      asio::post(io_, [this, session] { drop(session); });
    }
  }

  void handle(const SessionPtr& session, const std::string& message) {
    auto request = decode_request(message);
    if (!request) {
      log::warn("store", "store server at {}: {} sent nonsense: {}", net::to_string(endpoint_),
                session->connection.peer(), request.error().what());
      return drop(session);
    }
    if (!session->greeted && request->op != Op::Hello) return drop(session);
    Reply reply;
    reply.id = request->id;
    switch (request->op) {
      case Op::Hello: return greet(session, *request);
      case Op::GoodBye: session->said_good_bye = true; return drop(session);
      case Op::Set: {
        const auto done = table_.set(request->keys[0], request->value);
        if (!done) reply.error = done.error();
        break;
      }
      case Op::TryGet:
        if (const std::string* value = table_.find(request->keys[0])) reply.value = *value;
        break;
      case Op::Add: {
        const auto sum = table_.add(request->keys[0], request->amount);
        if (sum) {
          reply.number = *sum;
        } else {
          reply.error = sum.error();
        }
        break;
      }
      case Op::CompareAndSet: {
        auto now = table_.compare_and_set(request->keys[0], request->expected, request->value);
        if (now) {
          reply.value = *std::move(now);
        } else {
          reply.error = now.error();
        }
        break;
      }
      case Op::Delete: reply.number = table_.erase(request->keys[0]) ? 1 : 0; break;
      case Op::LeaveWill: session->wills[request->keys[0]] = request->value; break;
      case Op::WithdrawWill: session->wills.erase(request->keys[0]); break;
      case Op::Wait:
      case Op::GetAny: return start_waiting(session, *std::move(request));
    }
    const bool may_set = request->op == Op::Set || request->op == Op::Add || request->op == Op::CompareAndSet;
    answer(session, reply);
    if (may_set && !reply.error) wake(request->keys[0]);
  }

  void greet(const SessionPtr& session, const Request& hello) {
    Reply reply;
    reply.id = hello.id;
    if (hello.amount != kProtocolVersion) {
      reply.error =
          Error(ErrorCode::Mismatch,
                fmt::format("the store server at {} speaks version {} of its protocol, and {} version {} "
                            "-- use the same Cohort everywhere",
                            net::to_string(endpoint_), kProtocolVersion, session->connection.peer(), hello.amount));
    } else if (hello.value != options_.meeting) {
      reply.error =
          Error(ErrorCode::Unavailable, fmt::format("another meeting ('{}') is being held at {}, not '{}'",
                                                    options_.meeting, net::to_string(endpoint_), hello.value));
    } else {
      session->greeted = true;
    }
    answer(session, reply);
  }

  // True if the wait is over and has been answered.
  bool try_finish(const WaiterPtr& waiter) {
    const SessionPtr session = waiter->session.lock();
    if (!session) return true;
    const Request& request = waiter->request;
    Reply reply;
    reply.id = request.id;
    std::vector<std::string> missing;
    for (std::size_t i = 0; i < request.keys.size(); ++i) {
      const std::string* const value = table_.find(request.keys[i]);
      if (value == nullptr) {
        missing.push_back(request.keys[i]);
        // One missing key is enough to go on waiting under; all are looked at again when it comes.
        if (request.op == Op::Wait) break;
      } else if (request.op == Op::GetAny) {
        reply.number = static_cast<std::int64_t>(i);
        reply.value = *value;
        missing.clear();
        break;
      } else if (request.keys.size() == 1) {
        reply.value = *value;
      }
    }
    if (missing.empty()) {
      waiter->timer.cancel();
      session->waiters.erase(waiter);
      answer(session, reply);
      return true;
    }
    waiter->parked_under = std::move(missing);
    for (const std::string& key : waiter->parked_under) parked_[key].push_back(waiter);
    return false;
  }

  void start_waiting(const SessionPtr& session, Request request) {
    if (request.keys.empty()) {
      Reply reply;
      reply.id = request.id;
      return answer(session, reply);
    }
    const std::chrono::milliseconds limit(std::min<std::uint64_t>(request.timeout_ms, 1'000'000'000'000));
    const auto waiter = std::make_shared<Waiter>(io_, session, std::move(request));
    session->waiters.insert(waiter);
    if (try_finish(waiter)) return;
    waiter->timer.expires_after(limit);
    waiter->timer.async_wait([this, waiter](const asio::error_code& error) {
      if (!error) give_up(waiter);
    });
  }

  void give_up(const WaiterPtr& waiter) {
    const SessionPtr session = waiter->session.lock();
    if (!session || session->waiters.erase(waiter) == 0) return;
    unpark(waiter);
    Reply reply;
    reply.id = waiter->request.id;
    reply.error = Error(ErrorCode::Timeout, "");
    for (const std::string& key : waiter->request.keys) {
      if (table_.find(key) == nullptr) reply.keys.push_back(key);
    }
    answer(session, reply);
  }

  void unpark(const WaiterPtr& waiter) {
    for (const std::string& key : waiter->parked_under) {
      const auto found = parked_.find(key);
      if (found == parked_.end()) continue;
      std::erase(found->second, waiter);
      if (found->second.empty()) parked_.erase(found);
    }
    waiter->parked_under.clear();
  }

  void wake(const std::string& key) {
    const auto found = parked_.find(key);
    if (found == parked_.end()) return;
    const std::vector<WaiterPtr> waiters = found->second;
    for (const WaiterPtr& waiter : waiters) {
      unpark(waiter);
      try_finish(waiter);
    }
  }

  const StoreServerOptions options_;
  net::Endpoint endpoint_;
  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  Descriptor entrance_;
  std::optional<net::Acceptor> acceptor_;
  std::chrono::steady_clock::time_point last_complaint_{};
  std::set<SessionPtr> sessions_;
  std::unordered_map<std::string, std::vector<WaiterPtr>> parked_;
  Table table_;
  std::thread thread_;
};

StoreServer::StoreServer(const StoreServerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
StoreServer::~StoreServer() = default;
const net::Endpoint& StoreServer::endpoint() const noexcept { return impl_->endpoint(); }
void StoreServer::close_listener() { impl_->close_listener(); }

}  // namespace cohort::store
