#include "net/served_store.h"

#include "base/records.h"
#include "net/rpc.h"
#include "net/store.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

namespace cohort::store {
namespace {

constexpr codec::Limits kLimits{.longest_text = kLongestValue, .what = "store message"};

}  // namespace

void visit_fields(auto& m, auto& a, const Request*) {
  a(m.amount, m.timeout_ms, codec::most(m.keys, kMostKeys, kLongestKey), m.value, m.expected);
  const bool needs_key = m.op != Op::Hello && m.op != Op::GoodBye;
  a.demand(!needs_key || !m.keys.empty(), "an operation without a key");
  a.demand(m.op != Op::GetAll || (m.amount >= 0 && static_cast<std::uint64_t>(m.amount) <= m.keys.size()),
           "a wait for more keys than it names");
}
void visit_fields(auto& m, auto& a, const Reply*) {
  a(m.error, m.number, m.value, codec::most(m.values, kMostKeys, kLongestValue), codec::most(m.missing, kMostKeys));
}

std::string encode(const Request& request) { return codec::encode(request); }
std::string encode(const Reply& reply) { return codec::encode(reply); }
Result<Request> decode_request(std::uint8_t method, std::string_view bytes) {
  Request request;
  codec::Decoder in(bytes, kLimits);
  in.demand(method < kOpCount, "an operation that does not exist");
  request.op = static_cast<Op>(method);
  in(request);
  if (auto done = in.finish(); !done) return tl::unexpected(std::move(done).error());
  return request;
}
Result<Reply> decode_reply(std::string_view bytes) { return codec::decode<Reply>(bytes, kLimits); }

namespace {

struct Session;

// A request that waits for keys.
struct Waiter {
  std::weak_ptr<Session> session;
  std::uint64_t id = 0;
  Request request;
  std::shared_ptr<void> deadline = nullptr;
  std::size_t next = 0;  // the keys before this one existed when they were looked at
  std::vector<std::string> parked_under = {};
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
                 .half_open_limit = options.half_open_limit + options.expected,
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
      case Op::Hello: break;  // handled before
      case Op::GoodBye: session->said_good_bye = true; return server_.close(session->client);
      case Op::Set: {
        const auto done = table_.set(request.keys[0], request.value);
        if (!done) reply.error = done.error();
        break;
      }
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
      case Op::GetAll: return start_waiting(session, id, std::move(request));
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

  // Returns whether the wait is over and has been answered. Looks only at keys that may have changed: N ranks set the
  // keys that one of them waits for.
  bool try_finish(const WaiterPtr& waiter, bool late) {
    const SessionPtr session = waiter->session.lock();
    if (!session) return true;
    const std::span<const std::string> all(waiter->request.keys);
    const auto keys = all.first(static_cast<std::size_t>(waiter->request.amount));
    const auto unless = all.subspan(keys.size());
    const auto first_missing = [&](std::size_t from) {
      while (from < keys.size() && table_.find(keys[from]) != nullptr) ++from;
      return from;
    };
    waiter->next = first_missing(waiter->next);
    if (waiter->next == keys.size()) waiter->next = first_missing(0);  // some may have been deleted
    const bool some_missing = keys.empty() || waiter->next < keys.size();
    const bool ended = !unless.empty() && table_.settles({}, unless);
    if (some_missing && !late && !ended) {
      waiter->parked_under.assign(unless.begin(), unless.end());
      if (!keys.empty()) waiter->parked_under.push_back(keys[waiter->next]);
      for (const std::string& key : waiter->parked_under) parked_[key].insert(waiter);
      return false;
    }
    waiter->deadline.reset();
    session->waiters.erase(waiter);
    answer(session, waiter->id, reply_of(table_.gather(keys, unless)));
    return true;
  }

  static Reply reply_of(Store::Gathered found) {
    Reply reply;
    reply.number = found.ended ? static_cast<std::int64_t>(found.ended->index) : -1;
    if (found.ended) reply.value = std::move(found.ended->value);
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < found.values.size(); ++i) {
      if (found.values[i]) {
        bytes += found.values[i]->size();
        reply.values.push_back(*std::move(found.values[i]));
      } else {
        reply.missing.push_back(static_cast<std::uint32_t>(i));
      }
    }
    if (bytes <= 2 * kLongestValue) return reply;
    reply = {};
    reply.error = Error(ErrorCode::InvalidArgument,
                        fmt::format("store: {} bytes of values in one answer, at most {}", bytes, 2 * kLongestValue));
    return reply;
  }

  void start_waiting(const SessionPtr& session, std::uint64_t id, Request request) {
    const std::chrono::milliseconds limit(std::min<std::uint64_t>(request.timeout_ms, 1'000'000'000'000));
    const auto waiter = std::make_shared<Waiter>(Waiter{session, id, std::move(request)});
    session->waiters.insert(waiter);
    if (try_finish(waiter, limit.count() == 0)) return;
    waiter->deadline = server_.after(limit, [this, waiter] {
      unpark(waiter);
      (void)try_finish(waiter, true);
    });
  }

  void unpark(const WaiterPtr& waiter) {
    for (const std::string& key : waiter->parked_under) {
      const auto found = parked_.find(key);
      if (found == parked_.end()) continue;
      found->second.erase(waiter);
      if (found->second.empty()) parked_.erase(found);
    }
    waiter->parked_under.clear();
  }

  void wake(const std::string& key) {
    const auto found = parked_.find(key);
    if (found == parked_.end()) return;
    const std::set<WaiterPtr> waiters = found->second;
    for (const WaiterPtr& waiter : waiters) {
      unpark(waiter);
      (void)try_finish(waiter, false);
    }
  }

  const std::string meeting_;
  std::map<net::RpcServer::ClientPtr, SessionPtr> sessions_;
  std::unordered_map<std::string, std::set<WaiterPtr>> parked_;  // as many as ranks under one key
  Table table_;
  net::RpcServer server_;  // the last member, so destroyed first: it calls this object
};

StoreServer::StoreServer(const StoreServerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
StoreServer::~StoreServer() = default;
const net::Endpoint& StoreServer::endpoint() const noexcept { return impl_->server().endpoint(); }
void StoreServer::set_if_absent(std::string key, std::string value) {
  impl_->set_if_absent(std::move(key), std::move(value));
}
void StoreServer::close_listener() { impl_->server().close_listener(); }

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The server answers a wait at its deadline, with the missing keys. If no answer comes within this time after the
// deadline, the server counts as gone.
constexpr seconds kGrace{10};

class RemoteStore final : public MeetingStore {
 public:
  RemoteStore(net::SecureConnection connection, const std::string& place, milliseconds call_timeout)
      : rpc_(std::move(connection), "store", place), place_(place), call_timeout_(call_timeout) {}

  ~RemoteStore() override {
    rpc_.say(static_cast<std::uint8_t>(Op::GoodBye), encode(Request{}), net::deadline_in(seconds(1)));
  }

  void hello(const std::string& meeting, Deadline deadline) {
    Request request;
    request.op = Op::Hello;
    request.amount = kProtocolVersion;
    request.value = meeting;
    (void)call(std::move(request), deadline);
  }

  void set(std::string_view key, std::string_view value) override {
    value_or_throw(check_sizes(key, value));
    Request request = make(Op::Set, key);
    request.value = value;
    (void)call(std::move(request));
  }

  Gathered get_all(std::span<const std::string> keys, std::span<const std::string> unless, Deadline deadline) override {
    Request request;
    request.op = Op::GetAll;
    request.amount = static_cast<std::int64_t>(keys.size());
    request.keys.assign(keys.begin(), keys.end());
    request.keys.insert(request.keys.end(), unless.begin(), unless.end());
    if (request.keys.empty()) return {};
    if (request.keys.size() > kMostKeys) {
      raise(ErrorCode::InvalidArgument, "store: {} keys in one call, at most {}", request.keys.size(), kMostKeys);
    }
    for (const std::string& key : request.keys) value_or_throw(check_sizes(key, {}));
    Reply reply = call_waiting(std::move(request), deadline);
    if (reply.number >= 0 && static_cast<std::size_t>(reply.number) < unless.size()) {
      return {{}, Found{static_cast<std::size_t>(reply.number), std::move(reply.value).value_or(std::string())}};
    }
    Gathered found;
    found.values.resize(keys.size());
    std::size_t value = 0;
    std::size_t missing = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (missing < reply.missing.size() && reply.missing[missing] == i) {
        ++missing;
      } else if (value < reply.values.size()) {
        found.values[i] = std::move(reply.values[value++]);
      }
    }
    if (value != reply.values.size() || value + missing != keys.size())
      raise(ErrorCode::Corrupt, "{} answered with other keys than it was asked for", name());
    return found;
  }

  std::int64_t add(std::string_view key, std::int64_t amount) override {
    Request request = make(Op::Add, key);
    request.amount = amount;
    return call(std::move(request)).number;
  }

  std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                             std::string_view desired) override {
    value_or_throw(check_sizes(key, desired));
    if (expected) value_or_throw(check_sizes(key, *expected));
    Request request = make(Op::CompareAndSet, key);
    if (expected) request.expected = std::string(*expected);
    request.value = desired;
    return call(std::move(request)).value;
  }

  bool delete_key(std::string_view key) override { return call(make(Op::Delete, key)).number == 1; }

  void leave_will(std::string_view key, std::string_view value) override {
    value_or_throw(check_sizes(key, value));
    Request request = make(Op::LeaveWill, key);
    request.value = value;
    (void)call(std::move(request));
  }

  void withdraw_will(std::string_view key) override { (void)call(make(Op::WithdrawWill, key)); }
  std::string name() const override { return "store at " + place_; }

 private:
  static Request make(Op op, std::string_view key) {
    value_or_throw(check_sizes(key, {}));
    Request request;
    request.op = op;
    request.keys.emplace_back(key);
    return request;
  }
  Reply call(Request request) { return call(std::move(request), net::deadline_in(call_timeout_)); }

  Reply call(Request request, Deadline deadline) {
    Reply reply = exchange(request, deadline);
    if (reply.error) throw *reply.error;
    return reply;
  }

  Reply call_waiting(Request request, Deadline deadline) {
    const auto now = std::chrono::steady_clock::now();
    if (deadline > now) {
      request.timeout_ms = static_cast<std::uint64_t>(std::chrono::ceil<milliseconds>(deadline - now).count());
    }
    return call(std::move(request), deadline > Deadline::max() - kGrace ? deadline : std::max(deadline, now) + kGrace);
  }

  Reply exchange(const Request& request, Deadline deadline) {
    return value_or_throw(decode_reply(rpc_.call(static_cast<std::uint8_t>(request.op), encode(request), deadline)));
  }

  net::RpcClient rpc_;
  const std::string place_;
  const milliseconds call_timeout_;
};

std::shared_ptr<MeetingStore> connect(net::RpcPlace place, const StoreClientOptions& options, net::Deadline deadline) {
  place.secret = options.secret;
  place.secure = {.purpose = "store", .longest_message = kLongestMessage};
  std::shared_ptr<RemoteStore> store;
  net::rpc_connect(place, deadline, [&](net::SecureConnection connection, const std::string& at, net::Deadline limit) {
    store = std::make_shared<RemoteStore>(std::move(connection), at, options.call_timeout);
    store->hello(options.meeting, limit);
  });
  return store;
}

}  // namespace

std::shared_ptr<MeetingStore> connect_store(const StoreClientOptions& options, net::Deadline deadline) {
  if (!options.endpoint.is_unix() && !options.secret) {
    raise(ErrorCode::InvalidArgument, "connecting to the store at {} needs a secret", net::to_string(options.endpoint));
  }
  return connect({.endpoints = {options.endpoint}}, options, deadline);
}

std::shared_ptr<MeetingStore> connect_store_at_any(std::span<const net::Endpoint> endpoints,
                                                   const StoreClientOptions& options, net::Deadline deadline) {
  if (!options.secret)
    raise(ErrorCode::InvalidArgument, "connecting to the store at one of its addresses needs a secret");
  return connect({.endpoints = {endpoints.begin(), endpoints.end()}}, options, deadline);
}

std::shared_ptr<MeetingStore> connect_tcp_store(const std::string& host, std::uint16_t port, const net::Secret& secret,
                                                net::Deadline deadline) {
  return connect_store({.endpoint = {{host, port}, {}}, .secret = secret}, deadline);
}

}  // namespace cohort::store
