#include "cohort/job_state.h"

#include "base/parse.h"
#include "launch/supervise/supervisor.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>

namespace cohort::app {
namespace {

constexpr int kCancelled = 128 + SIGTERM;  ///< whatever the exit status of the script

/// Returns the word after `name`, up to a blank: "JobState=RUNNING Reason=...".
std::string word_behind(const std::string& text, std::string_view name) {
  const auto at = text.find(name);
  if (at == std::string::npos) return {};
  const auto begin = at + name.size();
  return text.substr(begin, text.find_first_of(" \t\n|", begin) - begin);
}

/// Clamps a status to a shell's range, so that a nonzero status never becomes 0.
int shell_status(std::int64_t status) { return static_cast<int>(std::clamp<std::int64_t>(status, 0, 255)); }

/// Translates one of Slurm's states, with its "CODE:SIGNAL".
JobState slurm_state(const std::string& word, const std::string& exit_code) {
  constexpr std::array<std::string_view, 10> kOver = {"COMPLETED", "FAILED",    "CANCELLED",     "TIMEOUT",
                                                      "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
                                                      "DEADLINE",  "REVOKED"};
  JobState found{word, std::ranges::find(kOver, word) != kOver.end(), {}};
  if (!found.over) return found;
  const auto colon = std::min(exit_code.find(':'), exit_code.size());
  const int code = parse_integer<int>(exit_code.substr(0, colon)).value_or(1);
  const int signal = colon < exit_code.size() ? parse_integer<int>(exit_code.substr(colon + 1)).value_or(0) : 0;
  found.status = shell_status(code != 0 ? code : signal != 0 ? std::int64_t{128} + signal : 0);
  if (word == "TIMEOUT") found.status = launch::kTimeoutStatus;
  if (word == "CANCELLED") found.status = kCancelled;
  if (found.status == 0 && word != "COMPLETED") found.status = 1;
  return found;
}

}  // namespace

JobState state_by_scontrol(const std::string& text) {
  JobState state = slurm_state(word_behind(text, "JobState="), word_behind(text, " ExitCode="));
  if (state.word == "PENDING") state.word += " (" + word_behind(text, " Reason=") + ")";
  return state;
}

std::optional<JobState> state_by_sacct(const std::string& text) {
  const auto bar = text.find('|');
  if (bar == std::string::npos) return std::nullopt;
  // "CANCELLED by 0|0:15"
  return slurm_state(text.substr(0, text.find_first_of(" |")), text.substr(bar + 1, text.find('\n', bar) - bar - 1));
}

}  // namespace cohort::app
