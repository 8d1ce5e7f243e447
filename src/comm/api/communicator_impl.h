// The interface that a backend implements, and its row in the table of backends. A backend is a folder under comm/ and
// one row in `backends()`: no static registration, no conditional compilation in callers.
#pragma once

#include "comm/api/request.h"
#include "net/secret.h"
#include "net/store.h"
#include "rendezvous/identity.h"
#include "rendezvous/init_plan.h"

#include <cohort/communicator.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm {

class Queue;

/// A registered segment, which is freed when the last copy of its Memory is destroyed.
struct MemoryBlock {
  void* data = nullptr;
  std::size_t bytes = 0;
  virtual ~MemoryBlock() = default;
};

/// The operations of `Communicator` on host memory, with the same contracts.
class CommunicatorImpl {
 public:
  virtual ~CommunicatorImpl() = default;

  virtual const rendezvous::Placement& placement() const noexcept = 0;
  virtual std::chrono::milliseconds timeout() const noexcept = 0;
  /// Throws InvalidArgument in a forked child of the process that formed the communicator.
  virtual void check_home() const = 0;

  /// Starts an operation whose arguments have been checked, as far as one rank can check them.
  virtual Work start(const Request& request) = 0;
  /// Starts several collectives of one kind, as one Work.
  virtual Work start_group(std::vector<Request> requests) = 0;
  /// Allocates host memory, which collectives read and write in place.
  virtual std::shared_ptr<MemoryBlock> allocate(std::size_t bytes) = 0;
  /// Allocates one memory that all ranks share. Collective. Throws InvalidArgument if the ranks are on several hosts.
  virtual std::shared_ptr<MemoryBlock> allocate_shared(std::size_t bytes) = 0;
  virtual int join(const BarrierOptions& options) = 0;
  /// Forms the groups of the ranks' colors. Returns null if this rank's color is kNoColor.
  virtual std::shared_ptr<CommunicatorImpl> split(const SplitOptions& options) = 0;
  /// `ranks` are distinct and within the world.
  virtual std::shared_ptr<CommunicatorImpl> group(std::span<const int> ranks, const GroupOptions& options) = 0;
  virtual void abort(std::string_view reason) = 0;
  virtual void set_observer(Observer* observer) noexcept = 0;
  /// Number of each rank's host; empty if all ranks are on one host.
  virtual std::vector<int> hosts() const { return {}; }
  /// The queue of collectives, for operations that consist of several others.
  virtual const std::shared_ptr<Queue>& queue() const noexcept = 0;
};

/// Names of ranks and operations that a world within a larger world uses in messages. Any thread.
class OperationLabel {
 public:
  virtual ~OperationLabel() = default;
  virtual int name_of(int rank) const noexcept = 0;   ///< the rank's number in the larger world
  virtual std::string doing() const = 0;              ///< the larger world's operation
  virtual std::uint64_t number() const noexcept = 0;  ///< the number of that operation
};

/// Options with which the ranks of a world form it.
struct FormOptions {
  std::shared_ptr<store::Store> store;    ///< shared by exactly the ranks of this world, which may use any keys
  std::vector<std::string> entries = {};  ///< how this host's ranks meet, if known; no store is needed then
  rendezvous::Placement placement;
  std::chrono::milliseconds init_timeout = std::chrono::minutes(5);
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  std::vector<int> hosts = {};             ///< by rank, the number of its host; empty: all ranks are on one host
  bool one_machine = false;                ///< the hosts are fake: loopback reaches all ranks
  std::optional<net::Secret> secret = {};  ///< the job's secret; if not set, the store's keys are secret enough
  rendezvous::TransportKind transport = rendezvous::TransportKind::Tcp;  ///< transport between hosts
  std::shared_ptr<const OperationLabel> label = {};                      ///< set if this is part of a larger world
  bool background = false;                                               ///< as in GroupOptions
  /// For a group: how the larger world has lost a rank of this host, by its number among those of the group, if it has.
  /// Throws the reason if that world has ended.
  std::function<std::optional<std::string>(int)> lost = {};
};

struct Availability {
  bool available = false;
  std::string version;
  std::string reason;  ///< why the backend is not available, and how to get it
};

struct Backend {
  std::string_view name;
  Availability (*probe)();
  bool several_hosts;
  std::shared_ptr<CommunicatorImpl> (*create)(const FormOptions& options);
};

std::span<const Backend> backends() noexcept;
/// The best backend for worlds on one host, or on several.
const Backend& usual_backend(bool several_hosts) noexcept;

// Functions that form worlds of threads on a given backend. Any thread.

/// Like `form_thread_world`, on the given backend. `hosts` is as in FormOptions.
std::vector<Communicator> form_on_threads(const Backend& backend, std::vector<int> hosts, int size,
                                          const ThreadWorldOptions& options);
/// Like `run_on_threads`, over a world that has been formed.
void run_on_threads_of(std::vector<Communicator> world, const std::function<void(Communicator)>& body);

// Checks the arguments of an operation, as far as one rank can tell. Each function throws an InvalidArgument that names
// the operation, the argument and the rank. Pure; any thread.

/// The communicator and the kind of operation whose arguments are checked.
struct Caller {
  const CommunicatorImpl& impl;
  Kind kind;

  int size() const noexcept { return impl.placement().size; }
  int rank() const noexcept { return impl.placement().rank; }
};

void check_buffer(const Caller& caller, std::string_view name, const ConstBuffer& buffer);
void check_same_type(const Caller& caller, const ConstBuffer& input, const Buffer& output);
/// Checks that input and output share no byte, unless the operation is in place (the input begins at `in_place`).
void check_apart(const Caller& caller, const ConstBuffer& input, const Buffer& output, const void* in_place);
void check_reduction(const Caller& caller, DType dtype, ReduceOp op, double prescale, double postscale);
void check_weight(const Caller& caller, DType dtype, ReduceOp op, double weight);
/// Checks the format in which elements are sent between hosts.
void check_wire_format(const Caller& caller, DType dtype, ReduceOp op, WireFormat format, const float* residual);
void check_timeout(const Caller& caller, const std::optional<std::chrono::milliseconds>& timeout);
void check_root(const Caller& caller, int root);
void check_peer(const Caller& caller, int peer, int tag);
/// Checks that the world has another rank to receive from.
void check_any_source(const Caller& caller, int tag);
/// Checks that `whole` is size() times `part` elements.
void check_parts(const Caller& caller, std::string_view whole_name, std::int64_t whole, std::string_view part_name,
                 std::int64_t part);
/// Checks that there are size() counts and that they are possible. Returns their sum.
std::int64_t check_counts(const Caller& caller, std::string_view name, std::span<const std::int64_t> counts);
/// Checks also that the counts add up to `total`.
void check_counts(const Caller& caller, std::string_view name, std::span<const std::int64_t> counts,
                  std::string_view of, std::int64_t total);
/// Checks this rank's own entry.
void check_own_count(const Caller& caller, std::span<const std::int64_t> counts, std::string_view of,
                     std::int64_t count);
void check_ranks(const Caller& caller, std::span<const int> ranks);
[[noreturn]] void refuse_argument(const Caller& caller, std::string_view why);

}  // namespace cohort::comm
