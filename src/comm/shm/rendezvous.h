// The meeting of the ranks of a host, and the sockets that stay open between them.
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

// The sockets between the ranks of a host, used only for passing memory: each rank tells its peers about its segments
// (with a descriptor for mapping them) and about segments that it has freed. Each pair of ranks has one stream of
// messages. Any thread may send, since any thread may destroy a Memory; only the thread that runs operations receives.

/// A peer that this rank has met.
struct Peer {
  sys::UniqueFd socket;
  sys::ProcessId process;     // empty for a thread of this process, or if it cannot be known
  bool same_process = false;  // the peer is a thread of this process
};

class Mesh {
 public:
  /// `rank` is this rank; its entry in `peers` has no socket.
  Mesh(int rank, std::vector<Peer> peers);

  // --- any thread ---

  /// Makes a segment, registers it and informs the peers. Returns Unavailable if there is not enough memory.
  Result<std::shared_ptr<sys::Mapping>> create_segment(std::size_t bytes, std::uint32_t& id);
  /// Informs the peers that they need not keep the segment mapped.
  void free_segment(std::uint32_t id) noexcept;
  /// Returns the location of [data, data + bytes), if all of it is in one of this rank's own segments.
  std::optional<Location> locate(const void* data, std::size_t bytes) const;
  /// Sends queued messages that did not fit into the sockets before. Cheap if there are none.
  void flush() noexcept;
  /// Stops sending. Called when the communicator is destroyed, and in a forked child.
  void close() noexcept;

  /// Number of messages queued or sent to each peer so far.
  std::uint64_t announcements() const noexcept { return announcements_.load(std::memory_order_acquire); }

  // --- the thread that runs operations ---

  /// Reads messages that have come from peer `rank`, up to the one with number `announcements`.
  Result<void> receive(int rank, std::uint64_t announcements);
  /// Returns the address of a peer's memory, which is mapped if necessary; nullopt if the peer's message about the
  /// segment has not been received yet.
  Result<std::optional<void*>> address(int rank, const Location& location, std::size_t bytes);
  /// The mapping of a whole segment. The pointer keeps the segment mapped even after the peer has freed it.
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
    std::shared_ptr<sys::UniqueFd> fd;  // stays open until it has been sent to all peers
  };
  struct Remote {
    sys::UniqueFd fd;  // set only if the segment could not be mapped when its message came; mapped when it is needed
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

// The meeting of the ranks of a host. Through the store they learn each other's Unix sockets, unless they know them;
// then they connect, prove that they belong to the same world (same user, and the token that only the store's users
// know), and map rank 0's control memory. Blocks the calling thread until all have met or the deadline has passed.
struct Meeting {
  std::unique_ptr<Mesh> mesh;
  sys::Mapping control;
};

/// The socket at which peers meet this rank, listening before they know its name. Neither copied nor moved.
class Rendezvous {
 public:
  /// Lets `ranks` peers connect at the same time. Throws Io.
  explicit Rendezvous(int ranks);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  /// The text by which peers find this socket and prove that they belong to the world; at most 180 bytes.
  std::string entry() const;

 private:
  friend class Gathering;
  struct Listener;
  std::unique_ptr<Listener> listener_;
};

/// The participants of an exchange of values, numbered from 0, in a world that is being formed.
struct Exchange {
  std::string key;         ///< distinguishes the exchanges of a world
  std::vector<int> ranks;  ///< by number, for messages
  int number = 0;          ///< this participant's number
  std::chrono::steady_clock::time_point deadline;
};
/// Returns all participants' values, by number. Number 0 collects them in the store and publishes them as one, so
/// each participant makes two requests. Throws a Timeout that names the missing ranks, and like `raise_if_recorded`.
std::vector<std::string> exchange(const FormOptions& options, const Exchange& exchange, const std::string& mine);
std::string encode_values(const std::vector<std::string>& values);
Result<std::vector<std::string>> decode_values(std::string_view bytes);
/// Encodes the values compressed, since descriptions of ranks are much alike, and each host reads those of all ranks.
std::string pack_values(const std::vector<std::string>& values);
Result<std::vector<std::string>> unpack_values(std::string_view bytes);

/// Throws the reason why the forming of the world has ended, if the store has one.
void raise_if_recorded(const FormOptions& options);
/// Records in the store why this rank could not form the world, unless the error only repeats another rank's reason.
void record_failure(const FormOptions& options, const Error& error) noexcept;

/// Meets the other ranks of the host. `point` is null if `options` has no entries: they are then exchanged through the
/// store. Throws a Timeout that names the missing ranks, PeerLost if a rank dies meanwhile, Unavailable if there is not
/// enough memory, and, if another rank fails, Aborted with the reason of the first that failed.
Meeting meet(const FormOptions& options, std::unique_ptr<Rendezvous> point);

}  // namespace cohort::comm::local
