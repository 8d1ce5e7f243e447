// How the ranks of a host come together, and the sockets that they keep between them.
#pragma once

#include "base/memory.h"
#include "base/process.h"
#include "base/unique_fd.h"
#include "comm/api/communicator_impl.h"
#include "comm/shm/control.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace cohort::comm::local {

// The sockets between the ranks of a host, used for nothing but passing memory: each rank informs its peers about its
// segments (with the descriptor to map them) and about those it has freed. One stream of messages per pair of ranks.
// Sending may happen on any thread (a Memory may die anywhere); receiving only on the thread that runs operations.

/// A peer as it was met.
struct Peer {
  sys::UniqueFd socket;
  sys::ProcessId process;     // empty for a thread of this process, and where it cannot be known
  bool same_process = false;  // a thread of this process
};

class Mesh {
 public:
  /// `peers[rank]` has no socket.
  Mesh(int rank, std::vector<Peer> peers);

  // --- any thread ---

  /// Makes a segment, registers it and informs the peers. Unavailable if there is not enough memory.
  Result<std::shared_ptr<sys::Mapping>> create_segment(std::size_t bytes, std::uint32_t& id);
  /// Informs the peers that they need not keep the segment mapped.
  void free_segment(std::uint32_t id) noexcept;
  /// Location of [data, data + bytes), if it is all in one of this rank's own segments.
  std::optional<Location> locate(const void* data, std::size_t bytes) const;
  /// Sends messages that the sockets have not taken. Cheap when there is nothing.
  void flush() noexcept;
  /// Sends peers nothing any more: the communicator is gone, or this is a forked child.
  void close() noexcept;

  /// Messages made for each peer so far.
  std::uint64_t announcements() const noexcept { return announcements_.load(std::memory_order_acquire); }

  // --- the thread that runs operations ---

  /// Reads messages of peer `rank`, up to its `announcements`-th. Fewer if they are not here yet.
  Result<void> receive(int rank, std::uint64_t announcements);
  /// The address of a peer's memory, mapped if it is not yet. nullopt: not announced yet, call again.
  Result<std::optional<void*>> address(int rank, const Location& location, std::size_t bytes);
  /// The whole of a segment that has been mapped. The pointer keeps it mapped, also when the peer has freed it.
  std::shared_ptr<const sys::Mapping> mapping(int rank, std::uint32_t segment) const;
  std::uint64_t received(int rank) const noexcept { return incoming_[static_cast<std::size_t>(rank)].received; }

  const Peer& peer(int rank) const noexcept { return peers_[static_cast<std::size_t>(rank)]; }

 private:
  enum class Type : std::uint32_t { Segment = 1, Freed = 2 };
  struct Message {
    Type type;
    std::uint32_t segment;
    std::uint64_t bytes;
  };
  struct Outgoing {
    Message message;
    std::shared_ptr<sys::UniqueFd> fd;  // open until all peers have been sent it
  };
  struct Remote {
    sys::UniqueFd fd;  // only if it could not be mapped when it came; tried again when it is needed
    std::uint64_t bytes = 0;
    std::shared_ptr<sys::Mapping> mapping;
    bool populated = false;
  };
  struct Incoming {
    std::unordered_map<std::uint32_t, Remote> segments;
    std::uint64_t received = 0;
    bool ended = false;
  };

  void send_locked(Outgoing outgoing);
  void flush_locked(std::size_t peer) noexcept;

  const int rank_;
  std::vector<Peer> peers_;
  std::vector<Incoming> incoming_;

  mutable std::mutex mutex_;
  bool closed_ = false;
  std::uint32_t last_segment_ = 0;
  std::atomic<std::uint64_t> announcements_{0};
  std::vector<std::deque<Outgoing>> queues_;
  std::atomic<bool> pending_{false};
  std::map<std::uintptr_t, std::pair<std::uint32_t, std::shared_ptr<sys::Mapping>>> own_;  // by address
};

// How the ranks of a host come together: through the store they learn each other's Unix sockets, connect, prove that
// they belong to the same world (same user, and the token that only the store's users know), and map rank 0's control
// memory. Blocks the calling thread until all have met or the deadline has passed.
struct Meeting {
  std::unique_ptr<Mesh> mesh;
  sys::Mapping control;
};

/// A place at which peers can meet this rank: made before they know of it. Movable only by its pointer.
class Rendezvous {
 public:
  /// `ranks` may come at once. Throws Io.
  explicit Rendezvous(int ranks);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  /// The text by which peers find it and prove that they belong here; at most 180 bytes.
  std::string entry() const;

 private:
  friend class Gathering;
  struct Listener;
  std::unique_ptr<Listener> listener_;
};

/// A rank's own, of entries by rank that have come another way: nobody has to be asked.
std::shared_ptr<store::Store> store_of(std::span<const std::string> entries);

/// `point` null: one is made and put into the store. Throws Timeout naming the ranks that did not come, PeerLost if one
/// dies meanwhile, Unavailable if there is not enough memory, and the first failing rank's reason where another rank
/// could not go on.
Meeting meet(const FormOptions& options, std::unique_ptr<Rendezvous> point);

}  // namespace cohort::comm::local
