// Rows about the way to a host: was its agent started, and did it come.
#include "doctor/check.h"

namespace cohort::doctor {

void check_starts(const Checkup& checkup, std::vector<Finding>& out) {
  for (const HostState& host : checkup.hosts) {
    if (host.trouble.empty()) {
      const std::string_view way = host.here ? "directly" : launch::start_method_name(checkup.method);
      out.push_back(
          {"start", Level::Ok, {host.name}, {}, fmt::format("{} ({:.1f} s)", way, host.start_seconds), {}, {}});
    } else {
      out.push_back({host.trouble, Level::Failed, {host.name}, {}, host.why, {}, host.fix});
    }
    if (!host.printed.empty()) {
      out.push_back({"shell-prints",
                     Level::Warning,
                     {host.name},
                     {},
                     fmt::format("a start-up file of the shell printed: {}", host.printed.substr(0, 100)),
                     {},
                     "in .bashrc, before what prints: case $- in *i*) ;; *) return;; esac"});
    }
  }
}

}  // namespace cohort::doctor
