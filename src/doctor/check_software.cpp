// Rows about what is installed: is it there, and the same on all hosts.
#include "doctor/check.h"

#include <algorithm>
#include <functional>
#include <map>

namespace cohort::doctor {
namespace {

using Values = std::map<std::string, std::vector<std::string>>;

Values values_of(const Checkup& checkup, const std::function<std::string(const SoftwareFacts&)>& value) {
  Values values;
  for (const HostState& host : checkup.hosts) {
    if (host.facts) values[value(host.facts->software)].push_back(host.name);
  }
  return values;
}

std::string few(const std::vector<std::string>& hosts) {
  if (hosts.size() <= 3) return fmt::format("{}", fmt::join(hosts, ", "));
  return fmt::format("{}, {} and {} more", hosts[0], hosts[1], hosts.size() - 2);
}

/// "3.11.2 (a, b); 3.9.7 (c)".
std::string side_by_side(const Values& values, const char* none) {
  std::string text;
  for (const auto& [value, hosts] : values)
    text += fmt::format("{}{} ({})", text.empty() ? "" : "; ", value.empty() ? none : value, few(hosts));
  return text;
}

std::vector<std::string> all_of(const Values& values) {
  std::vector<std::string> hosts;
  for (const auto& [value, some] : values) hosts.insert(hosts.end(), some.begin(), some.end());
  return hosts;
}

struct SoftwareKind {
  const char* row;
  std::string (*value)(const SoftwareFacts&);
  const char* none;
  Level differs;
  Level missing;  ///< on all of them
  const char* fix;
};

}  // namespace

void check_software(const Checkup& checkup, std::vector<Finding>& out) {
  // Versions that differ do not get so far: the agent is refused (row "version").
  const SoftwareKind kinds[] = {
      {"version", [](const SoftwareFacts& s) { return fmt::format("{} ({})", s.version, s.build); }, "?", Level::Failed,
       Level::Ok, "install one version everywhere"},
      {"build", [](const SoftwareFacts& s) { return s.commit; }, "unknown", Level::Warning, Level::Ok,
       "install the same build everywhere, or name it with --remote-cohort"},
      {"python", [](const SoftwareFacts& s) { return s.python; }, "none", Level::Warning, Level::Ok,
       "activate the same environment on all hosts (VIRTUAL_ENV goes along), or install the same Python"},
      {"torch", [](const SoftwareFacts& s) { return s.torch; }, "none", Level::Failed, Level::Ok,
       "pip install the same torch in the Python of each host"},
      {"mpi", [](const SoftwareFacts& s) { return s.mpi; }, "none", Level::Warning, Level::Ok,
       "install the same MPI everywhere, if programs use it"},
  };
  for (const SoftwareKind& kind : kinds) {
    const Values values = values_of(checkup, kind.value);
    if (values.empty()) continue;
    const bool same = values.size() == 1;
    Finding finding{kind.row, same ? Level::Ok : kind.differs, all_of(values), {}, side_by_side(values, kind.none), {},
                    {}};
    if (same) finding.found = values.begin()->first.empty() ? kind.none : values.begin()->first;
    if (!same) finding.fix = kind.fix;
    // A host that has none fails only the programs that need it.
    if (!same && values.contains("")) finding.level = Level::Warning;
    out.push_back(std::move(finding));
  }
  for (const HostState& host : checkup.hosts) {
    if (!host.facts) continue;
    const SoftwareFacts& software = host.facts->software;
    if (!software.python_error.empty())
      out.push_back({"python",
                     Level::Warning,
                     {host.name},
                     {},
                     software.python_error,
                     {},
                     fmt::format("on {}: python3 --version", host.name)});
  }
}

}  // namespace cohort::doctor
