#include "base/hardware.h"
#include "base/log.h"
#include "base/records.h"
#include "base/thread.h"
#include "net/acceptor.h"
#include "net/rpc.h"
#include "net/shared_calls.h"
#include "net/socket.h"

#include <asio/executor_work_guard.hpp>
#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/post.hpp>
#include <asio/steady_timer.hpp>

#include <algorithm>
#include <future>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::net {
namespace {

using Descriptor = asio::posix::stream_descriptor;

constexpr std::size_t kUnsentLimit = 4 << 20;  // beyond it, no more calls are read from the client
constexpr int kCallsAtOnce = 4;                // calls of one client before the next client's turn

std::string unused_name() {
  std::random_device random;
  return fmt::format("cohort-{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

}  // namespace

struct RpcServer::Client {
  Client(asio::io_context& io, SecureConnection accepted)
      : connection(std::move(accepted)), descriptor(io, connection.fd()) {}
  ~Client() { descriptor.release(); }  // the descriptor belongs to the connection

  SecureConnection connection;
  Descriptor descriptor;
  std::optional<SharedCallsServer> shared;
  bool closed = false;
  bool reading = false;
  bool writing = false;
};

class RpcServer::Impl {
 public:
  Impl(Options options, Service& service)
      : service_(service),
        name_(std::move(options.name)),
        shared_memory_(options.shared_memory),
        host_(std::move(options.host)),
        work_(asio::make_work_guard(io_)),
        entrance_(io_) {
    if (!options.endpoint.is_unix() && !options.secret) {
      raise(ErrorCode::InvalidArgument, "a {} at {} needs a secret: without one it listens on Unix names only", name_,
            to_string(options.endpoint));
    }
    std::vector<sys::UniqueFd> listeners;
    listeners.push_back(value_or_throw(listen_on(options.endpoint)));
    endpoint_ = value_or_throw(local_endpoint(listeners.front().get()));
    if (shared_memory_ && !endpoint_.is_unix()) {
      Endpoint nearer;
      nearer.unix_name = unused_name();
      if (auto listener = listen_on(nearer)) {
        listeners.push_back(*std::move(listener));
        unix_name_ = nearer.unix_name;
      } else {
        log::debug("net", "{}: no shared memory: {}", describe(), listener.error().what());
      }
    }
    Acceptor::Options accepting;
    accepting.secret = std::move(options.secret);
    accepting.public_secret = options.public_secret;
    accepting.secure = std::move(options.secure);
    accepting.most_pending = options.half_open_limit;
    accepting.patience = options.handshake_timeout;
    accepting.on_refused = [this](const Acceptor::Refusal& refused) { complain(refused.why); };
    acceptor_.emplace(std::move(listeners), std::move(accepting));
    entrance_.assign(acceptor_->fd());
  }

  /// Starts the thread; called after the RpcServer has stored this object.
  void start() {
    accept_when_ready();
    thread_ = sys::start_without_signals([this] { run(); });
  }

  void stop() {
    asio::post(io_, [this] {
      let_nobody_in();
      while (!clients_.empty()) close(*clients_.begin());
      for (const auto& weak : timers_) {  // the timers' callbacks are not needed any more
        if (const auto timer = weak.lock()) timer->cancel();
      }
      work_.reset();  // cancelled operations end in their handlers, then the loop ends
    });
    thread_.join();
  }

  const Endpoint& endpoint() const noexcept { return endpoint_; }
  std::string describe() const { return fmt::format("{} at {}", name_, to_string(endpoint_)); }

  void close_listener() {
    std::promise<void> closed;
    asio::post(io_, [this, &closed] {
      let_nobody_in();
      closed.set_value();
    });
    closed.get_future().wait();
  }

  void answer(const ClientPtr& client, std::uint64_t id, std::string_view head, std::size_t bytes,
              const std::function<void(char*)>& fill) {
    if (client->closed) return;
    const bool shared = is_shared(id) && client->shared;
    if (shared) {
      const auto answered = client->shared->answer(SharedCallId(id), head, bytes, fill);
      if (answered != SharedCallsServer::Answered::TooLong) return;
    }
    std::string message = codec::encode(id);
    message.reserve(message.size() + head.size() + bytes);
    message.append(head);
    const std::size_t at = message.size();
    message.resize(at + bytes);
    if (bytes > 0) fill(message.data() + at);
    send(client, message);
    if (shared) client->shared->answer_elsewhere(SharedCallId(id));
  }

  void send(const ClientPtr& client, std::string_view message, sys::UniqueFd descriptor = {}) {
    if (client->connection.queue(message, std::move(descriptor))) {
      arm(client);
    } else {
      asio::post(io_, [this, client] { close(client); });
    }
  }

  void close(const ClientPtr& given) {
    const ClientPtr client = given;  // `given` may refer to the element in the set
    if (client->closed) return;
    client->closed = true;
    client->descriptor.cancel();
    clients_.erase(client);
    if (std::erase(sharing_, client) > 0) count_cores();
    service_.on_gone(client);
  }

  void post(std::function<void()> callback) {
    asio::post(io_, [callback = std::move(callback)] { callback(); });
  }

  std::shared_ptr<void> after(std::chrono::milliseconds time, std::function<void()> callback) {
    const auto timer = std::make_shared<asio::steady_timer>(io_, time);
    timers_.insert(timer);
    timer->async_wait(
        [this, weak = std::weak_ptr(timer), callback = std::move(callback)](const asio::error_code& error) {
          timers_.erase(weak);
          if (!error && !weak.expired()) callback();
        });
    return timer;
  }

 private:
  void run() {
    while (!io_.stopped()) {
      try {
        io_.run();
      } catch (const std::exception& error) {  // running out of memory for one client must not end the others
        log::error("net", "{}: {}", describe(), error.what());
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
      while (auto accepted = acceptor_->next()) {
        const auto client = std::make_shared<Client>(io_, std::move(accepted->connection));
        clients_.insert(client);
        acceptor_->judge(accepted->source, hear(client, accepted->first));
        on_ready(client);
      }
    } catch (const std::exception& error) {  // the next connection may succeed
      complain(Error(ErrorCode::Io, error.what()));
    }
    accept_when_ready();
  }

  // Logs at most one line a second about clients that the listener refuses.
  void complain(const Error& error) {
    const auto now = std::chrono::steady_clock::now();
    // A client tries several of the offered addresses, and closes the others when one has answered.
    if (error.code() == ErrorCode::Unavailable || now - last_complaint_ < std::chrono::seconds(1)) {
      log::debug("net", "{} refused a connection: {}", describe(), error.what());
      return;
    }
    last_complaint_ = now;
    log::warn("net", "{} refused a connection: {}", describe(), error.what());
  }

  bool hear(const ClientPtr& client, std::string_view message) {
    codec::Reader in(message);
    const auto method = in.number<std::uint8_t>();
    const auto id = in.number<std::uint64_t>();
    const auto heard = [&]() -> Result<void> {
      if (!method || !id) return fail(ErrorCode::Corrupt, "it is no call");
      if (*method == kShareMemory) return share(client, *id);
      if (*method == kRing) return listen_to_shared(client);
      return service_.on_call(client, {*method, *id, in.rest()});
    }();
    if (heard) return true;
    refuse(client, heard.error());
    return false;
  }

  void refuse(const ClientPtr& client, const Error& error) {
    complain(Error(ErrorCode::Corrupt, fmt::format("{} sent nonsense: {}", client->connection.peer(), error.what())));
    close(client);
  }

  // ---- shared memory ----

  Result<void> share(const ClientPtr& client, std::uint64_t id) {
    if (client->shared) return fail(ErrorCode::Corrupt, "it has shared memory already");
    const auto refused = [&](const Error& why) -> Result<void> {
      send(client, codec::encode(id).append(codec::encode(SharedMemory{why})));
      return {};
    };
    if (!shared_memory_) return refused(Error(ErrorCode::Unavailable, "this server has none"));
    if (const auto over = local_endpoint(client->connection.fd()); !over || !over->is_unix()) {
      if (unix_name_.empty()) return refused(Error(ErrorCode::Unavailable, "this server has no Unix name"));
      send(client, codec::encode(id).append(codec::encode(SharedMemory{{}, host_, unix_name_})));
      return {};
    }
    auto made = SharedCallsServer::make();
    if (!made) return refused(made.error());
    sys::UniqueFd descriptor = made->take_descriptor();
    client->shared.emplace(*std::move(made));
    (void)client->shared->go_to_sleep();
    sharing_.push_back(client);
    count_cores();
    send(client, codec::encode(id).append(codec::encode(SharedMemory{})), std::move(descriptor));
    return {};
  }

  void count_cores() {
    crowded_ = static_cast<int>(sharing_.size()) + 1 > sys::usable_cores();
    for (const ClientPtr& client : sharing_) client->shared->set_crowded(crowded_);
  }

  Result<void> listen_to_shared(const ClientPtr& client) {
    if (!client->shared) return fail(ErrorCode::Corrupt, "it has no shared memory");
    if (std::exchange(attentive_, true)) return {};
    for (const ClientPtr& each : sharing_) each->shared->wake_up();
    serve_shared();
    return {};
  }

  /// Handles the clients' calls in shared memory in turn, and connection events between rounds, until there have been
  /// no calls for a while.
  void serve_shared() {
    bool any = false;
    for (std::size_t i = 0; i < sharing_.size(); ++i) any |= serve_some(sharing_[i]);
    const auto now = std::chrono::steady_clock::now();
    if (any) {
      attention_.waited(now - served_);
      served_ = now;
    } else if (crowded_ || now - served_ >= attention_.now()) {
      bool sleeps = true;
      for (const ClientPtr& client : sharing_) sleeps = client->shared->go_to_sleep() && sleeps;
      if (sleeps) {
        attentive_ = false;
        return;
      }
    } else {
      const auto none = [this] {
        return std::none_of(sharing_.begin(), sharing_.end(),
                            [](const ClientPtr& each) { return each->shared->any(); });
      };
      for (int i = 0; i < 64 && none(); ++i) sys::cpu_relax();
    }
    asio::post(io_, [this] { serve_shared(); });
  }

  bool serve_some(const ClientPtr& given) {
    const ClientPtr client = given;
    for (int i = 0; i < kCallsAtOnce; ++i) {
      if (client->closed) return true;
      try {
        auto call = client->shared->next();
        if (call && !*call) return i > 0;
        auto heard = call ? service_.on_call(client, {(*call)->method, number_of((*call)->id), (*call)->body})
                          : Result<void>(tl::unexpected(call.error()));
        if (!heard) refuse(client, heard.error());
      } catch (const std::exception& error) {  // out of memory: the client may connect again
        log::error("net", "{}: {}", describe(), error.what());
        close(client);
      }
    }
    return true;
  }

  void arm(const ClientPtr& client) {
    if (client->closed) return;
    if (!client->reading && client->connection.unsent_bytes() < kUnsentLimit) {
      client->reading = true;
      client->descriptor.async_wait(Descriptor::wait_read, [this, client](const asio::error_code& error) {
        client->reading = false;
        if (!error) on_ready(client);
      });
    }
    if (!client->writing && client->connection.wants_write()) {
      client->writing = true;
      client->descriptor.async_wait(Descriptor::wait_write, [this, client](const asio::error_code& error) {
        client->writing = false;
        if (!error) on_ready(client);
      });
    }
  }

  void on_ready(const ClientPtr& client) {
    if (client->closed) return;
    const auto advanced = client->connection.advance();
    while (!client->closed) {
      const auto message = client->connection.next_message();
      if (!message) break;
      hear(client, *message);
    }
    if (client->closed) return;
    if (!advanced || client->connection.at_end()) return close(client);
    arm(client);
  }

  Service& service_;
  const std::string name_;
  const bool shared_memory_;
  const std::string host_;
  std::string unix_name_;  // Unix name at which the server listens too, in addition to the endpoint
  Endpoint endpoint_;
  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  Descriptor entrance_;
  std::optional<Acceptor> acceptor_;
  std::chrono::steady_clock::time_point last_complaint_{};
  std::set<ClientPtr> clients_;
  std::vector<ClientPtr> sharing_;  // clients with shared memory
  bool crowded_ = false;
  bool attentive_ = false;  // true while it polls for calls in shared memory, and so needs no wakeup
  SpinTime attention_;
  std::chrono::steady_clock::time_point served_{};
  std::set<std::weak_ptr<asio::steady_timer>, std::owner_less<>> timers_;
  std::thread thread_;
};

RpcServer::RpcServer(Options options, Service& service) : impl_(std::make_unique<Impl>(std::move(options), service)) {
  impl_->start();
}
RpcServer::~RpcServer() { impl_->stop(); }
const Endpoint& RpcServer::endpoint() const noexcept { return impl_->endpoint(); }
void RpcServer::close_listener() { impl_->close_listener(); }
void RpcServer::post(std::function<void()> callback) { impl_->post(std::move(callback)); }
void RpcServer::answer(const ClientPtr& client, std::uint64_t id, std::string_view body) {
  impl_->answer(client, id, body, 0, {});
}
void RpcServer::answer(const ClientPtr& client, std::uint64_t id, std::string_view head, std::size_t bytes,
                       const std::function<void(char*)>& fill) {
  impl_->answer(client, id, head, bytes, fill);
}
const std::string& RpcServer::peer(const ClientPtr& client) noexcept { return client->connection.peer(); }
void RpcServer::close(const ClientPtr& client) { impl_->close(client); }
std::shared_ptr<void> RpcServer::after(std::chrono::milliseconds time, std::function<void()> callback) {
  return impl_->after(time, std::move(callback));
}

}  // namespace cohort::net
