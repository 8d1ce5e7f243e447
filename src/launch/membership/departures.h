// Workers that leave an elastic job as planned: by its user's order, because their host is no longer listed, or because
// their agent has been told to end. They leave when the others have formed a world without them; if the others are lost
// before, they become members again. The last worker that has the training's state does not leave. A part of
// Membership. Pure. One thread.
#pragma once

#include "launch/membership/standing.h"
#include "launch/membership/succession.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

class Departures {
 public:
  using Time = Standing::Time;

  /// Both arguments outlive this.
  Departures(Standing& job, Succession& succession) : job_(job), succession_(succession) {}

  /// Takes a host away, by the user's order.
  Result<std::string> take_away(const std::string& host, bool kill);
  /// Keeps a host that is wanted again.
  void keep(const std::string& host);
  /// Makes workers leave whose hosts or slots are no longer listed.
  void drain_unlisted();
  /// Called when an agent has been told to end. (A batch system tells all processes of a job at about the same moment.)
  void note_notice();

  void look();
  std::optional<Time> next_look() const;
  void end();
  /// Called when another worker may have got the training's state.
  void look_for_held();
  /// Called when the others have formed a world of the latest epoch.
  void note_formed();
  /// Called when the others cannot go on: makes up to `room` leaving workers members again, and returns them.
  std::vector<int> take_back(int room);
  /// Returns true if `take_back` would find a worker that has the training's state.
  bool may_take_back() const;
  /// Drops workers that have ended, and agents that run nothing.
  void forget();

 private:
  enum class Reason { Order, List, Notice };
  /// Workers that leave together.
  struct Leaving {
    Reason reason = Reason::Order;
    std::vector<int> workers = {};
    std::vector<int> counted = {};  ///< those of `workers` that were counted until they left
    int agent = 0;
    bool all = false;                ///< all workers of the agent leave
    std::uint64_t epoch = 0;         ///< the first epoch without them
    bool others_went_on = false;     ///< the others have formed a world of that epoch
    bool told = false;               ///< the workers have been told to end
    std::optional<Time> limit = {};  ///< when the workers are told to end
    int signal = 0;                  ///< the signal with which they are told to end
  };
  /// An order or a notice that is held until another worker has the training's state.
  struct Held {
    bool kill = false;
    std::string host = {};           ///< for an order
    std::optional<Time> limit = {};  ///< for a notice
    int agent = -1, signal = 0;
    bool is_notice() const noexcept { return host.empty(); }
  };

  void let_go(const std::vector<int>& agents, Reason reason, const std::string& why, std::optional<Time> limit);
  void let_some_go(int agent, const std::vector<int>& workers, const std::vector<int>& counted, const std::string& why);
  void let_leave(const std::vector<int>& counted, const std::string& why);
  void mark_leaving(Leaving leaving);
  void end_leavers(Leaving& leaving);
  void drain_unlisted(int agent);
  bool can_return(const Leaving& leaving) const;
  void take_back(const Leaving& leaving, const std::vector<int>& taken);
  void hold_again(const Leaving& leaving);
  void act_on_notices();
  void hold_notice(int agent, Time limit);

  Standing& job_;
  Succession& succession_;
  std::vector<Leaving> leaving_;
  std::vector<Held> held_;
  std::optional<Time> notices_at_;
  /// Maps a host that is no longer listed, or has fewer slots, to the reason why its workers stay.
  std::map<std::string, std::string> unspared_;
};

}  // namespace cohort::launch
