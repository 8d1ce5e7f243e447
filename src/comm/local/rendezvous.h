// How the ranks of a host come together: through the store they learn each other's Unix sockets, connect, prove that
// they belong to the same world (same user, and the token that only the store's users know), and map rank 0's control
// memory. Blocks the calling thread until all have met or the deadline has passed.
#pragma once

#include "comm/communicator_impl.h"
#include "comm/local/control.h"
#include "comm/local/mesh.h"
#include "sys/memory.h"

#include <chrono>
#include <memory>
#include <span>
#include <string>

namespace cohort::comm::local {

struct Meeting {
  std::unique_ptr<Mesh> mesh;
  sys::Mapping control;
};

/// Where peers can meet this rank: made before they know of it. Movable only by its pointer.
class Rendezvous {
 public:
  /// `ranks` may come at once. Throws Io.
  explicit Rendezvous(int ranks);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  /// What peers need to find it and to prove that they belong here; at most 180 bytes.
  std::string entry() const;

 private:
  friend class Gathering;
  struct Listener;
  std::unique_ptr<Listener> listener_;
};

/// A rank's own, of entries by rank that have come another way: nobody has to be asked.
std::shared_ptr<store::Store> store_of(std::span<const std::string> entries);

/// `point` null: one is made and put into the store. Throws Timeout naming the ranks that did not come, PeerLost if one
/// dies meanwhile, Unavailable if there is not enough memory, and the first failing rank's reason where another rank
/// could not go on.
Meeting meet(const FormOptions& options, std::unique_ptr<Rendezvous> point);

}  // namespace cohort::comm::local
