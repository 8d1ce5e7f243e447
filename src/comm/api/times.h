// What collectives of this process take, for whoever asks: added up in the rank's status page (COHORT_TIMES), and one
// by one in its timeline (`cohort run --trace`), both of which its agent reads. What the program waits for them is
// always added up: two looks at the clock for each wait that does not end at once. Any thread.
#pragma once

#include <cohort/observer.h>

#include <chrono>

namespace cohort::comm::times {

/// Whether the environment, or the agent, asks for them.
bool wanted() noexcept;

/// An operation has ended.
void add(const CollectiveEvent& event) noexcept;
/// What this thread does is not the program's waiting: it is a thread of ours.
void leave_out_this_thread() noexcept;

/// The program has waited so long, which is in no Exposed.
void add_exposed(std::uint64_t ns) noexcept;

/// The program does nothing but wait as long as this lives. Within another one, nothing.
class Exposed {
 public:
  Exposed() noexcept { begin(); }
  ~Exposed() {
    if (begun_ != Clock::time_point{}) end();
  }
  Exposed(const Exposed&) = delete;
  Exposed& operator=(const Exposed&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  void begin() noexcept;
  void end() noexcept;
  Clock::time_point begun_{};
};

}  // namespace cohort::comm::times
