// Decides whether a job goes on when servers fail: they are started again (--server-restarts), or the others take over
// their work (--lost-servers). Pure; one thread.
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

  /// Called when all processes are started again. Earlier restarts of servers still count.
  void begin_epoch();
  /// Sets in `ending` how often the process had been started again.
  void recall(int process, Ending& ending) const;

  enum class Outcome { Failed, Again, Without };
  struct Decision {
    Outcome outcome = Outcome::Failed;
    std::string text = {};  ///< for the user
  };
  /// Decides after a server has failed by itself; `running`: number of running servers, with this one.
  Decision after(int process, const Ending& ending, int running);
  /// Decides after `host` was lost with the servers `lost`; `running`: all running servers. Returns a text for the
  /// user; nullopt: the job cannot go on without them.
  std::optional<std::string> after_host(const std::string& host, const std::string& why, const std::vector<int>& lost,
                                        const std::string& names, int running);
  /// Called when the agent has reported the restart: returns how the old process had ended; nullopt: none was awaited.
  std::optional<Ending> settle(int process);

 private:
  const int most_restarts_;
  const int most_lost_;
  int restarts_ = 0;
  int lost_ = 0;                 ///< number of servers that the job goes on without
  std::map<int, Ending> again_;  ///< by process: the latest failure of a server that is started again
  std::set<int> awaited_;        ///< servers whose restart the agent has not reported yet
};

}  // namespace cohort::launch
