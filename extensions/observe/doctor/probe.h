// Examines this process's host for `cohort doctor`: its properties, and whether a job would find there what it needs.
// Changes nothing. Reads system files below a root, which tests choose. Programs that are run for their version have a
// deadline. One thread. Links between a host's GPUs, as `nvidia-smi topo` prints them: a matrix whose rows and columns
// are GPUs, network cards and near processors. Pure; any thread. `beside` does waiting work in parallel if the system
// grants a thread: `ulimit -u` may forbid threads, which the doctor has to report instead of failing. The destructor of
// its result joins the thread. Any thread.
#pragma once

#include "launch/processes.h"
#include "net/secret.h"
#include "observe/doctor/facts.h"

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

namespace cohort::doctor {

LimitFacts probe_limits();
/// `root`: the folder that has proc, sys and dev; empty: this system's.
MachineFacts probe_machine(const std::string& root);
SoftwareFacts probe_software(const launch::Environment& environment, std::chrono::milliseconds limit);
FolderFacts probe_folder(const std::string& path);
std::vector<NetworkFacts> probe_networks(std::string& error);
/// Resolves all names in parallel, each until `limit`.
std::vector<NameFacts> resolve_names(const std::vector<std::string>& names, std::chrono::milliseconds limit);
/// Variables that affect a job, except possible secrets.
std::map<std::string, std::string> variables_that_matter(const launch::Environment& environment);

/// Finds the GPUs that the driver lists, and those that nvidia-smi reports if it exists.
void probe_gpus(MachineFacts& facts, const std::string& root, std::chrono::milliseconds limit);
/// On hosts with GPUs, finds their links, and the NUMA nodes of GPUs and network cards.
void probe_gpu_links(MachineFacts& facts, const std::string& root, std::chrono::milliseconds limit);
/// On hosts with GPUs, finds the NCCL that a rank would load.
void probe_nccl(MachineFacts& facts);

struct GpuPair {
  int first = 0;
  int second = 0;
  std::string way;  ///< from -m: "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"; from -p2p r: "OK", or the reason why not:
                    ///< "CNS", ...
};
/// Returns each pair once. Empty if the text is no such matrix, or has one GPU.
std::vector<GpuPair> parse_gpu_pairs(std::string_view text);

/// "NV18 between all", or "NV18 at best, SYS between 0 and 4"; empty without pairs.
std::string describe_ways(const std::vector<GpuPair>& pairs);
/// "0 and 1 (CNS)": the first pair that may not read each other's memory, and the number of further pairs; empty if all
/// may.
std::string describe_strangers(const std::vector<GpuPair>& pairs);

/// Does `work` in a new thread, or in this thread if none can be started.
inline std::jthread beside(const std::function<void()>& work) {
  try {
    return std::jthread(work);
  } catch (const std::system_error&) {
    work();
    return {};
  }
}

// Traffic between examined hosts. Each host listens, and probes every address of every other host. Peers that do not
// prove the job's secret are refused (net/acceptor.h). Every wait has a deadline. A ProbeServer has its own threads,
// which end with the process; the functions block and may be called from any thread.

/// Listens for probes of the other hosts.
class ProbeServer {
 public:
  /// Listens, and answers until the process ends. `host` is this host's index.
  static Result<ProbeServer> open(int host, const net::Secret& secret);
  int port() const noexcept { return port_; }

 private:
  int port_ = 0;
};

struct PeerAddress {
  int peer = 0;  ///< index of the host
  std::string address;
  int port = 0;
};

/// Probes all addresses, many at a time, with a deadline for each. Addresses not begun within `limit` are kNotTried.
std::vector<ProbeFacts> probe(const std::vector<PeerAddress>& addresses, const net::Secret& secret,
                              std::chrono::milliseconds limit);

struct SpeedRequest {
  int from = 0, to = 0;
  std::string address;
  int port = 0;
};
/// Measures a short transfer to the peer and one back, without encryption, like traffic of ranks.
SpeedFacts measure(const SpeedRequest& request, const net::Secret& secret);

}  // namespace cohort::doctor
