// Looks at the host that this process is on: what `cohort doctor` shows of it, and whether a job would find there what
// it needs. Changes nothing. Files of the system are read below a root that tests choose. Programs that are asked for
// their version have a deadline. One thread.
// How a host's GPUs reach each other, as `nvidia-smi topo` prints it: a matrix whose rows and columns are GPUs, network
// cards and what processors are near. Pure; any thread.
// Work that waits for others, done side by side where the system grants threads: `ulimit -u` may not, and a doctor
// names that instead of failing by it. The result joins the thread when it goes. Any thread.
#pragma once

#include "doctor/facts.h"
#include "launch/processes.h"
#include "net/secret.h"

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
/// All of them at once, each until `limit`.
std::vector<NameFacts> resolve_names(const std::vector<std::string>& names, std::chrono::milliseconds limit);
/// Variables that change what a job does, without any that might be a secret.
std::map<std::string, std::string> variables_that_matter(const launch::Environment& environment);

/// GPUs as the driver lists them, and what nvidia-smi says if it is there.
void probe_gpus(MachineFacts& facts, const std::string& root, std::chrono::milliseconds limit);
/// For hosts with GPUs: how these reach each other, and which NUMA nodes they and network cards are near.
void probe_gpu_links(MachineFacts& facts, const std::string& root, std::chrono::milliseconds limit);
/// The NCCL that a rank would load, on hosts with GPUs.
void probe_nccl(MachineFacts& facts);

struct GpuPair {
  int first = 0;
  int second = 0;
  std::string way;  ///< of -m: "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"; of -p2p r: "OK", or why not: "CNS", ...
};
/// Each pair once. Empty if the text is no such matrix, or has one GPU.
std::vector<GpuPair> parse_gpu_pairs(std::string_view text);

/// "NV18 between all", or "NV18 at best, SYS between 0 and 4"; nothing of no pairs.
std::string describe_ways(const std::vector<GpuPair>& pairs);
/// "0 and 1 (CNS)": the first pair that may not read each other's memory, and how many more; nothing if all may.
std::string describe_strangers(const std::vector<GpuPair>& pairs);

/// Does `work` in a thread of its own; where there is none to be had, at once.
inline std::jthread beside(const std::function<void()>& work) {
  try {
    return std::jthread(work);
  } catch (const std::system_error&) {
    work();
    return {};
  }
}

// Traffic between two hosts that `cohort doctor` looks at: each listens, and probes every address of every other. Peers
// that do not prove the job's secret get nothing (net/acceptor.h). Every wait has a deadline. A ProbeServer has threads
// of its own, which end with the process; the functions block and may be called from any thread.

/// Listens for probes of the other hosts.
class ProbeServer {
 public:
  /// Listens, and answers until the process ends. `host`: its index.
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

/// Probes all addresses, many at a time, with a deadline for each. Addresses whose turn has not come after `limit` are
/// kNotTried.
std::vector<ProbeFacts> probe(const std::vector<PeerAddress>& addresses, const net::Secret& secret,
                              std::chrono::milliseconds limit);

struct SpeedRequest {
  int from = 0, to = 0;
  std::string address;
  int port = 0;
};
/// A short transfer there and another one back, as ranks send: without encryption.
SpeedFacts measure(const SpeedRequest& request, const net::Secret& secret);

}  // namespace cohort::doctor
