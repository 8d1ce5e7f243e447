// Facts that `cohort doctor` learns about one host, found out by a process there (probe.h), as values and as JSON.
// Decoding takes bytes from another host: any invalid text is refused. Plain data; any thread.
#pragma once

#include "base/result.h"

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::doctor {

/// An address of an interface that is up, loopback left out.
struct NetworkFacts {
  std::string interface;
  std::string address;
  int mtu = 0;
  int offered = -1;  ///< its place among those that a job tries; -1: COHORT_NETWORK leaves it out
};

/// Addresses that a name has on this host.
struct NameFacts {
  std::string name;
  std::vector<std::string> addresses;
  std::string error;
};

inline constexpr std::int64_t kUnlimited = -1;

struct LimitFacts {
  std::int64_t open_files = kUnlimited;
  std::int64_t open_files_most = kUnlimited;  ///< the hard limit
  std::int64_t processes = kUnlimited;
  std::int64_t locked_memory = kUnlimited;
  std::int64_t core = kUnlimited;
};

struct MachineFacts {
  std::string processor;
  int processors = 0;  ///< online
  int affinity = 0;    ///< that this process may use
  double quota = 0;    ///< of the control group, in processors; 0: none
  int cores = 0;       ///< left by both; as a job counts them
  int numa_nodes = 0;  ///< 0: not known
  int threads = 0;     ///< of a core; 0: not known
  double load = 0;     ///< of one minute
  std::int64_t memory = 0;
  std::int64_t memory_available = 0;
  std::int64_t memory_limit = 0;  ///< of the control group; 0: none
  std::int64_t shared = 0;        ///< /dev/shm
  std::int64_t shared_free = 0;
  std::string shared_error;
  std::vector<std::string> gpus;
  std::string gpu_driver;
  std::string gpu_error;                  ///< the driver is there, and nvidia-smi fails
  std::vector<int> gpu_nodes;             ///< NUMA nodes of the GPUs; -1: not known
  std::map<std::string, int> card_nodes;  ///< with GPUs: likewise, of network cards, by name
  std::string gpu_links;                  ///< how GPUs reach each other
  std::string gpu_strangers;              ///< which may not read each other's memory
  std::string nccl;                       ///< with GPUs: its version
  std::string nccl_path;
  std::string nccl_error;  ///< why there is none
  bool infiniband = false;
};

struct SoftwareFacts {
  std::string version;
  std::string build;
  std::string commit;  ///< the command's build id
  std::string path;
  std::string python;
  std::string python_path;
  std::string python_error;
  std::string torch;
  std::string package;  ///< the Python package cohort
  std::string mpi;
};

/// The job's working folder.
struct FolderFacts {
  std::string path;
  std::string error;  ///< a job cannot run in it
  bool writable = false;
  std::int64_t free = 0;
  std::string file_system;
};

struct HostFacts {
  std::string name;  ///< its own
  int port = 0;      ///< for probes of its peers
  std::vector<NetworkFacts> networks;
  std::string network_error;     ///< COHORT_NETWORK fits nothing
  std::vector<NameFacts> names;  ///< the first is its own
  LimitFacts limits;
  MachineFacts machine;
  SoftwareFacts software;
  FolderFacts folder;
  std::map<std::string, std::string> environment;  ///< variables of a rank there, as far as they matter
};

std::string to_json(const HostFacts& facts);
/// Fails with Corrupt.
Result<HostFacts> parse_host_facts(std::string_view text);

/// Result of probing one address of a peer.
struct ProbeFacts {
  int peer = 0;  ///< index of the host
  std::string address;
  std::string result;       ///< one of kReached, ...
  std::string detail;       ///< errno's text
  std::string from;         ///< own address of the connection
  double milliseconds = 0;  ///< of a round trip, once connected
};
inline constexpr std::string_view kReached = "reached";
inline constexpr std::string_view kRefused = "refused";           ///< nobody listens, or a firewall says so
inline constexpr std::string_view kNoAnswer = "no answer";        ///< packets are lost
inline constexpr std::string_view kNoRoute = "no route";          ///< a router, or a firewall, says that it is closed
inline constexpr std::string_view kSomebodyElse = "another one";  ///< the peer does not know the job's secret
inline constexpr std::string_view kNotTried = "not tried";        ///< there was no time
inline constexpr std::string_view kLargeLost = "large lost";      ///< small messages pass, 64 KiB do not

std::string to_json(const std::vector<ProbeFacts>& probes);
Result<std::vector<ProbeFacts>> parse_probes(std::string_view text);

/// A short transfer, seen from the host that began it.
struct SpeedFacts {
  int from = 0, to = 0;
  std::string address;
  double there = 0;  ///< bytes per second
  double back = 0;
  double milliseconds = 0;
  std::string error;
};
std::string to_json(const SpeedFacts& speed);
Result<SpeedFacts> parse_speed(std::string_view text);

}  // namespace cohort::doctor
