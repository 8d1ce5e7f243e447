// Options of `init` (<cohort/init.h>): where and how a process meets the other ranks, and which methods this process
// has for that. Any thread.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

namespace cohort {

/// A function of the program through which every rank of a world gets rank 0's text, by a key-value store, MPI, ...
/// `init` calls it once, on any thread: rank 0 passes a text of at most 4000 printable characters without spaces, and
/// the call returns that text on all ranks, rank 0 included. It has to return within `patience`; `init` rethrows what
/// it throws. Each key is used once.
using ShareFunction = std::function<std::string(const std::string& key, const std::optional<std::string>& mine,
                                                std::chrono::milliseconds patience)>;

struct InitOptions {
  /// Address where the ranks meet. Empty: COHORT_INIT, else what the launcher set up (`cohort run`, torchrun, mpirun,
  /// srun and others: docs/reference/launchers.md; else a world of one). "env://": RANK, WORLD_SIZE, MASTER_ADDR and
  /// MASTER_PORT. "tcp://HOST:PORT": rank 0 listens there. "file:///PATH": a fresh file that all ranks can lock.
  /// "unix://NAME": processes of one user on one host, at a name that no other job uses; no port is needed.
  std::string init_method = {};
  /// Instead of an init_method, with rank and world_size: ranks on several hosts meet at addresses that rank 0 sends to
  /// the others through this channel. Unless the ranks have a secret (from `cohort run`, `secret_file`, or a world
  /// formed through their launcher), the channel also carries a fresh one, and anyone who reads it can be a rank.
  ShareFunction share = {};
  std::string share_name = "a channel of the program's own";  ///< name of that channel in messages
  int rank = -1;        ///< for tcp://, file:// and unix:// (or ?rank=R&world_size=N in the address, or the launcher's)
  int world_size = -1;  ///< for the same methods as `rank`
  /// A file of 0600 that holds the job's secret, for worlds without `cohort run`; default: COHORT_SECRET_FILE. Without
  /// a secret, only processes of the same user on the same host can be ranks.
  std::string secret_file = {};
  /// Lets ranks on several hosts meet at an address (tcp://, env:// and what launchers describe) without a secret: any
  /// process that reaches the address may be a rank. Also COHORT_TRUST_NETWORK=1. Rank 0 logs a warning.
  bool trust_network = false;
  /// Several worlds of one process meet under different names.
  std::string group_name = "world";
  /// Identifies the program that this rank runs: ranks with different programs are refused. Default: COHORT_PROGRAM,
  /// else the executable with its build id. Set the same text in programs that differ on purpose.
  std::string program = {};
  /// Time in which all ranks have to appear.
  std::chrono::milliseconds init_timeout = std::chrono::minutes(5);
  /// Timeout of operations whose options have none; default: COHORT_TIMEOUT, else 30 minutes.
  std::chrono::milliseconds timeout = std::chrono::milliseconds(0);
  /// Transport between hosts: "tcp", or "mpi" for ranks that mpirun or srun has started (it needs the plug-in of
  /// `cohort build-mpi`); default: COHORT_TRANSPORT, else tcp.
  std::string transport = {};
  /// Forms a world of one on purpose, even if the launcher started more processes (like COHORT_ALONE=1).
  bool alone = false;
};

/// The means by which this process can meet ranks on other hosts.
enum class RendezvousMethod {
  None,
  Secret,    ///< a secret: the job's (`cohort run`, COHORT_SECRET_FILE), or that of a world formed through the launcher
  Launcher,  ///< the launcher's own exchange (PMI, PMIx, MUNGE): `init` without options forms the world of this rank
             ///< and size
  TorchsStore,  ///< torchrun on several hosts: its agent serves torch's store at MASTER_PORT
};
/// Returns the method for a world of `size` ranks in which this process is `rank` (-1: what the launcher says), for
/// programs that choose one method for all ranks before `init`. Leaves errors in the environment to `init`.
RendezvousMethod rendezvous_method(int rank = -1, int size = -1);

}  // namespace cohort
