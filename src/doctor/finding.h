// What `cohort doctor` has to say: findings, and the table of rows that they belong to. Plain data.
// To add a row: a line in kRows (finding.cpp), a section in docs/reference/doctor.md (a test compares), a judgement in
// one of check_*.cpp, and a test that breaks the very thing.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::doctor {

enum class Level { Ok, Warning, Failed };
std::string_view level_name(Level level);

struct Finding {
  std::string row;  ///< id of one in the table
  Level level = Level::Ok;
  std::vector<std::string> hosts;  ///< where; empty: the command's own environment
  std::string to;                  ///< not empty: it is about the way from `hosts` to this one
  std::string found;
  std::string effect;  ///< what it does to a job; empty: as the table says
  std::string fix;     ///< a command, mostly
};

struct Row {
  std::string_view id;
  std::string_view title;   ///< at most 16 characters
  std::string_view effect;  ///< what it does to a job if it is not in order
};
/// In the order in which they are shown.
std::span<const Row> rows();
/// Throws Internal if there is none.
const Row& row(std::string_view id);

}  // namespace cohort::doctor
