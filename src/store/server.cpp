#include "store/server.h"

#include "net/rpc.h"
#include "store/protocol.h"
#include "store/table.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

namespace cohort::store {
namespace {

struct Session;

// A request that waits for keys.
struct Waiter {
  std::weak_ptr<Session> session;
  std::uint64_t id = 0;
  Request request;
  std::shared_ptr<void> deadline;
  std::vector<std::string> parked_under;
};

// A client that has been greeted.
struct Session {
  net::RpcServer::ClientPtr client;
  bool said_good_bye = false;
  std::map<std::string, std::string> wills;
  std::set<std::shared_ptr<Waiter>> waiters;
};

using SessionPtr = std::shared_ptr<Session>;
using WaiterPtr = std::shared_ptr<Waiter>;

}  // namespace

class StoreServer::Impl final : net::RpcServer::Service {
 public:
  explicit Impl(const StoreServerOptions& options)
      : meeting_(options.meeting),
        server_({.name = "store server",
                 .endpoint = options.endpoint,
                 .secret = options.secret,
                 .secure = {.purpose = "store", .longest_message = kLongestMessage},
                 .half_open_limit = options.half_open_limit,
                 .handshake_timeout = options.handshake_timeout},
                *this) {}

  net::RpcServer& server() noexcept { return server_; }

  void set_if_absent(std::string key, std::string value) {
    server_.post([this, key = std::move(key), value = std::move(value)] {
      if (table_.find(key) == nullptr && table_.set(key, value)) wake(key);
    });
  }

 private:
  Result<void> on_call(const net::RpcServer::ClientPtr& client, const net::RpcServer::Call& call) override {
    auto request = decode_request(call.method, call.body);
    if (!request) return tl::unexpected(request.error());
    if (request->op == Op::Hello) {
      greet(client, call.id, *request);
    } else if (const auto found = sessions_.find(client); found != sessions_.end()) {
      handle(found->second, call.id, *std::move(request));
    } else {
      server_.close(client);
    }
    return {};
  }

  void on_gone(const net::RpcServer::ClientPtr& client) override {
    const auto found = sessions_.find(client);
    if (found == sessions_.end()) return;
    const SessionPtr session = std::move(found->second);
    sessions_.erase(found);
    for (const WaiterPtr& waiter : session->waiters) {
      unpark(waiter);
      waiter->deadline.reset();
    }
    session->waiters.clear();
    if (session->said_good_bye) return;
    for (const auto& [key, value] : session->wills) {
      if (table_.find(key) == nullptr && table_.set(key, value)) wake(key);
    }
  }

  void answer(const SessionPtr& session, std::uint64_t id, const Reply& reply) {
    server_.answer(session->client, id, encode(reply));
  }

  void handle(const SessionPtr& session, std::uint64_t id, Request request) {
    Reply reply;
    switch (request.op) {
      case Op::Hello: break;  // greeted before
      case Op::GoodBye: session->said_good_bye = true; return server_.close(session->client);
      case Op::Set: {
        const auto done = table_.set(request.keys[0], request.value);
        if (!done) reply.error = done.error();
        break;
      }
      case Op::TryGet:
        if (const std::string* value = table_.find(request.keys[0])) reply.value = *value;
        break;
      case Op::Add: {
        const auto sum = table_.add(request.keys[0], request.amount);
        if (sum) {
          reply.number = *sum;
        } else {
          reply.error = sum.error();
        }
        break;
      }
      case Op::CompareAndSet: {
        auto now = table_.compare_and_set(request.keys[0], request.expected, request.value);
        if (now) {
          reply.value = *std::move(now);
        } else {
          reply.error = now.error();
        }
        break;
      }
      case Op::Delete: reply.number = table_.erase(request.keys[0]) ? 1 : 0; break;
      case Op::LeaveWill: session->wills[request.keys[0]] = request.value; break;
      case Op::WithdrawWill: session->wills.erase(request.keys[0]); break;
      case Op::Wait:
      case Op::GetAny: return start_waiting(session, id, std::move(request));
    }
    const bool may_set = request.op == Op::Set || request.op == Op::Add || request.op == Op::CompareAndSet;
    answer(session, id, reply);
    if (may_set && !reply.error) wake(request.keys[0]);
  }

  void greet(const net::RpcServer::ClientPtr& client, std::uint64_t id, const Request& hello) {
    Reply reply;
    const std::string place = net::to_string(server_.endpoint());
    if (hello.amount != kProtocolVersion) {
      reply.error = Error(ErrorCode::Mismatch,
                          fmt::format("the store server at {} speaks version {} of its protocol, and {} version {} "
                                      "-- use the same Cohort everywhere",
                                      place, kProtocolVersion, net::RpcServer::peer(client), hello.amount));
    } else if (hello.value != meeting_) {
      reply.error = Error(ErrorCode::Unavailable, fmt::format("another meeting ('{}') is being held at {}, not '{}'",
                                                              meeting_, place, hello.value));
    } else {
      auto& session = sessions_[client];
      if (!session) session = std::make_shared<Session>(Session{client, false, {}, {}});
    }
    server_.answer(client, id, encode(reply));
  }

  // True if the wait is over and has been answered.
  bool try_finish(const WaiterPtr& waiter) {
    const SessionPtr session = waiter->session.lock();
    if (!session) return true;
    const Request& request = waiter->request;
    Reply reply;
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
      waiter->deadline.reset();
      session->waiters.erase(waiter);
      answer(session, waiter->id, reply);
      return true;
    }
    waiter->parked_under = std::move(missing);
    for (const std::string& key : waiter->parked_under) parked_[key].push_back(waiter);
    return false;
  }

  void start_waiting(const SessionPtr& session, std::uint64_t id, Request request) {
    if (request.keys.empty()) return answer(session, id, {});
    const std::chrono::milliseconds limit(std::min<std::uint64_t>(request.timeout_ms, 1'000'000'000'000));
    const auto waiter = std::make_shared<Waiter>(Waiter{session, id, std::move(request), nullptr, {}});
    session->waiters.insert(waiter);
    if (!try_finish(waiter)) waiter->deadline = server_.after(limit, [this, waiter] { give_up(waiter); });
  }

  void give_up(const WaiterPtr& waiter) {
    const SessionPtr session = waiter->session.lock();
    if (!session || session->waiters.erase(waiter) == 0) return;
    unpark(waiter);
    Reply reply;
    reply.error = Error(ErrorCode::Timeout, "");
    for (const std::string& key : waiter->request.keys) {
      if (table_.find(key) == nullptr) reply.keys.push_back(key);
    }
    answer(session, waiter->id, reply);
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

  const std::string meeting_;
  std::map<net::RpcServer::ClientPtr, SessionPtr> sessions_;
  std::unordered_map<std::string, std::vector<WaiterPtr>> parked_;
  Table table_;
  net::RpcServer server_;  // the first to end: it calls the rest
};

StoreServer::StoreServer(const StoreServerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
StoreServer::~StoreServer() = default;
const net::Endpoint& StoreServer::endpoint() const noexcept { return impl_->server().endpoint(); }
void StoreServer::set_if_absent(std::string key, std::string value) {
  impl_->set_if_absent(std::move(key), std::move(value));
}
void StoreServer::close_listener() { impl_->server().close_listener(); }

}  // namespace cohort::store
