// A launcher's own means to let its processes meet: the key-value space that it keeps for them (PMI, PMIx), or MUNGE
// under Slurm. Values shared there reach this job's processes (MUNGE: this user's) and nobody else, as far as the
// launcher's connections are safe. Through it ranks on several hosts get a secret and addresses. PMI and PMIx are
// opened once per process and left in good order at its end, so that MPI can be used before, beside and after it. Any
// thread; one share at a time.
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
  /// Rank and size in the launcher's own count.
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Collective over all processes of the launcher's job: everyone gets what rank 0 gives. Keys are used once. Timeout
  /// if not all come by the deadline; after a failure the exchange is not used again.
  virtual Result<std::string> share(const std::string& key, const std::optional<std::string>& mine,
                                    net::Deadline deadline) = 0;
  /// Waits, in rank 0's process, until all others have what it gave last, or its deadline. Others may still be on their
  /// way when `share` returns.
  virtual void wait_told() {}
};

/// The one that `said.launcher` offers this process. Unavailable, with the reason, if there is none.
Result<std::shared_ptr<Exchange>> open_exchange(const rendezvous::Detected& said,
                                                const rendezvous::Environment& environment);
/// The same for a rank; the message says what a rank can do instead.
Result<std::shared_ptr<Exchange>> find_exchange(const rendezvous::Detected& said,
                                                const rendezvous::Environment& environment);

/// The environment with what PMIx's library says of the sizes, where only it knows them.
Result<rendezvous::Environment> with_pmix_keys(rendezvous::Environment environment);
/// For a step of Slurm's; `said.hosts` and `said.node_rank` say where rank 0 is.
Result<std::shared_ptr<Exchange>> open_munge(const rendezvous::Detected& said,
                                             const rendezvous::Environment& environment);

/// The ports that rank 0 of a step may answer at through MUNGE, in the order in which they are tried.
std::vector<std::uint16_t> munge_ports(std::string_view job);

/// A line of PMI's protocol, "cmd=get_result rc=0 value=x", as a map. Corrupt if it is none.
Result<std::map<std::string, std::string, std::less<>>> parse_pmi_line(std::string_view line);

// MUNGE, which Slurm's clusters authenticate users by: a credential carries bytes that only this user's processes on
// the cluster can have made and can read. libmunge is found at run time. Calls go to the daemon on this host and may
// take some seconds where it does not answer; any thread.

class Munge {
 public:
  /// `socket`: the daemon's; empty: the usual one. Unavailable if there is no libmunge.
  static Result<std::shared_ptr<Munge>> load(const std::string& socket);

  /// For this user's processes only. Unavailable if the daemon does not answer.
  Result<std::string> seal(std::string_view bytes) const;
  /// InvalidArgument if it is no fresh credential of this user.
  Result<std::string> open(const std::string& credential) const;

 private:
  struct Library;
  explicit Munge(std::shared_ptr<const Library> library, std::string socket)
      : library_(std::move(library)), socket_(std::move(socket)) {}
  std::shared_ptr<const Library> library_;
  std::string socket_;
};

/// The daemon's socket that a slurm.conf names (AuthInfo=socket=PATH); empty if it names none. Pure.
std::string munge_socket_of(std::string_view slurm_conf);

// A function of a library that is loaded while the program runs. Any thread.

/// False if the library has none of this name.
template <class Function>
bool look_up(void* library, const char* name, Function& function) {
  void* const symbol = ::dlsym(library, name);
  static_assert(sizeof symbol == sizeof function);
  std::memcpy(&function, &symbol, sizeof symbol);
  return symbol != nullptr;
}

}  // namespace cohort::rendezvous
