// A launcher's own means to let its processes meet: the key-value space that it keeps for them (PMI, PMIx), or MUNGE
// under Slurm. If the launcher's connections are safe, only this job's processes (MUNGE: this user's) can read the
// shared values. Ranks on several hosts get a secret and addresses through it. PMI and PMIx are opened once per process
// and closed properly at its end, so that MPI can be used before, beside and after them. Any thread; one share at a
// time.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "rendezvous/detect.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::rendezvous {

class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual std::string_view name() const = 0;
  /// The longest value that `share` takes.
  virtual std::size_t longest_value() const = 0;
  /// Rank and size as the launcher counts them.
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Collective over all processes of the launcher's job: returns rank 0's value on each. A key may be used once. Fails
  /// with Timeout if not all processes call it by the deadline. After a failure the exchange must not be used again.
  virtual Result<std::string> share(const std::string& key, const std::optional<std::string>& mine,
                                    net::Deadline deadline) = 0;
  /// Waits, in rank 0's process, until all others have received the last value, or until that call's deadline. When
  /// `share` returns on rank 0, others may not have called it yet.
  virtual void wait_told() {}
};

/// Opens the exchange that `said.launcher` offers this process. Fails with Unavailable if there is none, and says why.
Result<std::shared_ptr<Exchange>> open_exchange(const rendezvous::Detected& said,
                                                const rendezvous::Environment& environment);
/// Like open_exchange, for a rank: the error also says what a rank can do instead.
Result<std::shared_ptr<Exchange>> find_exchange(const rendezvous::Detected& said,
                                                const rendezvous::Environment& environment);

/// Returns the environment, adding the sizes from PMIx's library if only the library knows them.
Result<rendezvous::Environment> with_pmix_keys(rendezvous::Environment environment);
/// Opens an exchange for a Slurm step. `said.hosts` and `said.node_rank` tell where rank 0 is.
Result<std::shared_ptr<Exchange>> open_munge(const rendezvous::Detected& said,
                                             const rendezvous::Environment& environment);

/// Returns the ports at which rank 0 of a step may answer through MUNGE, in the order in which they are tried.
std::vector<std::uint16_t> munge_ports(std::string_view job);

/// Parses a line of PMI's protocol, "cmd=get_result rc=0 value=x". Fails with Corrupt if it is not one.
Result<std::map<std::string, std::string, std::less<>>> parse_pmi_line(std::string_view line);

// MUNGE, with which Slurm clusters authenticate users. A credential carries bytes that only this user's processes on
// the cluster can write and read. libmunge is found at run time. Calls go to the daemon on this host, and may take some
// seconds if it does not answer. Any thread.

class Munge {
 public:
  /// `socket`: path of the daemon's socket; empty: the default one. Fails with Unavailable if there is no libmunge.
  static Result<std::shared_ptr<Munge>> load(const std::string& socket);

  /// Makes a credential only for this user's processes. Fails with Unavailable if the daemon does not answer.
  Result<std::string> seal(std::string_view bytes) const;
  /// Returns a credential's bytes. Fails with InvalidArgument if it is no fresh credential of this user.
  Result<std::string> open(const std::string& credential) const;

 private:
  struct Library;
  explicit Munge(std::shared_ptr<const Library> library, std::string socket)
      : library_(std::move(library)), socket_(std::move(socket)) {}
  std::shared_ptr<const Library> library_;
  std::string socket_;
};

/// Returns the daemon's socket that a slurm.conf names (AuthInfo=socket=PATH); empty if it names none. Pure.
std::string munge_socket_of(std::string_view slurm_conf);

// Functions of libraries that are loaded at run time. Any thread.

/// Sets `function` to the library's function of this name; returns false if there is none.
template <class Function>
bool look_up(void* library, const char* name, Function& function) {
  void* const symbol = ::dlsym(library, name);
  static_assert(sizeof symbol == sizeof function);
  std::memcpy(&function, &symbol, sizeof symbol);
  return symbol != nullptr;
}

}  // namespace cohort::rendezvous
