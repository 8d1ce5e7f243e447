// MPI in this process: the plug-in, the packets, the process's endpoint, and MPI's initialization and finalization.
// A packet between two ranks of a world has a head with the world, the sender, and the packet's number from that
// sender. Plain layouts and pure functions; heads come from other processes and are checked in full.
#pragma once

#include "base/result.h"
#include "comm/transport/mpi/cohort_mpi.h"
#include "net/address.h"
#include "rendezvous/detect.h"

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::mpi {

// Finds and loads the plug-in for the MPI whose launcher started this process; Cohort calls MPI only through it. The
// plug-in is never unloaded. Any thread.
struct Plugin {
  const CohortMpi* mpi = nullptr;
  std::string path;
};

/// Returns the folders that are searched for plug-ins, the user's own first.
std::vector<std::filesystem::path> plugin_folders(const rendezvous::Environment& environment);

/// Returns the plug-in for this process and its environment; the first successful call loads it.
Result<Plugin> plugin_of_process();

/// Returns the paths of all installed plug-ins, for any MPI.
std::vector<std::filesystem::path> installed_plugins(const rendezvous::Environment& environment);

/// Loads the plug-in at `path` and checks its table.
Result<Plugin> open_plugin(const std::filesystem::path& path);

/// Beginning of a plug-in's file name: "cohort-mpi-FAMILY-VERSION.so".
inline constexpr std::string_view kPluginPrefix = "cohort-mpi-";

enum class PacketKind : std::uint32_t {
  Whole = 1,  ///< a whole frame
  Offer,      ///< announces a frame of `total` bytes, number `id`
  Grant,      ///< the receiver has posted memory for the frame `id`
  Piece,      ///< bytes of the frame `id`, from `offset` on
};

struct PacketHead {
  std::uint32_t mark = 0x434D5031;  ///< "CMP1"
  PacketKind kind = PacketKind::Whole;
  std::uint64_t world = 0;   ///< the world's number
  std::uint64_t number = 0;  ///< counts this sender's packets to this receiver in this world, from 0
  std::int32_t from = 0;     ///< rank in that world
  std::uint32_t tag = 0;
  std::uint64_t operation = 0;
  std::uint64_t id = 0;
  std::uint64_t offset = 0;
  std::uint64_t total = 0;  ///< bytes of the frame
};
static_assert(sizeof(PacketHead) == 64);

inline constexpr std::size_t kMostPayload = std::size_t{128} << 10;
inline constexpr std::size_t kMostPacket = sizeof(PacketHead) + kMostPayload;
inline constexpr std::size_t kMostWhole = std::size_t{64} << 10;  ///< longer frames are offered, and sent after a Grant

/// Returns the head of a packet in a world of `size` ranks; fails with Corrupt if the head is invalid.
Result<PacketHead> read_head(const std::byte* bytes, std::size_t count, int size);

struct Packet {
  std::unique_ptr<std::byte[]> bytes;
  std::size_t count = 0;
};

// This process's MPI endpoint: one communicator of all processes that MPI's launcher started, shared by all worlds of
// the process. Keeps receives posted, sorts received packets by world, and owns all memory that MPI reads and writes,
// so even a request that never ends cannot touch the memory of a frame. Any thread may call; calls of MPI's functions
// never overlap.
class Endpoint {
 public:
  /// Collective over all processes of the job. `mpi` has to be initialised, and has to outlive the endpoint.
  static Result<std::shared_ptr<Endpoint>> open(const CohortMpi& mpi, net::Deadline deadline);
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  int rank() const noexcept { return rank_; }  ///< MPI's process number
  int size() const noexcept { return size_; }
  /// Identifies the job; the same for exactly the processes that one start of the launcher has started.
  const std::string& job() const noexcept { return job_; }
  const std::string& library() const noexcept { return library_; }

  /// Keeps packets for this world from now on, including those that have already arrived.
  void enlist(std::uint64_t world);
  void retire(std::uint64_t world);

  /// Returns memory for a packet.
  std::unique_ptr<std::byte[]> buffer();
  /// Begins to send to MPI process `peer`. Returns false, and leaves the packet with the caller, if that is not
  /// possible now.
  bool send(std::uint64_t world, int peer, Packet& packet);
  /// Number of packets of this world in transit to the process.
  int under_way(std::uint64_t world, int peer);
  /// Makes progress. Returns true if anything was done.
  bool poll();
  std::vector<Packet> take(std::uint64_t world);
  void give_back(Packet packet);

  /// Returns the reason why nothing can be sent to or received from a process any more; nullopt if there is none.
  std::optional<std::string> failure(int peer);
  /// Records that a world has failed, so MPI cannot be finalized in order.
  void note_failure() noexcept { failed_ = true; }
  bool failed() const noexcept { return failed_; }

  /// From now on, only `meet` calls MPI.
  void close() noexcept;
  /// Waits until all processes of the job have called this. Call once, after `close`. Returns false if the deadline
  /// passes or MPI fails.
  bool meet(net::Deadline deadline);

 private:
  using Lock = std::lock_guard<std::mutex>;
  Endpoint(const CohortMpi& mpi, CohortMpiPort* port, int rank, int size);

  std::string explain(int code) const;
  void post_receive(int slot);
  void on_received(const CohortMpiEvent& event);
  void on_sent(const CohortMpiEvent& event);
  void fail_all(std::string why);

  const CohortMpi& mpi_;
  CohortMpiPort* const port_;
  const int rank_;
  const int size_;
  std::string job_;
  std::string library_;

  std::mutex mutex_;
  std::vector<std::unique_ptr<std::byte[]>> receiving_;  // by slot
  struct Sending {
    std::uint64_t world = 0;
    int peer = -1;
    Packet packet;
  };
  std::vector<Sending> sending_;  // by slot
  std::vector<int> free_;         // free slots for sends
  std::vector<CohortMpiEvent> events_;
  std::vector<std::unique_ptr<std::byte[]>> buffers_;
  std::map<std::uint64_t, std::deque<Packet>> boxes_;  // by world, existing or still to form
  std::set<std::uint64_t> worlds_;
  std::set<std::uint64_t> gone_;
  std::size_t early_bytes_ = 0;  // bytes of packets for worlds that do not exist yet
  std::map<std::pair<std::uint64_t, int>, int> under_way_;
  std::map<int, std::string> failures_;
  std::optional<std::string> broken_;
  std::atomic<bool> failed_{false};
  bool closed_ = false;
};

// Loads the plug-in and initialises MPI for the first world that asks for it, and finalizes MPI at the process's end.
// Does both on one separate thread, so that both have deadlines; MPI requires that it is the same thread. A program
// that has initialised MPI itself also finalizes it itself. One object per process, never destroyed; any thread.
class Runtime {
 public:
  static Runtime& of_process();

  /// Initialises MPI unless that has been done. The first call is collective over the launcher's processes. `patience`:
  /// how long this process, when it ends, waits for the other processes to end.
  Result<std::shared_ptr<Endpoint>> endpoint(net::Deadline deadline, std::chrono::milliseconds patience);

 private:
  using Outcome = Result<std::shared_ptr<Endpoint>>;
  /// States on the way to MPI_Finalize. Wanted: requested; Alone: some processes did not come; Met: all processes are
  /// ready to call it; Over: it has returned.
  enum class Ending { None, Wanted, Alone, Met, Over };

  void serve(net::Deadline deadline);
  void finalize(net::Deadline all_here);
  void step_to(Ending step);
  Outcome begin(net::Deadline deadline);
  void at_exit(int status);

  std::mutex mutex_;
  std::condition_variable changed_;
  Plugin plugin_;
  pid_t process_ = 0;
  bool begun_ = false;  // the thread has been started
  bool ours_ = false;   // this object initialised MPI, and finalizes it
  Ending ending_ = Ending::None;
  std::chrono::milliseconds patience_{0};
  std::optional<Outcome> outcome_;
};

}  // namespace cohort::mpi
