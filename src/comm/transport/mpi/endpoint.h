// MPI in this process: its packets, its one end of MPI, and that this is begun and ended.
// Packets that go over MPI between two ranks of a world, each with a head that says whose it is and which it is of
// those from this sender. Plain layouts and pure functions; heads come from other processes and are checked in full.
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

// Finds the plug-in for the MPI whose launcher started this process, and loads it: the one library through which an
// MPI is reached. It is never unloaded. Any thread.
struct Plugin {
  const CohortMpi* mpi = nullptr;
  std::string path;
};

/// The folders in which plug-ins are looked for, the user's own first.
std::vector<std::filesystem::path> plugin_folders(const rendezvous::Environment& environment);

/// The plug-in of this process and its environment: loaded at the first call that succeeds.
Result<Plugin> plugin_of_process();

/// The plug-ins that may be used, for whichever MPI.
std::vector<std::filesystem::path> installed_plugins(const rendezvous::Environment& environment);

/// Loads this one and checks its table.
Result<Plugin> open_plugin(const std::filesystem::path& path);

/// Beginning of a plug-in's file name: "cohort-mpi-FAMILY-VERSION.so".
inline constexpr std::string_view kPluginPrefix = "cohort-mpi-";

enum class PacketKind : std::uint32_t {
  Whole = 1,  ///< a frame
  Offer,      ///< a frame of `total` bytes, to be asked for by its number
  Grant,      ///< the frame `id` has a place now
  Piece,      ///< bytes of the frame `id`, from `offset` on
};

struct PacketHead {
  std::uint32_t mark = 0x434D5031;  ///< "CMP1"
  PacketKind kind = PacketKind::Whole;
  std::uint64_t world = 0;   ///< the world's number
  std::uint64_t number = 0;  ///< of this sender's packets to this receiver in this world, from 0
  std::int32_t from = 0;     ///< rank in that world
  std::uint32_t tag = 0;
  std::uint64_t operation = 0;
  std::uint64_t id = 0;
  std::uint64_t offset = 0;
  std::uint64_t total = 0;  ///< of the frame
};
static_assert(sizeof(PacketHead) == 64);

inline constexpr std::size_t kMostPayload = std::size_t{128} << 10;
inline constexpr std::size_t kMostPacket = sizeof(PacketHead) + kMostPayload;
inline constexpr std::size_t kMostWhole = std::size_t{64} << 10;  ///< longer frames wait until they have a place

/// The head of a packet of `size` ranks; Corrupt if it is none.
Result<PacketHead> read_head(const std::byte* bytes, std::size_t count, int size);

struct Packet {
  std::unique_ptr<std::byte[]> bytes;
  std::size_t count = 0;
};

// This process's end of MPI: one communicator of all processes that MPI's launcher started, shared by all worlds of the
// process. Keeps receives posted, sorts what comes by world, and owns all memory that MPI reads and writes: so no
// request ever touches memory of a frame, also where a request never ends. Any thread may call; MPI's functions are
// never called by two at once.
class Endpoint {
 public:
  /// Collective over all processes of the job; `mpi` is initialised and stays.
  static Result<std::shared_ptr<Endpoint>> open(const CohortMpi& mpi, net::Deadline deadline);
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  int rank() const noexcept { return rank_; }  ///< of MPI's count
  int size() const noexcept { return size_; }
  /// Equal for the processes of one start of the launcher, and for no others.
  const std::string& job() const noexcept { return job_; }
  const std::string& library() const noexcept { return library_; }

  /// Keeps packets that come for this world, also those that have come before.
  void enlist(std::uint64_t world);
  void retire(std::uint64_t world);

  /// Memory for a packet.
  std::unique_ptr<std::byte[]> buffer();
  /// Begins to send to a process of MPI's count. False if it cannot now, and the packet is still the caller's.
  bool send(std::uint64_t world, int peer, Packet& packet);
  /// How many packets of this world are on their way to it.
  int under_way(std::uint64_t world, int peer);
  /// Makes progress. True if anything was done.
  bool poll();
  std::vector<Packet> take(std::uint64_t world);
  void give_back(Packet packet);

  /// Reason why nothing can be sent to or come from a process any more.
  std::optional<std::string> failure(int peer);
  /// A world has come to a bad end: MPI is not to be ended in order.
  void note_failure() noexcept { failed_ = true; }
  bool failed() const noexcept { return failed_; }

  /// Lets only `meet` call MPI from here on.
  void close() noexcept;
  /// Called after `close`, once: waits until all processes of the job have come here. False if they have not by then,
  /// or where MPI fails.
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
  std::vector<int> free_;         // slots to send by
  std::vector<CohortMpiEvent> events_;
  std::vector<std::unique_ptr<std::byte[]>> buffers_;
  std::map<std::uint64_t, std::deque<Packet>> boxes_;  // of worlds that are there, or may come
  std::set<std::uint64_t> worlds_;
  std::set<std::uint64_t> gone_;
  std::size_t early_bytes_ = 0;  // for worlds that are not there yet
  std::map<std::pair<std::uint64_t, int>, int> under_way_;
  std::map<int, std::string> failures_;
  std::optional<std::string> broken_;
  std::atomic<bool> failed_{false};
  bool closed_ = false;
};

// MPI in this process: which plug-in, begun at the first world that asks for it, ended at the process's end. MPI is
// begun and ended on a thread of its own, as it demands, so that both have deadlines. A program that has begun MPI
// itself also ends it itself. One for the process, never destroyed; any thread.
class Runtime {
 public:
  static Runtime& of_process();

  /// Begins MPI if nobody has. Collective over the processes of the launcher the first time. `patience`: at the
  /// process's end, how long the others may take to come to theirs.
  Result<std::shared_ptr<Endpoint>> endpoint(net::Deadline deadline, std::chrono::milliseconds patience);

 private:
  using Outcome = Result<std::shared_ptr<Endpoint>>;
  /// Steps to MPI_Finalize: asked to go, not all have come, all are there to call it, it has returned.
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
  bool ours_ = false;   // this began MPI, and ends it
  Ending ending_ = Ending::None;
  std::chrono::milliseconds patience_{0};
  std::optional<Outcome> outcome_;
};

}  // namespace cohort::mpi
