// Calls between processes over authenticated connections: a call is (number of a method, body), its answer a body.
// An RpcServer answers in any order, so that a call may be parked until what it waits for is there; its service runs on
// the server's one thread, which it has from construction to destruction. An RpcClient may be used by several threads
// and has none: of those that wait one reads for all, so no call holds up another. Not usable in a forked child. Two
// ends on one host may go on through shared memory (shared_calls.h): in the same order, and the connection then says
// when one of them has gone.
#pragma once

#include "net/address.h"
#include "net/secure_connection.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::net {

class RpcServer {
 public:
  /// A client that is connected, for as long as anybody holds it.
  struct Client;
  using ClientPtr = std::shared_ptr<Client>;
  struct Call {
    std::uint8_t method = 0;
    std::uint64_t id = 0;
    std::string_view body;
  };
  /// Implemented by the server's owner. Throws nothing except for lack of memory.
  class Service {
   public:
    virtual ~Service() = default;
    /// Handles a call, to be answered by `answer`, now or later. An error: the call is nonsense, its client is closed.
    virtual Result<void> on_call(const ClientPtr& client, const Call& call) = 0;
    virtual void on_gone(const ClientPtr& client) = 0;
  };
  struct Options {
    std::string name;  ///< for messages
    Endpoint endpoint;
    std::optional<Secret> secret = {};  ///< required for TCP (InvalidArgument)
    bool public_secret = false;         ///< `Acceptor::Options`: a first call without error is the proof
    SecureOptions secure = {};
    std::size_t half_open_limit = 128;  ///< connections that have not proved the secret and called, at once,
    std::chrono::milliseconds handshake_timeout = std::chrono::seconds(5);  ///< and for how long
    /// Uses shared memory with clients on this host that ask for it. `host` distinguishes it from others. A TCP server
    /// also listens at a Unix name for that.
    bool shared_memory = false;
    std::string host = {};
  };

  /// Throws Unavailable if the place is taken (names the holder). `service` has to outlive it.
  RpcServer(Options options, Service& service);
  /// Closes all connections; clients get PeerLost. It reports their going until it is over.
  ~RpcServer();
  RpcServer(const RpcServer&) = delete;
  RpcServer& operator=(const RpcServer&) = delete;

  /// Address it listens at, with the port that the system chose.
  const Endpoint& endpoint() const noexcept;
  /// "NAME at PLACE".
  std::string describe() const;
  /// Lets nobody in any more; connections that exist go on. Not on its own thread.
  void close_listener();

  /// Calls back on its own thread, unless it is destroyed before. Any thread.
  void post(std::function<void()> callback);

  // Called by the service, on the server's own thread.

  void answer(const ClientPtr& client, std::uint64_t id, std::string_view body);
  /// Answers with `bytes` behind the head that `fill` writes, at once, to where the client will read them.
  void answer(const ClientPtr& client, std::uint64_t id, std::string_view head, std::size_t bytes,
              const std::function<void(char*)>& fill);
  static const std::string& peer(const ClientPtr& client) noexcept;
  void close(const ClientPtr& client);
  /// Calls back once, unless what it returns is destroyed before.
  std::shared_ptr<void> after(std::chrono::milliseconds time, std::function<void()> callback);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Reply to a call, maybe in memory that is shared with the server: its calls have less memory as long as this is kept.
class RpcAnswer {
 public:
  explicit RpcAnswer(std::string text) : text_(std::move(text)) {}
  RpcAnswer(std::string_view shared, std::shared_ptr<void> holder) : shared_(shared), holder_(std::move(holder)) {}
  std::string_view body() const noexcept { return holder_ ? shared_ : std::string_view(text_); }

 private:
  std::string text_;
  std::string_view shared_;
  std::shared_ptr<void> holder_;
};

class RpcClient {
 public:
  /// `place`: for messages.
  RpcClient(SecureConnection connection, std::string name, std::string place);
  ~RpcClient();
  RpcClient(const RpcClient&) = delete;
  RpcClient& operator=(const RpcClient&) = delete;

  /// Throws PeerLost when the connection has ended, Timeout when the server does not answer, InvalidArgument if the
  /// body is too long, or in a forked child.
  std::string call(std::uint8_t method, std::string_view body, Deadline deadline);
  /// A call in two parts, so that several are under way at once: `begin` sends what the system takes at once, the rest
  /// goes while anybody waits; `finish` waits for the answer. Each is finished once, also after Timeout. They throw as
  /// `call` does.
  /// `room`: bytes of the answer, about, if it has more than few.
  std::uint64_t begin(std::uint8_t method, std::string_view body, std::size_t room = 0);
  /// An answer of more than `kCopied` bytes may be in shared memory: a server that has gone mad may still write there.
  RpcAnswer finish(std::uint64_t call, Deadline deadline);
  static constexpr std::size_t kCopied = 1024;
  /// Goes on through shared memory, for calls that are begun from now on; none may be under way. Why not, if that
  /// cannot be: calls go on over the connection. Over TCP a server that is on this `host` names the endpoint where it
  /// can be; throws as `call`.
  Result<std::optional<Endpoint>> share_memory(const std::string& host, Deadline deadline);
  /// Ends the connection: waiting callers get PeerLost. Not in a forked child.
  void close() noexcept;
  /// A call without an answer, as the last one. Not in a forked child, and not when the connection has ended.
  void say(std::uint8_t method, std::string_view body, Deadline deadline) noexcept;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

struct RpcPlace {
  std::vector<Endpoint> endpoints;    ///< several, numeric, are all tried at once; one that proves the secret counts
  std::optional<Secret> secret = {};  ///< as the server's
  SecureOptions secure = {};
};
/// Tries until the deadline, with growing pauses, since the server may not be up yet: connects, proves, and `greet`s
/// (which throws what it does not like: Unavailable, PeerLost and Timeout are tried again). Throws Timeout with the
/// latest reason, or what trying again does not change.
void rpc_connect(const RpcPlace& place, Deadline deadline,
                 const std::function<void(SecureConnection, const std::string& place, Deadline limit)>& greet);

}  // namespace cohort::net
