#include "doctor/check.h"

#include <algorithm>
#include <array>

namespace cohort::doctor {

std::vector<Finding> judge(const Checkup& checkup) {
  std::vector<Finding> found;
  check_environment(checkup, found);
  check_starts(checkup, found);
  check_names(checkup, found);
  check_software(checkup, found);
  check_networks(checkup, found);
  check_machines(checkup, found);
  check_limits(checkup, found);
  check_folders(checkup, found);
  const auto place = [](const Finding& finding) { return &row(finding.row) - rows().data(); };
  std::stable_sort(found.begin(), found.end(),
                   [&place](const Finding& a, const Finding& b) { return place(a) < place(b); });
  return found;
}

std::string size_text(std::int64_t bytes) {
  if (bytes < 0) return "unlimited";
  constexpr std::array kUnits = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return value < 10 && unit > 0 ? fmt::format("{:.1f} {}", value, kUnits[unit])
                                : fmt::format("{:.0f} {}", value, kUnits[unit]);
}

}  // namespace cohort::doctor
