// The interface that a backend implements, and the table row by which it is found. A backend is a folder under comm/
// and one row in `backends()`: no static registration, no conditional compilation in callers.
#pragma once

#include "comm/api/request.h"
#include "net/secret.h"
#include "net/store.h"
#include "rendezvous/identity.h"
#include "rendezvous/join_plan.h"

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

/// A registered segment; its destructor gives the memory back once all copies of its Memory are gone.
struct MemoryBlock {
  void* data = nullptr;
  std::size_t bytes = 0;
  virtual ~MemoryBlock() = default;
};

/// The operations of `Communicator` on the host's memory, with the same contracts.
class CommunicatorImpl {
 public:
  virtual ~CommunicatorImpl() = default;

  virtual const rendezvous::Placement& placement() const noexcept = 0;
  virtual std::chrono::milliseconds timeout() const noexcept = 0;
  /// Throws InvalidArgument in a forked child of the process that formed it.
  virtual void check_home() const = 0;

  /// Starts what was asked for. The request has been checked against this rank's own view.
  virtual Work start(const Request& request) = 0;
  /// The same for several collectives of one kind, as one Work.
  virtual Work start_group(std::vector<Request> requests) = 0;
  /// Allocates host memory, which collectives read and write in place.
  virtual std::shared_ptr<MemoryBlock> allocate(std::size_t bytes) = 0;
  /// One memory for all ranks. Collective. Throws InvalidArgument where they are on several hosts.
  virtual std::shared_ptr<MemoryBlock> allocate_shared(std::size_t bytes) = 0;
  virtual int join(const BarrierOptions& options) = 0;
  /// Null where the color is kNoColor.
  virtual std::shared_ptr<CommunicatorImpl> split(const SplitOptions& options) = 0;
  /// `ranks` are distinct and within the world.
  virtual std::shared_ptr<CommunicatorImpl> group(std::span<const int> ranks, const GroupOptions& options) = 0;
  virtual void abort(std::string_view reason) = 0;
  virtual void set_observer(Observer* observer) noexcept = 0;
  /// Number of each rank's host; empty: all are on one.
  virtual std::vector<int> hosts() const { return {}; }
  /// The queue of collectives, for operations that consist of several.
  virtual const std::shared_ptr<Queue>& queue() const noexcept = 0;
};

/// How a world that is part of a larger one speaks of its ranks and of what they do. Any thread.
class OperationLabel {
 public:
  virtual ~OperationLabel() = default;
  virtual int name_of(int rank) const noexcept = 0;   ///< in the larger world
  virtual std::string doing() const = 0;              ///< the larger world's operation
  virtual std::uint64_t number() const noexcept = 0;  ///< its number
};

/// Inputs from which the ranks of a world form it.
struct FormOptions {
  std::shared_ptr<store::Store> store;  ///< shared by exactly the ranks of this world; keys are free to use
  rendezvous::Placement placement;
  std::chrono::milliseconds join_timeout = std::chrono::minutes(5);
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  std::vector<int> hosts = {};             ///< by rank, the number of its host; empty: all are on one
  bool one_machine = false;                ///< the hosts are fake: loopback reaches all ranks
  std::optional<net::Secret> secret = {};  ///< of the job; without one, the store's keys are secret enough
  rendezvous::TransportKind transport = rendezvous::TransportKind::Tcp;  ///< between hosts
  std::shared_ptr<const OperationLabel> label = {};                      ///< where this is a part of a larger world
  bool background = false;                                               ///< as in GroupOptions
};

struct Availability {
  bool available = false;
  std::string version;
  std::string reason;  ///< why not, and how to get it
};

struct Backend {
  std::string_view name;
  Availability (*probe)();
  bool several_hosts;
  std::shared_ptr<CommunicatorImpl> (*create)(const FormOptions& options);
};

std::span<const Backend> backends() noexcept;
/// The best one for worlds on one host, or on several.
const Backend& usual_backend(bool several_hosts) noexcept;

// Worlds whose ranks are threads, on a backend that the caller names. Any thread.

/// `hosts` as in FormOptions. As `form_thread_world` otherwise.
std::vector<Communicator> form_on_threads(const Backend& backend, std::vector<int> hosts, int size,
                                          const ThreadWorldOptions& options);
/// Does as `run_on_threads`, over a world that has been formed.
void run_on_threads_of(std::vector<Communicator> world, const std::function<void(Communicator)>& body);

// Checks the arguments of an operation, as far as one rank can tell. Each function throws InvalidArgument that names
// the operation, the argument and the rank. Pure; any thread.

/// The operation that is checked, and whose it is.
struct Caller {
  const CommunicatorImpl& impl;
  Kind kind;

  int size() const noexcept { return impl.placement().size; }
  int rank() const noexcept { return impl.placement().rank; }
};

void check_buffer(const Caller& caller, std::string_view name, const ConstBuffer& buffer);
void check_same_type(const Caller& caller, const ConstBuffer& input, const Buffer& output);
/// `in_place` is where the input begins if the two are one on purpose; else they must not share a byte.
void check_apart(const Caller& caller, const ConstBuffer& input, const Buffer& output, const void* in_place);
void check_reduction(const Caller& caller, DType dtype, ReduceOp op, double prescale, double postscale);
void check_weight(const Caller& caller, DType dtype, ReduceOp op, double weight);
/// Checks the format in which elements travel between hosts.
void check_wire_format(const Caller& caller, DType dtype, ReduceOp op, WireFormat format, const float* residual);
void check_timeout(const Caller& caller, const std::optional<std::chrono::milliseconds>& timeout);
void check_root(const Caller& caller, int root);
void check_peer(const Caller& caller, int peer, int tag);
/// There has to be somebody to receive from.
void check_any_source(const Caller& caller, int tag);
/// `whole` has to be size() parts of `part` elements.
void check_parts(const Caller& caller, std::string_view whole_name, std::int64_t whole, std::string_view part_name,
                 std::int64_t part);
/// size() counts that make sense. Returns their sum.
std::int64_t check_counts(const Caller& caller, std::string_view name, std::span<const std::int64_t> counts);
/// Checks also that they add up to `total`.
void check_counts(const Caller& caller, std::string_view name, std::span<const std::int64_t> counts,
                  std::string_view of, std::int64_t total);
/// This rank's own entry.
void check_own_count(const Caller& caller, std::span<const std::int64_t> counts, std::string_view of,
                     std::int64_t count);
void check_ranks(const Caller& caller, std::span<const int> ranks);
[[noreturn]] void refuse_argument(const Caller& caller, std::string_view why);

}  // namespace cohort::comm
