// Whether a job goes on when servers fail: they are started again (--server-restarts), or the others do their work
// (--lost-servers). Pure; one thread.
#pragma once

#include "launch/health/verdict.h"

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace cohort::launch {

class ServerLosses {
 public:
  ServerLosses(int most_restarts, int most_lost) : most_restarts_(most_restarts), most_lost_(most_lost) {}

  /// Another start of all processes. Restarts of servers before it still count.
  void begin_epoch();
  /// Says in `ending` how often the process had been started again.
  void recall(int process, Ending& ending) const;

  enum class Fate { Failed, Again, Without };
  struct Decision {
    Fate fate = Fate::Failed;
    std::string text = {};  ///< for the user
  };
  /// After one has failed by itself; so many run, with it.
  Decision after(int process, const Ending& ending, int running);
  /// After the host is lost on which these run; so many run in all. nullopt: the job cannot go on without them.
  std::optional<std::string> after_host(const std::string& host, const std::string& why, const std::vector<int>& lost,
                                        const std::string& names, int running);
  /// The agent has said what came of the restart: how the process before it had ended. nullopt: nothing was awaited.
  std::optional<Ending> settle(int process);

 private:
  const int most_restarts_;
  const int most_lost_;
  int restarts_ = 0;
  int lost_ = 0;                 ///< that the job goes on without
  std::map<int, Ending> again_;  ///< by process: the latest failure of a server that was to be started again,
  std::set<int> awaited_;        ///< and those of which it is not known yet whether they have been
};

}  // namespace cohort::launch
