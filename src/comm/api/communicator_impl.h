// What a backend has to implement, and the table row by which it is found. A backend is a folder under comm/ and one
// row in `backends()`: no static registration, no conditional compilation in callers.
#pragma once

#include "comm/api/request.h"
#include "net/secret.h"
#include "net/store.h"
#include "rendezvous/identity.h"
#include "rendezvous/join_plan.h"

#include <cohort/communicator.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm {

/// A registered segment; its destructor gives the memory back once all copies of its Memory are gone.
struct MemoryBlock {
  void* data = nullptr;
  std::size_t bytes = 0;
  virtual ~MemoryBlock() = default;
};

/// The operations of `Communicator`, with the same contracts.
class CommunicatorImpl {
 public:
  virtual ~CommunicatorImpl() = default;

  virtual const rendezvous::Placement& placement() const noexcept = 0;
  virtual std::chrono::milliseconds timeout() const noexcept = 0;

  /// Starts what was asked for. The request has been checked against this rank's own view.
  virtual Work start(const Request& request) = 0;
  /// The same for several collectives of one kind, as one Work.
  virtual Work start_group(std::vector<Request> requests) = 0;
  /// Of the host's memory, which collectives read and write in place.
  virtual std::shared_ptr<MemoryBlock> allocate(std::size_t bytes) = 0;
  virtual int join(const BarrierOptions& options) = 0;
  /// Null where the color is kNoColor.
  virtual std::shared_ptr<CommunicatorImpl> split(const SplitOptions& options) = 0;
  /// `ranks` are distinct and within the world.
  virtual std::shared_ptr<CommunicatorImpl> group(std::span<const int> ranks, const GroupOptions& options) = 0;
  virtual void abort(std::string_view reason) = 0;
  virtual void set_observer(Observer* observer) noexcept = 0;
};

/// How a world that is part of a larger one speaks of its ranks and of what they do. Any thread.
class OperationLabel {
 public:
  virtual ~OperationLabel() = default;
  virtual int name_of(int rank) const noexcept = 0;   ///< in the larger world
  virtual std::string doing() const = 0;              ///< the larger world's operation
  virtual std::uint64_t number() const noexcept = 0;  ///< its number
};

/// What the ranks of a world have when they form it.
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
/// As `run_on_threads`, over a world that has been formed.
void run_on_threads_of(std::vector<Communicator> world, const std::function<void(Communicator)>& body);

}  // namespace cohort::comm
