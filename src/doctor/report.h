// How findings read: a table for people, at most 80 columns wide where words allow it, and JSON for programs. Pure.
#pragma once

#include "doctor/check.h"
#include "doctor/finding.h"

#include <string>
#include <vector>

namespace cohort::doctor {

enum class Colour { No, Yes };

/// Equal findings of several hosts are one row. Ends with what it comes to.
std::string to_table(const Checkup& checkup, const std::vector<Finding>& findings, Colour colour);
std::string to_json_report(const Checkup& checkup, const std::vector<Finding>& findings);

}  // namespace cohort::doctor
