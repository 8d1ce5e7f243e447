// Workers that leave an elastic job as planned: by its user's order, because their host is listed no more, or because
// their agent has been told to end. They do so once the others have formed a world without them; until then they are
// members again if the others are lost. The last that has the training's state does not leave. A part of Membership.
// Pure. One thread.
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

  /// Both outlive this.
  Departures(Standing& job, Succession& succession) : job_(job), succession_(succession) {}

  /// The job's user takes a host away.
  Result<std::string> take_away(const std::string& host, bool kill);
  /// It is wanted again.
  void keep(const std::string& host);
  /// Other hosts are listed.
  void drain_unlisted();
  /// An agent has been told to end. (A batch system tells all processes of a job at about the same moment.)
  void note_notice();

  void look();
  std::optional<Time> next_look() const;
  void end();
  /// Somebody else may have the training's state now.
  void look_for_held();
  /// The others have formed a world of the latest epoch.
  void note_formed();
  /// The others cannot go on alone: so many of those that can still be members are. Returns them.
  std::vector<int> take_back(int room);
  /// Drops workers that have ended, and agents under which nothing runs.
  void forget();

 private:
  enum class Reason { Order, List, Notice };
  /// Workers that leave together.
  struct Leaving {
    Reason reason = Reason::Order;
    std::vector<int> workers = {};
    std::vector<int> counted = {};  ///< of these, until they left
    int agent = 0;
    bool all = false;                ///< that run there
    std::uint64_t epoch = 0;         ///< the first one without them
    bool others_went_on = false;     ///< to that
    bool told = false;               ///< to end
    std::optional<Time> limit = {};  ///< then they are told to end,
    int signal = 0;                  ///< by this
  };
  /// An order or a notice that waits until others have the training's state.
  struct Held {
    bool kill = false;
    std::string host = {};           ///< of an order
    std::optional<Time> limit = {};  ///< of a notice
    int agent = -1, signal = 0;
    bool is_notice() const noexcept { return host.empty(); }
  };

  void let_go(const std::vector<int>& agents, Reason reason, const std::string& why, std::optional<Time> limit);
  void let_some_go(int agent, const std::vector<int>& workers, const std::vector<int>& counted, const std::string& why);
  void let_leave(const std::vector<int>& counted, const std::string& why);
  void mark_leaving(Leaving leaving);
  void end_leavers(Leaving& leaving);
  void drain_unlisted(int agent);
  void take_back(Leaving& leaving);
  void hold_again(const Leaving& leaving);
  void act_on_notices();
  void hold_notice(int agent, Time limit);

  Standing& job_;
  Succession& succession_;
  std::vector<Leaving> leaving_;
  std::vector<Held> held_;
  std::optional<Time> notices_at_;
  /// Hosts that are listed no more, or with fewer slots, and why their workers stay.
  std::map<std::string, std::string> unspared_;
};

}  // namespace cohort::launch
