// A store in one process, served to other processes over authenticated connections.
// The server runs on its own thread from construction to destruction; its methods may be called from any thread. A
// client may be used by several threads: requests are numbered, so a wait in one thread does not hold up a set in
// another. It has no thread of its own. Not usable in a forked child (InvalidArgument).
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/store.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::store {

struct StoreServerOptions {
  /// By default loopback, with a port that the system chooses.
  net::Endpoint endpoint = net::any_loopback_port();
  /// Required for TCP. Without a secret, on a Unix name, only this user's processes are admitted.
  std::optional<net::Secret> secret = {};
  /// Name of the meeting. Clients that ask for another meeting are told to retry (an earlier world's server may still
  /// hold the address for a moment).
  std::string meeting = {};
  /// Limits for connections that have not proved the secret yet: their time, and their number in addition to the
  /// expected clients, which may all connect at once. Beyond it, the oldest that has sent nothing credible is closed.
  std::size_t half_open_limit = 128;
  std::size_t expected = 0;
  std::chrono::milliseconds handshake_timeout = std::chrono::seconds(5);
};

class StoreServer {
 public:
  /// Throws Unavailable if the address is in use (names the process that uses it), InvalidArgument for TCP without a
  /// secret.
  explicit StoreServer(const StoreServerOptions& options);
  /// Closes all connections; clients get PeerLost.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// Address the server listens at, with the port that the system chose.
  const net::Endpoint& endpoint() const noexcept;
  /// Sets the key on the server's thread soon after, without waiting. For the process that owns the server.
  void set_if_absent(std::string key, std::string value);
  /// Accepts no further connections; existing connections stay.
  void close_listener();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

struct StoreClientOptions {
  net::Endpoint endpoint;
  std::optional<net::Secret> secret = {};  ///< the same as the server's
  std::string meeting = {};                ///< the same as the server's
  /// Timeout of calls without a deadline parameter.
  std::chrono::milliseconds call_timeout = std::chrono::seconds(60);
};

/// Connects; tries until the deadline, with growing pauses, since the server may not be up yet. Throws Timeout (the
/// message says whether the connection was refused or unanswered), Unavailable if the name does not resolve,
/// InvalidArgument if authentication failed.
std::shared_ptr<MeetingStore> connect_store(const StoreClientOptions& options, net::Deadline deadline);

/// Like connect_store, if one of several numeric addresses leads to the server: tries all concurrently, and uses the
/// one whose peer proves the secret. `options.endpoint` is not used.
std::shared_ptr<MeetingStore> connect_store_at_any(std::span<const net::Endpoint> endpoints,
                                                   const StoreClientOptions& options, net::Deadline deadline);

/// Connects in the usual case: TCP and a secret.
std::shared_ptr<MeetingStore> connect_tcp_store(const std::string& host, std::uint16_t port, const net::Secret& secret,
                                                net::Deadline deadline);

// Protocol between a store's client and server: bodies of RPC calls (net/rpc.h); an RPC method is a store operation.
// Pure functions; bytes from other processes are checked in full before use.
inline constexpr std::uint32_t kProtocolVersion = 2;
/// Two values and some keys. Requests with longer lists of keys are refused.
inline constexpr std::size_t kLongestMessage = 2 * kLongestValue + (std::size_t{1} << 20);

enum class Op : std::uint8_t {
  Hello,          ///< amount = protocol version, value = meeting
  Set,            ///< keys[0], value
  GetAll,         ///< keys: first the `amount` that have to exist, then those that end the wait; timeout
  Add,            ///< keys[0], amount
  CompareAndSet,  ///< keys[0], expected, value
  Delete,         ///< keys[0]; number 1 if it existed
  LeaveWill,      ///< keys[0], value
  WithdrawWill,   ///< keys[0]
  GoodBye,        ///< has no reply; the client's wills then have no effect
};
inline constexpr std::uint8_t kOpCount = 9;

struct Request {
  Op op = Op::Hello;  ///< the call's method
  std::vector<std::string> keys;
  std::string value;
  std::optional<std::string> expected;
  std::int64_t amount = 0;
  std::uint64_t timeout_ms = 0;
};

struct Reply {
  std::optional<Error> error;  ///< if set, the fields below are unused
  std::int64_t number = 0;  ///< GetAll: the index of the key that ended the wait, with its value in `value`; -1: none
  std::optional<std::string> value;
  std::vector<std::string> values;     ///< GetAll: the values of the keys that exist, in order
  std::vector<std::uint32_t> missing;  ///< GetAll: the indexes of the keys that do not exist, ascending
};

std::string encode(const Request& request);
std::string encode(const Reply& reply);
/// Fails with Corrupt if the bytes are not exactly one request within the limits of stores.
Result<Request> decode_request(std::uint8_t method, std::string_view bytes);
Result<Reply> decode_reply(std::string_view bytes);

}  // namespace cohort::store
