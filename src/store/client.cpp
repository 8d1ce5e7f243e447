#include "store/client.h"

#include "net/rpc.h"
#include "store/protocol.h"
#include "store/table.h"

#include <algorithm>
#include <utility>

namespace cohort::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The server ends a wait at its deadline and says what is missing; this much later it is not there any more.
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

  std::string get(std::string_view key, Deadline deadline) override {
    return call_waiting(make(Op::Wait, key), deadline).value.value_or(std::string());
  }

  std::optional<std::string> try_get(std::string_view key) override { return call(make(Op::TryGet, key)).value; }

  void wait(std::span<const std::string> keys, Deadline deadline) override {
    if (keys.empty()) return;
    (void)call_waiting(make(Op::Wait, keys), deadline);
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

  Found get_any(std::span<const std::string> keys, Deadline deadline) override {
    if (keys.empty()) raise(ErrorCode::InvalidArgument, "store: get_any of no keys");
    Reply reply = call_waiting(make(Op::GetAny, keys), deadline);
    return {static_cast<std::size_t>(reply.number), std::move(reply.value).value_or(std::string())};
  }

  void leave_will(std::string_view key, std::string_view value) override {
    value_or_throw(check_sizes(key, value));
    Request request = make(Op::LeaveWill, key);
    request.value = value;
    (void)call(std::move(request));
  }

  void withdraw_will(std::string_view key) override { (void)call(make(Op::WithdrawWill, key)); }

 private:
  static Request make(Op op, std::string_view key) {
    value_or_throw(check_sizes(key, {}));
    Request request;
    request.op = op;
    request.keys.emplace_back(key);
    return request;
  }
  static Request make(Op op, std::span<const std::string> keys) {
    if (keys.size() > kMostKeys)
      raise(ErrorCode::InvalidArgument, "store: {} keys in one call, at most {}", keys.size(), kMostKeys);
    Request request;
    request.op = op;
    for (const std::string& key : keys) value_or_throw(check_sizes(key, {}));
    request.keys.assign(keys.begin(), keys.end());
    return request;
  }

  Reply call(Request request) { return call(std::move(request), net::deadline_in(call_timeout_)); }

  Reply call(Request request, Deadline deadline) {
    Reply reply = exchange(request, deadline);
    if (reply.error) throw *reply.error;
    return reply;
  }

  Reply call_waiting(Request request, Deadline deadline) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    request.timeout_ms = static_cast<std::uint64_t>(std::max<std::int64_t>(left.count(), 0));
    const Deadline answered =
        deadline > Deadline::max() - kGrace ? deadline : std::max(deadline, net::deadline_in({})) + kGrace;
    Reply reply = exchange(request, answered);
    if (!reply.error) return reply;
    if (reply.error->code() == ErrorCode::Timeout) {
      raise(ErrorCode::Timeout, "store at {}: nobody set {} in time", place_, list_of_keys(reply.keys));
    }
    throw *reply.error;
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
