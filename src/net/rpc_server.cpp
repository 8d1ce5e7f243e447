#include "base/log.h"
#include "base/records.h"
#include "net/acceptor.h"
#include "net/rpc.h"
#include "net/socket.h"
#include "sys/thread.h"

#include <asio/executor_work_guard.hpp>
#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/post.hpp>
#include <asio/steady_timer.hpp>

#include <future>
#include <memory>
#include <set>
#include <thread>
#include <utility>

namespace cohort::net {
namespace {

using Descriptor = asio::posix::stream_descriptor;

constexpr std::size_t kUnsentLimit = 4 << 20;  // a client that does not read is not read from either

}  // namespace

struct RpcServer::Client {
  Client(asio::io_context& io, SecureConnection accepted)
      : connection(std::move(accepted)), descriptor(io, connection.fd()) {}
  ~Client() { descriptor.release(); }  // the descriptor belongs to the connection

  SecureConnection connection;
  Descriptor descriptor;
  bool closed = false;
  bool reading = false;
  bool writing = false;
};

class RpcServer::Impl {
 public:
  Impl(Options options, Service& service)
      : service_(service), name_(std::move(options.name)), work_(asio::make_work_guard(io_)), entrance_(io_) {
    if (!options.endpoint.is_unix() && !options.secret) {
      raise(ErrorCode::InvalidArgument, "a {} at {} needs a secret: without one it listens on Unix names only", name_,
            to_string(options.endpoint));
    }
    std::vector<sys::UniqueFd> listeners;
    listeners.push_back(value_or_throw(listen_on(options.endpoint)));
    endpoint_ = value_or_throw(local_endpoint(listeners.front().get()));
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

  /// Not before others know of it.
  void start() {
    accept_when_ready();
    thread_ = sys::start_without_signals([this] { run(); });
  }

  void stop() {
    asio::post(io_, [this] {
      let_nobody_in();
      while (!clients_.empty()) close(*clients_.begin());
      for (const auto& weak : timers_) {  // nobody waits for what they would do
        if (const auto timer = weak.lock()) timer->cancel();
      }
      work_.reset();  // what has been cancelled ends in its handler, then the loop does
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

  void answer(const ClientPtr& client, std::uint64_t id, std::string_view body) {
    if (client->closed) return;
    if (client->connection.queue(codec::encode(id).append(body))) {
      arm(client);
    } else {
      asio::post(io_, [this, client] { close(client); });
    }
  }

  void close(const ClientPtr& given) {
    const ClientPtr client = given;  // `given` may be the set's own
    if (client->closed) return;
    client->closed = true;
    client->descriptor.cancel();
    clients_.erase(client);
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
      } catch (const std::exception& error) {  // out of memory for one client must not end the others
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
    } catch (const std::exception& error) {  // the next one is let in again
      complain(Error(ErrorCode::Io, error.what()));
    }
    accept_when_ready();
  }

  // One line a second is enough for whoever knocks at the listener.
  void complain(const Error& error) {
    const auto now = std::chrono::steady_clock::now();
    // Of all addresses that are offered to a client it tries several, and goes from the others once one has answered.
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
    const auto heard = method && id ? service_.on_call(client, {*method, *id, in.rest()})
                                    : Result<void>(fail(ErrorCode::Corrupt, "it is no call"));
    if (heard) return true;
    complain(Error(ErrorCode::Corrupt,
                   fmt::format("{} sent nonsense: {}", client->connection.peer(), heard.error().what())));
    close(client);
    return false;
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
  Endpoint endpoint_;
  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  Descriptor entrance_;
  std::optional<Acceptor> acceptor_;
  std::chrono::steady_clock::time_point last_complaint_{};
  std::set<ClientPtr> clients_;
  std::set<std::weak_ptr<asio::steady_timer>, std::owner_less<>> timers_;
  std::thread thread_;
};

RpcServer::RpcServer(Options options, Service& service) : impl_(std::make_unique<Impl>(std::move(options), service)) {
  impl_->start();
}
RpcServer::~RpcServer() { impl_->stop(); }
const Endpoint& RpcServer::endpoint() const noexcept { return impl_->endpoint(); }
std::string RpcServer::describe() const { return impl_->describe(); }
void RpcServer::close_listener() { impl_->close_listener(); }
void RpcServer::post(std::function<void()> callback) { impl_->post(std::move(callback)); }
void RpcServer::answer(const ClientPtr& client, std::uint64_t id, std::string_view body) {
  impl_->answer(client, id, body);
}
const std::string& RpcServer::peer(const ClientPtr& client) noexcept { return client->connection.peer(); }
void RpcServer::close(const ClientPtr& client) { impl_->close(client); }
std::shared_ptr<void> RpcServer::after(std::chrono::milliseconds time, std::function<void()> callback) {
  return impl_->after(time, std::move(callback));
}

}  // namespace cohort::net
