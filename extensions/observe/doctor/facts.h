// Facts that `cohort doctor` learns about one host from a process there (probe.h), as values and as JSON. Decodes text
// from another host, and refuses any invalid text. Plain data; any thread.
#pragma once

#include "base/result.h"

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::doctor {

/// An address of an interface that is up, other than loopback.
struct NetworkFacts {
  std::string interface;
  std::string address;
  int mtu = 0;
  int offered = -1;  ///< position among the addresses that a job tries; -1: COHORT_NETWORK excludes it
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
  int processors = 0;  ///< processors that are online
  int affinity = 0;    ///< processors that this process may use
  double quota = 0;    ///< quota of the control group, in processors; 0: none
  int cores = 0;       ///< cores that affinity and quota leave, as a job counts them
  int numa_nodes = 0;  ///< 0: not known
  int threads = 0;     ///< threads of a core; 0: not known
  double load = 0;     ///< load average of one minute
  std::int64_t memory = 0;
  std::int64_t memory_available = 0;
  std::int64_t memory_limit = 0;  ///< limit of the control group; 0: none
  std::int64_t shared = 0;        ///< /dev/shm
  std::int64_t shared_free = 0;
  std::string shared_error;
  std::vector<std::string> gpus;
  std::string gpu_driver;
  std::string gpu_error;                  ///< set if the driver exists and nvidia-smi fails
  std::vector<int> gpu_nodes;             ///< NUMA nodes of the GPUs; -1: not known
  std::map<std::string, int> card_nodes;  ///< NUMA nodes of network cards, by name, on hosts with GPUs
  std::string gpu_links;                  ///< links between GPUs, in words
  std::string gpu_strangers;              ///< GPUs that may not read each other's memory, in words
  std::string nccl;                       ///< version of NCCL, on hosts with GPUs
  std::string nccl_path;
  std::string nccl_error;  ///< reason why NCCL is missing
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
  std::string error;  ///< reason why a job cannot run in the folder
  bool writable = false;
  std::int64_t free = 0;
  std::string file_system;
};

struct HostFacts {
  std::string name;  ///< the host's own name
  int port = 0;      ///< port for probes by peers
  std::vector<NetworkFacts> networks;
  std::string network_error;     ///< set if COHORT_NETWORK matches no address
  std::vector<NameFacts> names;  ///< the first is the host's own
  LimitFacts limits;
  MachineFacts machine;
  SoftwareFacts software;
  FolderFacts folder;
  std::map<std::string, std::string> environment;  ///< relevant variables of a rank there
};

std::string to_json(const HostFacts& facts);
/// Fails with Corrupt for invalid text.
Result<HostFacts> parse_host_facts(std::string_view text);

/// Result of probing one address of a peer.
struct ProbeFacts {
  int peer = 0;  ///< index of the host
  std::string address;
  std::string result;       ///< one of kReached, ...
  std::string detail;       ///< errno's text
  std::string from;         ///< this host's address of the connection
  double milliseconds = 0;  ///< round trip time after connecting
};
inline constexpr std::string_view kReached = "reached";
inline constexpr std::string_view kRefused = "refused";           ///< no process listens, or a firewall refuses
inline constexpr std::string_view kNoAnswer = "no answer";        ///< packets are lost
inline constexpr std::string_view kNoRoute = "no route";          ///< a router, or a firewall, reports that it is
                                                                  ///< closed
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
