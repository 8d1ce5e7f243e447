// Calls between processes over authenticated connections. A call is a method number and a body, its answer a body.
// An RpcServer answers in any order, so a call may be parked until its answer is available; its service runs on the
// server's one thread, which exists from construction to destruction. An RpcClient may be used by several threads and
// has none of its own; one waiting thread reads for all, so no call holds up another. Not usable in a forked child. Two
// ends on one host may switch to shared memory (shared_calls.h): calls keep their order, and the connection then shows
// when the other end has gone.
#pragma once

#include "net/address.h"
#include "net/secure_connection.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::net {

class RpcServer {
 public:
  /// A connected client; valid as long as a ClientPtr to it exists.
  struct Client;
  using ClientPtr = std::shared_ptr<Client>;
  struct Call {
    std::uint8_t method = 0;
    std::uint64_t id = 0;
    std::string_view body;
  };
  /// Interface that the server's owner implements. Its functions throw only std::bad_alloc.
  class Service {
   public:
    virtual ~Service() = default;
    /// Handles a call, and calls `answer` for it now or later. Returns an error for an invalid call; the server then
    /// closes the client.
    virtual Result<void> on_call(const ClientPtr& client, const Call& call) = 0;
    virtual void on_gone(const ClientPtr& client) = 0;
  };
  struct Options {
    std::string name;  ///< name of the service, for messages
    Endpoint endpoint;
    std::optional<Secret> secret = {};  ///< required for TCP (InvalidArgument)
    bool public_secret = false;         ///< see `Acceptor::Options`; a first call without error is the proof
    SecureOptions secure = {};
    std::size_t half_open_limit = 128;  ///< most connections that have not yet proved the secret and made a call
    std::chrono::milliseconds handshake_timeout = std::chrono::seconds(5);  ///< time limit of these connections
    /// Uses shared memory with clients on this host that ask for it; clients compare `host` with their own. A TCP
    /// server also listens at a Unix name for that.
    bool shared_memory = false;
    std::string host = {};
  };

  /// Throws Unavailable if the address is in use (names the process that uses it). `service` has to outlive the server.
  RpcServer(Options options, Service& service);
  /// Closes all connections; clients get PeerLost. Calls `on_gone` until the destructor returns.
  ~RpcServer();
  RpcServer(const RpcServer&) = delete;
  RpcServer& operator=(const RpcServer&) = delete;

  /// Address the server listens at, with the port that the system chose.
  const Endpoint& endpoint() const noexcept;
  /// Accepts no further connections; existing connections stay. Not to be called on the server's thread.
  void close_listener();

  /// Runs `callback` on the server's thread, unless the server is destroyed first. Any thread.
  void post(std::function<void()> callback);

  // Called by the service, on the server's own thread.

  void answer(const ClientPtr& client, std::uint64_t id, std::string_view body);
  /// Answers with `head`, followed by `bytes` bytes. `fill` writes these during this call, directly to the memory from
  /// which the client reads them.
  void answer(const ClientPtr& client, std::uint64_t id, std::string_view head, std::size_t bytes,
              const std::function<void(char*)>& fill);
  static const std::string& peer(const ClientPtr& client) noexcept;
  void close(const ClientPtr& client);
  /// Runs `callback` once after `time`, unless the returned handle is destroyed first.
  std::shared_ptr<void> after(std::chrono::milliseconds time, std::function<void()> callback);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Reply to a call, possibly in memory shared with the server; while the reply is kept, less shared memory is free.
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
  /// `place` is for messages.
  RpcClient(SecureConnection connection, std::string name, std::string place);
  ~RpcClient();
  RpcClient(const RpcClient&) = delete;
  RpcClient& operator=(const RpcClient&) = delete;

  /// Throws PeerLost if the connection has ended, Timeout if the server does not answer, InvalidArgument if the body is
  /// too long or in a forked child.
  std::string call(std::uint8_t method, std::string_view body, Deadline deadline);
  /// A call in two parts, so that several can be under way together. `begin` sends what the system takes immediately,
  /// and the rest is sent while any thread waits; `finish` waits for the answer. Finish each call once, also after
  /// Timeout. Both throw as `call` does. `room` is the approximate size of the answer, if it is not small.
  std::uint64_t begin(std::uint8_t method, std::string_view body, std::size_t room = 0);
  /// An answer of more than `kCopied` bytes may lie in shared memory, where a faulty server could still change it.
  RpcAnswer finish(std::uint64_t call, Deadline deadline);
  static constexpr std::size_t kCopied = 1024;
  /// Switches to shared memory for calls begun from now on; no call may be under way. Fails with the reason if that is
  /// not possible; calls then stay on the connection. Over TCP, a server on this `host` returns the endpoint at which
  /// it offers shared memory. Throws as `call` does.
  Result<std::optional<Endpoint>> share_memory(const std::string& host, Deadline deadline);
  /// Ends the connection: waiting callers get PeerLost. Not in a forked child.
  void close() noexcept;
  /// Makes a last call, which has no answer. Does nothing in a forked child or if the connection has ended.
  void say(std::uint8_t method, std::string_view body, Deadline deadline) noexcept;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

struct RpcPlace {
  std::vector<Endpoint> endpoints;  ///< several numeric addresses are tried concurrently until a peer proves the secret
  std::optional<Secret> secret = {};  ///< the same as the server's
  SecureOptions secure = {};
};
/// Connects, authenticates and calls `greet`; tries until the deadline, with growing pauses, since the server may not
/// be up yet. If `greet` throws Unavailable, PeerLost or Timeout, connecting is tried again, too. Throws Timeout with
/// the latest reason, or an error that trying again would not change.
void rpc_connect(const RpcPlace& place, Deadline deadline,
                 const std::function<void(SecureConnection, const std::string& place, Deadline limit)>& greet);

}  // namespace cohort::net
