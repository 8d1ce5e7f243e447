// Who takes part in an elastic job: Elastic decides it, from what has happened to its workers. Pure: it knows neither
// clocks nor processes. One thread.
#pragma once

#include "base/result.h"
#include "launch/plan/plan.h"
#include "rendezvous/membership.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// The members of an elastic job, epoch by epoch. Workers are known by the numbers of their processes, which are never
/// given again; a member's rank may change with each epoch, and rank 0 is always the worker that is a member longest.
class Elastic {
 public:
  struct Limits {
    int least = 1;
    int most = 0;                          ///< 0: no limit
    std::optional<int> most_changes = {};  ///< nothing: no limit
    bool others_may_come = false;          ///< else a job with too few members ends at once
    std::uint64_t first_epoch = 0;         ///< those before it were of workers that are all gone
  };
  struct Worker {
    int number = 0;
    int host = 0;  ///< its agent's index
    std::string host_name = {};
  };
  struct Decision {
    enum class Kind {
      Nothing,
      Announce,  ///< `current` is new
      Wait,      ///< there are too few members until others come, or until `give_up`
      End,       ///< the job cannot go on
    };
    Kind kind = Kind::Nothing;
    std::string why = {};  ///< it waits, or ends
  };

  Elastic(Limits limits, std::vector<Worker> workers);

  const rendezvous::Membership& current() const noexcept { return current_; }
  /// "2 of 4 workers", "6 workers, 2 of them new": those of `current`, beside the one before.
  const std::string& sizes() const noexcept { return sizes_; }
  bool waits() const noexcept { return waits_; }
  bool over() const noexcept { return over_; }
  /// That may come now.
  int room() const;
  /// So many members may be told to leave; else why not.
  Result<void> can_spare(int workers) const;
  /// So many members have to leave: the job goes on without them, or waits for others.
  bool can_lose(int workers) const;

  /// That have members, by their agents' indices: who knows the training longest is the last to leave.
  std::vector<int> youngest_hosts_first() const;

  /// They have failed, or are lost. `cause`: as in a Membership. `spares` take their place, the first first, as far as
  /// there is room, and if then there are enough.
  Decision leave(const std::vector<int>& workers, std::string cause, const std::vector<Worker>& spares = {});
  /// It has ended with 0: its part is done, and it is in no later epoch.
  void finish(int worker);
  bool finishing() const noexcept { return finishing_; }
  /// Who goes on waits for a world that those whose part is done are to be in: the next epoch is without them.
  Decision leave_out_finished();
  /// They have been started; no more than there is room for.
  Decision come(const std::vector<Worker>& workers, const std::string& cause);
  /// It has waited long enough.
  Decision give_up(const std::string& why);

 private:
  Decision end(std::string why);
  Decision announce(const std::string& cause);
  std::uint64_t changes() const { return current_.epoch - limits_.first_epoch; }
  bool changes_are_used_up() const;
  int size() const noexcept { return static_cast<int>(workers_.size()); }

  const Limits limits_;
  std::vector<Worker> workers_;  ///< that go on, the oldest first
  rendezvous::Membership current_;
  std::string sizes_;
  bool waits_ = false;
  bool finishing_ = false;  ///< somebody's part is done
  bool over_ = false;
};

}  // namespace cohort::launch
