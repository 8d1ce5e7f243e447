// The store that processes meet in: keys and values in one process, served to others over authenticated connections.
// The server runs on a thread of its own from construction to destruction; its methods may be called from any thread.
// A client may be used by several threads: requests are numbered, so a wait in one thread does not hold up a set in
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
  /// Loopback and a port of the system's choice unless said otherwise.
  net::Endpoint endpoint = net::any_loopback_port();
  /// Required for TCP. Without one, on a Unix name, only this user's processes are let in.
  std::optional<net::Secret> secret = {};
  /// Clients ask for a meeting by name and are asked to retry when it is not this one (an earlier world's server may
  /// still hold the address for a moment).
  std::string meeting = {};
  /// Connections that have not proved the secret yet: how many at once (of more, those are closed that came first and
  /// have said nothing of worth) and for how long.
  std::size_t half_open_limit = 128;
  std::chrono::milliseconds handshake_timeout = std::chrono::seconds(5);
};

class StoreServer {
 public:
  /// Throws Unavailable if the place is taken (names the holder), InvalidArgument for TCP without a secret.
  explicit StoreServer(const StoreServerOptions& options);
  /// Closes all connections; clients get PeerLost.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// Address it listens at, with the port that the system chose.
  const net::Endpoint& endpoint() const noexcept;
  /// Soon after; for the process that owns the store, which waits for nothing.
  void set_if_absent(std::string key, std::string value);
  /// Lets nobody in any more; connections that exist go on.
  void close_listener();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

struct StoreClientOptions {
  net::Endpoint endpoint;
  std::optional<net::Secret> secret = {};  ///< as the server's
  std::string meeting = {};                ///< as the server's
  /// For the calls that take no deadline of their own.
  std::chrono::milliseconds call_timeout = std::chrono::seconds(60);
};

/// Tries until the deadline, with growing pauses, since the server may not be up yet. Throws Timeout (nobody listens
/// there, or no answer: says which), Unavailable (the name does not resolve), InvalidArgument (authentication failed).
std::shared_ptr<MeetingStore> connect_store(const StoreClientOptions& options, net::Deadline deadline);

/// The same where one of several numeric addresses leads to the server: all are tried at once, and the one that proves
/// the secret counts. `options.endpoint` is not used.
std::shared_ptr<MeetingStore> connect_store_at_any(std::span<const net::Endpoint> endpoints,
                                                   const StoreClientOptions& options, net::Deadline deadline);

/// The usual case: TCP and a secret.
std::shared_ptr<MeetingStore> connect_tcp_store(const std::string& host, std::uint16_t port, const net::Secret& secret,
                                                net::Deadline deadline);

// Protocol between a store's client and server: the bodies of calls (net/rpc.h), whose methods are operations. Pure
// functions; bytes from outside are checked in full before anything is done with them.
inline constexpr std::uint32_t kProtocolVersion = 1;
/// Two values and some keys; a list of keys that is longer is refused.
inline constexpr std::size_t kLongestMessage = 2 * kLongestValue + (std::size_t{1} << 20);

enum class Op : std::uint8_t {
  Hello,          ///< amount = protocol version, value = meeting
  Set,            ///< keys[0], value
  TryGet,         ///< keys[0]
  Wait,           ///< keys, timeout; replies with the value if there is one key
  GetAny,         ///< keys, timeout; replies with index and value
  Add,            ///< keys[0], amount
  CompareAndSet,  ///< keys[0], expected, value
  Delete,         ///< keys[0]; number 1 if it existed
  LeaveWill,      ///< keys[0], value
  WithdrawWill,   ///< keys[0]
  GoodBye,        ///< no reply; wills do not take effect
};
inline constexpr std::uint8_t kOpCount = 11;

struct Request {
  Op op = Op::Hello;  ///< the call's method
  std::vector<std::string> keys;
  std::string value;
  std::optional<std::string> expected;
  std::int64_t amount = 0;
  std::uint64_t timeout_ms = 0;
};

struct Reply {
  std::optional<Error> error;  ///< then nothing below has a meaning, but `keys` with Timeout
  std::int64_t number = 0;
  std::optional<std::string> value;
  std::vector<std::string> keys;  ///< with Timeout: those that are missing
};

std::string encode(const Request& request);
std::string encode(const Reply& reply);
/// Corrupt if the bytes are not exactly one request whose parts are within the limits of stores.
Result<Request> decode_request(std::uint8_t method, std::string_view bytes);
Result<Reply> decode_reply(std::string_view bytes);

}  // namespace cohort::store
