// Options of `join` (<cohort/join.h>): where and how a process meets the other ranks; and the methods for that which
// this process has. Any thread.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

namespace cohort {

/// A channel of the program's own by which every rank of a world learns rank 0's text: a key-value store, MPI, ...
/// Called once in a join, on a thread of its choice: rank 0 gives a text of at most 4000 printable characters without
/// spaces, and all return it, rank 0 too. It ends after `patience` at the latest; what it throws, join throws. Keys are
/// used once.
using ShareFunction = std::function<std::string(const std::string& key, const std::optional<std::string>& mine,
                                                std::chrono::milliseconds patience)>;

struct JoinOptions {
  /// Meeting point. Empty: COHORT_INIT, else what the launcher set up (`cohort run`, torchrun, mpirun, srun and others:
  /// docs/reference/launchers.md; else a world of one). "env://": RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
  /// "tcp://HOST:PORT": rank 0 listens there. "file:///PATH": a fresh file that all ranks can lock.
  /// "unix://NAME": processes of one user on one host, at a name that nobody else uses; no port is needed.
  std::string init_method = {};
  /// Instead of an init_method, with rank and world_size: ranks on several hosts meet at addresses that rank 0 gives
  /// the others through this channel. It carries a fresh secret, too, unless the ranks have one (that of `cohort run`,
  /// of `secret_file`, or of a world that they have formed through their launcher): anyone who reads such a channel can
  /// join.
  ShareFunction share = {};
  std::string share_name = "a channel of the program's own";  ///< for messages
  int rank = -1;        ///< for tcp://, file:// and unix:// (or ?rank=R&world_size=N in the address, or the launcher's)
  int world_size = -1;  ///< likewise
  /// A file of 0600 that holds the job's secret, for worlds without `cohort run`; default: COHORT_SECRET_FILE.
  /// Without one only processes of the same user on the same host are let in.
  std::string secret_file = {};
  /// Lets ranks on several hosts meet at an address (tcp://, env:// and what launchers describe) without a secret: any
  /// process that reaches it may join. Also COHORT_TRUST_NETWORK=1. Rank 0 logs a warning.
  bool trust_network = false;
  /// Several worlds of one process meet under different names.
  std::string group_name = "world";
  /// Identifies the program that this rank runs: ranks with different programs are refused. Default: COHORT_PROGRAM,
  /// else the executable with its build id. Programs that are meant to differ give a common text.
  std::string program = {};
  /// For all ranks to appear.
  std::chrono::milliseconds join_timeout = std::chrono::minutes(5);
  /// Deadline of operations that give none of their own; default: COHORT_TIMEOUT, else 30 minutes.
  std::chrono::milliseconds timeout = std::chrono::milliseconds(0);
  /// Transport between hosts: "tcp", or "mpi" for ranks that mpirun or srun has started (it needs the plug-in of
  /// `cohort build-mpi`); default: COHORT_TRANSPORT, else tcp.
  std::string transport = {};
  /// Run as a world of one on purpose, also under a launcher of more (as COHORT_ALONE=1).
  bool alone = false;
};

/// The means by which this process can meet ranks on other hosts.
enum class RendezvousMethod {
  None,
  Secret,    ///< the job's (`cohort run`, COHORT_SECRET_FILE), or that of a world formed through the launcher
  Launcher,  ///< its own meeting place (PMI, PMIx, MUNGE): `join` without options forms the world of this rank and size
  TorchsStore,  ///< torchrun on several hosts: torch's store is at MASTER_PORT, which its agent holds
};
/// For programs that choose a method for all ranks of a world before they `join`: the world of `size` ranks in which
/// this process is `rank`; -1: of the size that its launcher says. `join` reports errors in the environment.
RendezvousMethod rendezvous_method(int rank = -1, int size = -1);

/// Their names before 0.2; they go in the release after it.
using WayToMeet [[deprecated("RendezvousMethod")]] = RendezvousMethod;
[[deprecated("rendezvous_method")]] inline RendezvousMethod way_to_meet(int rank = -1, int size = -1) {
  return rendezvous_method(rank, size);
}

}  // namespace cohort
