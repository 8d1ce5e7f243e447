// The workers of an elastic job: the known state of each, which of them have the training's state, and the record of
// the members. Pure values, and what follows from them. One thread.
#pragma once

#include "rendezvous/membership.h"

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// Known state of one process.
struct KnownWorker {
  enum class Stage { Ordered, Running, Ended };

  int number = 0;
  int agent = 0;
  std::string host;
  int slot = 0;  ///< local rank on its host
  Stage stage = Stage::Ordered;
  bool first = false;         ///< was a member of the first epoch
  bool was_member = false;    ///< has been a member of some epoch, this one included
  bool counted = false;       ///< the job goes on with it: the worker is in the latest epoch, or will be in the next
  bool leaving = false;       ///< leaves as planned: ends by itself, or is told to end
  bool waits = false;         ///< has reported, since some worker finished, that it waits for a world or to be a member
  bool to_be_member = false;  ///< has reported that it waits to be a member
  std::int64_t formed_epoch = -1;
  bool has_state = false;  ///< as last reported by the worker
  bool reported = false;   ///< has reported since the last worker with the state saved and ended
  std::optional<std::chrono::seconds> stopped = {};  ///< is killed because it was stopped for this time

  bool running() const noexcept { return stage == Stage::Running; }
  bool ended() const noexcept { return stage == Stage::Ended; }
  /// Returns true if the worker has come and is not a member yet.
  bool newcomer() const noexcept { return running() && !counted && !leaving; }
};

class Roster {
 public:
  explicit Roster(std::uint64_t first_epoch) { current_.epoch = first_epoch; }

  KnownWorker& add(KnownWorker worker);
  /// Returns nullptr if there is no such worker.
  KnownWorker* find(int number);
  std::map<int, KnownWorker>& all() noexcept { return workers_; }
  const std::map<int, KnownWorker>& all() const noexcept { return workers_; }

  bool runs(int worker) const;
  bool anybody_runs() const;
  bool is_counted(int worker) const;
  /// Returns true if the worker has formed a world of this epoch, or of a later one.
  bool has_formed(int worker, std::uint64_t epoch) const;
  /// Forgets ended workers that are in no epoch in use.
  void forget_ended();

  /// Records the worker's own report, and raises latest_formed().
  void report(KnownWorker& worker, std::int64_t formed_epoch, bool has_state);
  /// Returns true if some worker has trained, as far as is known; then a world of only fresh workers would begin anew.
  bool begun() const noexcept { return state_said_ || formed(); }
  bool formed() const noexcept { return latest_formed_ >= 0; }
  /// Returns the latest epoch of which some worker has formed the world; -1: none.
  std::int64_t latest_formed() const noexcept { return latest_formed_; }
  /// Returns true if the worker can give the training to others, or begin it. All members of the first epoch can, since
  /// all form the first world. A later worker can when it has reported that it has the state or, if no worker reports
  /// that, that it has formed a world. (That no worker has trained yet is known too late to rely on.)
  bool knows(const KnownWorker& worker) const;
  bool is_member(int worker) const { return rendezvous::place_of(current_, worker).has_value(); }
  /// Returns true for a member, and for a worker that is counted again before the next epoch.
  bool takes_part(int worker) const;

  int size() const;  ///< number of counted workers
  std::vector<const KnownWorker*> counted() const;
  /// Returns true if a counted worker other than these can give the training to others.
  bool others_know(const std::vector<int>& without) const;
  /// Returns the agents of counted workers; the agent of the worker that has known the training longest is last.
  std::vector<int> youngest_agents_first() const;
  /// Returns the workers sorted: the last to come is first.
  std::vector<int> youngest_first(std::vector<int> workers) const;

  const rendezvous::Membership& current() const noexcept { return current_; }
  /// Begins the next epoch, in whose record all counted workers are members.
  void begin_epoch(const std::string& cause);
  /// Makes the record of the first epoch.
  void begin();
  /// Compares `current` with the record before it: "2 of 4 workers", "6 workers, 2 of them new".
  const std::string& sizes() const noexcept { return sizes_; }

 private:
  struct Age {
    bool ignorant = false, fresh = false;
    int number = 0;
    auto operator<=>(const Age&) const = default;
  };
  Age age_of(const KnownWorker& worker) const { return {!knows(worker), !is_member(worker.number), worker.number}; }
  std::map<int, Age> ages_of_agents() const;
  std::vector<rendezvous::Member> by_rank() const;
  void note_members();

  std::map<int, KnownWorker> workers_;
  rendezvous::Membership current_;
  std::string sizes_;
  bool state_said_ = false;  ///< some worker has reported that it has the state
  std::int64_t latest_formed_ = -1;
};

}  // namespace cohort::launch
