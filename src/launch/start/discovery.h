// The hosts that an elastic job may use, as listed by a script (--host-discovery-script), which is run each second in a
// process of its own. A script that fails, takes too long or prints anything but a list of hosts has listed nothing,
// which never counts as "there are no hosts". One thread.
#pragma once

#include "launch/loop.h"
#include "launch/plan/plan.h"
#include "launch/start/starter.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {

class Discovery {
 public:
  struct News {
    std::optional<std::vector<PlannedHost>> hosts = {};  ///< set whenever the script has listed the hosts
    std::string trouble = {};  ///< why a run of the script failed; reported once for the same reason
  };
  /// Runs the script immediately, and then each second. `spec` outlives this.
  Discovery(Loop& loop, const JobSpec& spec, StartMethod method);

  /// Returns what was found since the last call.
  News take() { return std::exchange(news_, {}); }

 private:
  void look();
  void look_again();
  void on_ended(const sys::ExitStatus& status);
  void fail(const std::string& why);

  Loop& loop_;
  const JobSpec& spec_;
  const StartMethod method_;
  News news_;
  std::optional<SideCommand> script_;
  std::string text_;
  std::string trouble_;  ///< the last reported reason
  Timer next_, late_;
};

/// Returns the hosts found before anything is started, when they take `least` ranks. Throws Unavailable after `limit`.
std::vector<PlannedHost> discover_hosts(const JobSpec& spec, StartMethod method, int least,
                                        std::chrono::milliseconds limit);

}  // namespace cohort::launch
