// The workers of an elastic job: what is known of each, who has the training's state, and the record of who takes part.
// Pure: values and what follows from them. One thread.
#pragma once

#include "rendezvous/membership.h"

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// State of one process, as far as it is known.
struct KnownWorker {
  enum class Stage { Ordered, Running, Ended };

  int number = 0;
  int agent = 0;
  std::string host;
  int slot = 0;  ///< its local rank
  Stage stage = Stage::Ordered;
  bool first = false;         ///< a member of the first epoch
  bool counted = false;       ///< the job goes on with it: it is in the latest epoch, or will be in the next one
  bool leaving = false;       ///< as planned: it ends by itself, or is told to
  bool waits = false;         ///< for a world, or to be a member; reported since somebody's part was done
  bool to_be_member = false;  ///< it has said that it waits to be one
  std::int64_t formed_epoch = -1;
  bool has_state = false;                            ///< as it says itself
  std::optional<std::chrono::seconds> stopped = {};  ///< it is killed because it was stopped so long

  bool running() const noexcept { return stage == Stage::Running; }
  bool ended() const noexcept { return stage == Stage::Ended; }
  /// It has come, and is no member yet.
  bool newcomer() const noexcept { return running() && !counted && !leaving; }
};

class Roster {
 public:
  explicit Roster(std::uint64_t first_epoch) { current_.epoch = first_epoch; }

  KnownWorker& add(KnownWorker worker);
  /// Nullptr: there is none.
  KnownWorker* find(int number);
  std::map<int, KnownWorker>& all() noexcept { return workers_; }
  const std::map<int, KnownWorker>& all() const noexcept { return workers_; }

  bool runs(int worker) const;
  bool anybody_runs() const;
  bool is_counted(int worker) const;
  /// It has formed a world of this epoch, or of a later one.
  bool has_formed(int worker, std::uint64_t epoch) const;
  /// Those that are in no epoch that anybody asks for.
  void forget_ended();

  /// Its own word, and the latest.
  void report(KnownWorker& worker, std::int64_t formed_epoch, bool has_state);
  /// Somebody has trained, as far as is known: fresh workers alone would begin anew.
  bool begun() const noexcept { return state_said_ || formed(); }
  bool formed() const noexcept { return latest_formed_ >= 0; }
  /// The latest epoch whose world some worker has formed; -1: none.
  std::int64_t latest_formed() const noexcept { return latest_formed_; }
  /// It can give the training to others, or begin it. Members of the first epoch are alike: the first world is formed
  /// by all of them. A later one counts from its own word on: that it has the state, or, where no worker says that at
  /// all, that it has formed a world. (That nobody has trained yet is known too late to count on it.)
  bool knows(const KnownWorker& worker) const;
  bool is_member(int worker) const { return rendezvous::place_of(current_, worker).has_value(); }
  /// A member, or one that is counted again before there is another epoch.
  bool takes_part(int worker) const;

  int size() const;  ///< workers that are counted
  std::vector<const KnownWorker*> counted() const;
  /// That are counted, without these, can give the training to others.
  bool others_know(const std::vector<int>& without) const;
  /// Agents of those that are counted: whose worker knows the training longest is the last.
  std::vector<int> youngest_agents_first() const;
  /// Sorts them: the last to come first.
  std::vector<int> youngest_first(std::vector<int> workers) const;

  const rendezvous::Membership& current() const noexcept { return current_; }
  /// Makes it the record of those that are counted.
  void begin_epoch(const std::string& cause);
  /// The record of the first epoch.
  void begin();
  /// "2 of 4 workers", "6 workers, 2 of them new": those of `current`, beside the one before.
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

  std::map<int, KnownWorker> workers_;
  rendezvous::Membership current_;
  std::string sizes_;
  bool state_said_ = false;  ///< some worker has said that it has the state
  std::int64_t latest_formed_ = -1;
};

}  // namespace cohort::launch
