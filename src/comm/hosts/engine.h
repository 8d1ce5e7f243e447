// Runs one collective after the other over ranks on several hosts. Every operation begins with a round (round.h), in
// which all ranks learn what all others bring; disagreement is refused by all of them before any result is delivered.
// Then data goes by way of the local world inside hosts and of the transport between them (docs/design/hosts.md):
// moves.h, sums.h. One thread at a time runs operations. After a failure other than Mismatch the world has ended.
#pragma once

#include "comm/control/operation.h"
#include "comm/hosts/context.h"
#include "comm/hosts/round.h"

#include <cohort/observer.h>

#include <chrono>
#include <functional>
#include <utility>

namespace cohort::comm::hosts {

class Engine {
 public:
  using Clock = std::chrono::steady_clock;

  Engine(World& world, Waiters& waiters, std::function<void()> meanwhile)
      : context_(world, waiters, std::move(meanwhile)) {}

  /// All of an operation. Throws Mismatch (and the engine may be used again) or what ended the world.
  void run(const Request& request, Clock::time_point called, CollectiveEvent* event);
  /// Serves the others' operations until all ranks have joined; `patience` is for each of them.
  int join(std::chrono::milliseconds patience);
  /// While an operation is carried out elsewhere: as DeviceOp::Ranks::attend.
  void attend() { context_.attend(); }

 private:
  Context context_;
  Round round_;
};

}  // namespace cohort::comm::hosts
