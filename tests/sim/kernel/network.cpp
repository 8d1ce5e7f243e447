#include "kernel/network.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

namespace sim {
namespace {

constexpr Nanoseconds kLocalLatency = 5 * kMicrosecond;

std::vector<std::weak_ptr<Flow>>* stuck_flows = nullptr;

bool passes(Host* from, Host* to) { return from->alive && to->alive && !state->cut.contains({from, to}); }

}  // namespace

Nanoseconds broken_since(const Socket& socket) {
  if (!socket.in_ || socket.in_->from == socket.host_) return kNever;
  Host* const peer = socket.in_->from;
  Nanoseconds since = peer->alive ? kNever : peer->lost_at;
  for (const auto& way : {std::pair(socket.host_, peer), std::pair(peer, socket.host_)}) {
    if (state->cut.contains(way)) since = std::min(since, state->cut_since[way]);
  }
  return since;
}

namespace {

std::set<Socket*>* connected = nullptr;

void arrive(const std::shared_ptr<Flow>& flow, Piece piece) {
  if (!flow->to->alive) return;
  flow->on_way -= piece.bytes.size();
  flow->last_heard = state->now;
  if (flow->reader == nullptr) {  // the process has closed: its kernel answers with a reset
    if (!piece.reset && flow->writer != nullptr && passes(flow->to, flow->from)) {
      schedule(state->now + state->options.latency, [flow] {
        if (flow->writer == nullptr) return;
        flow->reset = true;
        if (flow->writer->in_) flow->writer->in_->reset = true;
        flow->writer->changed();
      });
    }
    return;
  }
  if (piece.reset) flow->reset = true;
  if (piece.end) flow->end = true;
  if (!piece.bytes.empty() || !piece.files.empty()) {
    flow->waiting += piece.bytes.size();
    flow->arrived.push_back(std::move(piece));
  }
  flow->reader->changed();
}

}  // namespace

void launch(const std::shared_ptr<Flow>& flow, Piece piece) {
  if (!flow->from->alive) return;
  flow->on_way += piece.bytes.size();
  if (!passes(flow->from, flow->to) || !flow->stuck.empty()) {
    if (flow->stuck.empty()) {
      if (stuck_flows == nullptr) stuck_flows = new std::vector<std::weak_ptr<Flow>>;
      stuck_flows->push_back(flow);
    }
    flow->stuck.push_back(std::move(piece));
    return;
  }
  ++state->messages;
  const auto bytes = static_cast<double>(piece.bytes.size() + 66);
  Nanoseconds at = state->now;
  if (flow->from == flow->to) {
    at += kLocalLatency + static_cast<Nanoseconds>(bytes / 10);
  } else {
    const auto time = static_cast<Nanoseconds>(bytes / state->options.bytes_per_ns);
    flow->from->egress_free = std::max(flow->from->egress_free, state->now) + time;
    const Nanoseconds first = flow->from->egress_free - time + state->options.latency;
    flow->to->ingress_free = std::max(flow->to->ingress_free, first) + time;
    at = flow->to->ingress_free;
  }
  at = std::max(at, flow->last_arrival);
  flow->last_arrival = at;
  schedule(at, [flow, held = std::move(piece)]() mutable {
    if (!passes(flow->from, flow->to) && flow->from != flow->to) {  // lost on its way: sent again when the link is back
      flow->on_way -= held.bytes.size();
      if (flow->stuck.empty()) {
        if (stuck_flows == nullptr) stuck_flows = new std::vector<std::weak_ptr<Flow>>;
        stuck_flows->push_back(flow);
      }
      flow->on_way += held.bytes.size();
      flow->stuck.push_back(std::move(held));
      return;
    }
    arrive(flow, std::move(held));
  });
}

Socket::~Socket() {
  if (connected != nullptr) connected->erase(this);
  if (!name_.empty() && host_->listeners.contains(name_) && host_->listeners[name_] == this)
    host_->listeners.erase(name_);
  for (const auto& one : queue_) one->linger_reset_ = true;
  queue_.clear();
  if (in_) in_->reader = nullptr;
  if (out_) {
    out_->writer = nullptr;
    Piece last;
    const bool reset = linger_reset_ || (in_ && in_->waiting > 0);
    (reset ? last.reset : last.end) = true;
    if (!shut_ || reset) launch(out_, std::move(last));
  }
}

short Socket::ready() {
  if (listening_) return queue_.empty() ? 0 : POLLIN;
  if (type_ == SOCK_DGRAM) return POLLOUT;
  if (error_ != 0) return POLLERR | POLLHUP | POLLIN | POLLOUT;
  if (connecting_) return 0;
  if (!in_) return POLLOUT | POLLHUP;
  int events = 0;
  if (in_->waiting > 0 || !in_->arrived.empty()) events |= POLLIN;
  if (in_->end) events |= POLLIN | POLLRDHUP;
  if (in_->reset || out_->reset) events |= POLLIN | POLLERR | POLLHUP;
  if (in_->end && shut_) events |= POLLHUP;
  if (out_->waiting + out_->on_way < kWindow || in_->reset) events |= POLLOUT;
  return static_cast<short>(events);
}

ssize_t Socket::receive(void* bytes, std::size_t size, int flags, std::vector<FilePtr>* files) {
  if (error_ != 0) return -std::exchange(error_, 0);
  if (!in_) return connecting_ ? -EAGAIN : -ENOTCONN;
  if (in_->arrived.empty()) {
    if (in_->reset) return std::exchange(in_->reset, false) ? (in_->end = true, -ECONNRESET) : 0;
    return in_->end ? 0 : -EAGAIN;
  }
  std::size_t done = 0, offset = in_->offset, at = 0;
  while (done < size && at < in_->arrived.size()) {
    Piece& piece = in_->arrived[at];
    if (!piece.files.empty()) {
      if (done > 0) break;
      if (files != nullptr) *files = std::exchange(piece.files, {});
    }
    const std::size_t count = std::min(size - done, piece.bytes.size() - offset);
    std::memcpy(static_cast<char*>(bytes) + done, piece.bytes.data() + offset, count);
    done += count;
    offset += count;
    if (offset == piece.bytes.size() || type_ == SOCK_SEQPACKET) {  // (of a message, the rest is lost)
      ++at;
      offset = 0;
    }
    if (type_ == SOCK_SEQPACKET) break;
  }
  if ((flags & MSG_PEEK) != 0) return static_cast<ssize_t>(done);
  in_->arrived.erase(in_->arrived.begin(), in_->arrived.begin() + static_cast<std::ptrdiff_t>(at));
  in_->offset = offset;
  in_->waiting -= std::min(in_->waiting, done);
  if (in_->writer != nullptr) in_->writer->changed();
  return static_cast<ssize_t>(done);
}

ssize_t Socket::send(const void* bytes, std::size_t size, int, std::vector<FilePtr> files) {
  if (error_ != 0) return -std::exchange(error_, 0);
  if (!out_) return connecting_ ? -EAGAIN : -ENOTCONN;
  if (shut_ || in_->reset || out_->reset) return -EPIPE;
  const std::size_t used = out_->waiting + out_->on_way;
  if (used >= kWindow) return -EAGAIN;
  const std::size_t count = std::min(size, kWindow - used);
  if (host_ != out_->to) charge(kMessageCost - kCallCost);
  Piece piece;
  piece.bytes.assign(static_cast<const char*>(bytes), count);
  piece.files = std::move(files);
  launch(out_, std::move(piece));
  return static_cast<ssize_t>(count);
}

namespace {

void join(const std::shared_ptr<Socket>& client, const std::shared_ptr<Socket>& server) {
  auto there = std::make_shared<Flow>(), back = std::make_shared<Flow>();
  *there = Flow{};
  there->from = client->host_;
  there->to = server->host_;
  there->writer = client.get();
  there->reader = server.get();
  back->from = server->host_;
  back->to = client->host_;
  back->writer = server.get();
  back->reader = client.get();
  there->last_arrival = back->last_arrival = state->now;
  if (connected == nullptr) connected = new std::set<Socket*>;
  connected->insert({client.get(), server.get()});
  client->out_ = server->in_ = there;
  client->in_ = server->out_ = back;
}

}  // namespace

std::shared_ptr<Socket> answer(const std::shared_ptr<Socket>& client, Host& host, const std::string& name) {
  const auto found = host.listeners.find(name);
  if (found == host.listeners.end()) return nullptr;
  auto& listener = static_cast<Socket&>(*found->second);
  if (!listener.listening_) return nullptr;
  auto server = std::make_shared<Socket>(listener);
  server->peer_pid_ = client->pid_;
  server->peer_address_ = client->address_;
  server->peer_port_ = client->port_;
  server->address_ = client->peer_address_;
  client->peer_pid_ = listener.pid_;
  join(client, server);
  listener.queue_.push_back(server);
  listener.changed();
  return server;
}

void try_connect(const std::weak_ptr<Socket>& weak, Host* host, const std::string& name, int attempt) {
  const auto client = weak.lock();
  if (client == nullptr || !client->connecting_) return;
  const auto again = [weak, host, name, attempt] {
    schedule(state->now + (kSecond << std::min(attempt, 5)), [=] { try_connect(weak, host, name, attempt + 1); });
  };
  if (host == nullptr || !passes(client->host_, host) || !passes(host, client->host_)) return again();
  const Nanoseconds way = client->host_ == host ? kLocalLatency : state->options.latency;
  schedule(state->now + way, [=] {
    const auto there = weak.lock();
    if (there == nullptr) return;
    if (!passes(there->host_, host)) return again();
    // The three-way handshake: the server's end is complete half a round later, which nobody can see.
    const auto server = answer(there, *host, name);
    schedule(state->now + way, [=] {
      const auto end = weak.lock();
      if (end == nullptr) return;
      end->connecting_ = false;
      if (server == nullptr) end->error_ = ECONNREFUSED;
      end->changed();
    });
  });
}

int root_connections() {
  if (connected == nullptr || state->root == nullptr) return 0;
  return static_cast<int>(std::ranges::count_if(*connected, [](const Socket* socket) {
    return socket->pid_ == state->root->pid && socket->in_ && socket->in_->from != socket->host_;
  }));
}

void links_broken() {
  if (connected == nullptr) return;
  for (Socket* const socket : *connected) {
    if (!socket->host_->alive || !socket->keep_alive_ || broken_since(*socket) == kNever) continue;
    // The kernel's probes, which it does not send while data waits to be acknowledged.
    const Nanoseconds since = broken_since(*socket);
    const Nanoseconds limit =
        (socket->idle_s_ + static_cast<Nanoseconds>(socket->between_s_) * socket->probes_) * kSecond;
    const std::weak_ptr<File> weak = socket->weak_from_this();
    schedule(since + limit, [weak, since] {
      const auto file = std::static_pointer_cast<Socket>(weak.lock());
      if (file == nullptr || !file->out_ || broken_since(*file) != since || file->out_->on_way > 0) return;
      file->error_ = ETIMEDOUT;
      file->changed();
    });
  }
}

void retry_links() {
  if (stuck_flows == nullptr) return;
  for (const auto& weak : std::exchange(*stuck_flows, {})) {
    const auto flow = weak.lock();
    if (flow == nullptr || flow->stuck.empty()) continue;
    if (!passes(flow->from, flow->to)) {
      stuck_flows->push_back(flow);
      continue;
    }
    schedule(state->now + kRetry, [flow] {
      auto pieces = std::exchange(flow->stuck, {});
      for (Piece& piece : pieces) {
        flow->on_way -= piece.bytes.size();
        launch(flow, std::move(piece));
      }
    });
  }
}

}  // namespace sim
