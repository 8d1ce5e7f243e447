#include "comm/local/mesh.h"

#include "sys/unique_fd.h"

#include <sys/socket.h>

#include <cerrno>

namespace cohort::comm::local {

Mesh::Mesh(int rank, std::vector<Peer> peers)
    : rank_(rank), peers_(std::move(peers)), incoming_(peers_.size()), queues_(peers_.size()) {}

Result<std::shared_ptr<sys::Mapping>> Mesh::create_segment(std::size_t bytes, std::uint32_t& id) {
  auto made = sys::create_shared_segment("cohort", bytes);  // without the lock: it may take long
  if (!made) return tl::unexpected(made.error());
  auto mapping = std::make_shared<sys::Mapping>(std::move(made->mapping));
  const std::lock_guard lock(mutex_);
  id = ++last_segment_;
  own_.emplace(reinterpret_cast<std::uintptr_t>(mapping->data()), std::make_pair(id, mapping));
  send_locked({{Type::Segment, id, mapping->bytes()}, std::make_shared<sys::UniqueFd>(std::move(made->fd))});
  return mapping;
}

void Mesh::free_segment(std::uint32_t id) noexcept {
  const std::lock_guard lock(mutex_);
  for (auto entry = own_.begin(); entry != own_.end(); ++entry) {
    if (entry->second.first != id) continue;
    own_.erase(entry);
    break;
  }
  send_locked({{Type::Freed, id, 0}, nullptr});
}

std::optional<Location> Mesh::locate(const void* data, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto entry = own_.upper_bound(address);
  if (entry == own_.begin()) return std::nullopt;
  --entry;
  const std::uint64_t offset = address - entry->first;
  const std::size_t whole = entry->second.second->bytes();
  if (offset > whole || bytes > whole - offset) return std::nullopt;
  return Location{entry->second.first, offset};
}

void Mesh::flush() noexcept {
  if (!pending_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  bool rest = false;
  for (std::size_t peer = 0; peer < queues_.size(); ++peer) {
    flush_locked(peer);
    rest = rest || !queues_[peer].empty();
  }
  pending_.store(rest, std::memory_order_relaxed);
}

void Mesh::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (auto& queue : queues_) queue.clear();
  for (Peer& peer : peers_) peer.socket.reset();
}

void Mesh::send_locked(Outgoing outgoing) {
  if (closed_) return;
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (static_cast<int>(peer) == rank_) continue;
    queues_[peer].push_back(outgoing);
    flush_locked(peer);
    if (!queues_[peer].empty()) pending_.store(true, std::memory_order_relaxed);
  }
  announcements_.fetch_add(1, std::memory_order_release);
}

void Mesh::flush_locked(std::size_t peer) noexcept {
  auto& queue = queues_[peer];
  while (!queue.empty()) {
    Outgoing& next = queue.front();
    const ssize_t sent = sys::send_with_fd(peers_[peer].socket.get(), &next.message, sizeof next.message,
                                           next.fd ? next.fd->get() : -1, MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    // No room, or too many descriptors under way: later. Any other failure means that the peer is gone, which is
    // found out and named where it is waited for.
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ETOOMANYREFS || errno == ENOBUFS)) return;
    if (sent < 0) {
      queue.clear();
      return;
    }
    queue.pop_front();
  }
}

Result<void> Mesh::receive(int rank, std::uint64_t announcements) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(rank)];
  while (incoming.received < announcements && !incoming.ended) {
    Message message{};
    sys::UniqueFd fd;
    const ssize_t length = sys::receive_with_fd(peers_[static_cast<std::size_t>(rank)].socket.get(), &message,
                                                sizeof message, fd, MSG_DONTWAIT);
    if (length < 0 && errno == EINTR) continue;
    if (length < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
    if (length <= 0) {
      incoming.ended = true;
      return {};
    }
    if (length != sizeof message) return fail(ErrorCode::Corrupt, "rank {} sent a message of {} bytes", rank, length);
    ++incoming.received;
    if (message.type == Type::Segment) {
      if (!fd) {
        return fail(ErrorCode::Unavailable,
                    "no descriptor left for memory of rank {} -- raise the limit of open files (ulimit -n)", rank);
      }
      Remote remote;
      remote.bytes = message.bytes;
      if (auto mapping = sys::map_shared_segment(fd.get(), message.bytes)) {
        remote.mapping = std::make_shared<sys::Mapping>(*std::move(mapping));  // and no descriptor is held for it
      } else {
        remote.fd = std::move(fd);
      }
      incoming.segments.insert_or_assign(message.segment, std::move(remote));
    } else if (message.type == Type::Freed) {
      incoming.segments.erase(message.segment);
    } else {
      return fail(ErrorCode::Corrupt, "rank {} sent an unknown message", rank);
    }
  }
  return {};
}

Result<std::optional<void*>> Mesh::address(int rank, const Location& location, std::size_t bytes) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(rank)];
  const auto found = incoming.segments.find(location.segment);
  if (found == incoming.segments.end()) return std::optional<void*>();
  Remote& remote = found->second;
  if (location.offset > remote.bytes || bytes > remote.bytes - location.offset) {
    return fail(ErrorCode::Corrupt, "rank {} named {} bytes at {} of a segment of {}", rank, bytes, location.offset,
                remote.bytes);
  }
  if (!remote.mapping) {
    auto mapping = sys::map_shared_segment(remote.fd.get(), remote.bytes);
    if (!mapping) return tl::unexpected(mapping.error());
    remote.mapping = std::make_shared<sys::Mapping>(*std::move(mapping));
    remote.fd.reset();
  }
  if (!remote.populated) {
    sys::populate(*remote.mapping);
    remote.populated = true;
  }
  return std::optional<void*>(static_cast<std::byte*>(remote.mapping->data()) + location.offset);
}

std::shared_ptr<const sys::Mapping> Mesh::mapping(int rank, std::uint32_t segment) const {
  const auto& segments = incoming_[static_cast<std::size_t>(rank)].segments;
  const auto found = segments.find(segment);
  return found != segments.end() ? found->second.mapping : nullptr;
}

}  // namespace cohort::comm::local
