// A job that this command starts for itself: `cohort run` as a child, whose events are read until it ends. For the main
// thread; the child and all processes that it has started end with this process.
#pragma once

#include "base/result.h"
#include "launch/step_costs.h"

#include <nlohmann/json_fwd.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::app {

using launch::RankTimes;

/// Reads an object with `rank`, `host` and `times`: the event `rank_ended`, or an element of `trained` in a job.json.
/// Missing values are 0.
RankTimes times_in(const nlohmann::json& object);

/// Costs of a run's steps, from its record.
struct RunCosts {
  launch::StepCosts costs;
  std::vector<std::string> hosts;
};
/// `folder`: the run's folder. Fails with InvalidArgument if its record lacks the costs.
Result<RunCosts> costs_of_run(const std::string& folder);
/// Reads the text of a job.json; errors name it by `path`.
Result<RunCosts> costs_of_record(const std::string& text, const std::string& path);

/// Result of a job, from its events.
struct JobOutcome {
  int exit_status = -1;  ///< -1: no end was reported
  double seconds = 0;
  std::vector<RankTimes> ranks;
  std::string failure;  ///< reason, in words
};

/// Lines come from our own command but contain text from programs, so no member is assumed to exist.
class JobReader {
 public:
  /// `on_output` gets the ranks' stdout, line by line; with it, their stderr goes to stderr.
  explicit JobReader(std::function<void(const std::string&)> on_output = {}) : on_output_(std::move(on_output)) {}
  void take(const std::string& line);
  JobOutcome finish() &&;

 private:
  std::function<void(const std::string&)> on_output_;
  JobOutcome outcome_;
  std::vector<std::string> last_lines_;
  std::string notice_;
};

struct JobRequest {
  std::vector<std::string> options;  ///< options of `cohort run`, such as hosts; variables (COHORT_RUN_...) are ignored
  std::vector<std::string> program;  ///< the program with its arguments
  int processes = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  std::function<void(const std::string& line)> on_output = {};  ///< see JobReader
};

/// Runs the job. Throws Unavailable if the job cannot be started, fails or does not end, and Timeout if its time limit
/// has passed. Errors contain the job's output.
JobOutcome run_job(const JobRequest& request);

}  // namespace cohort::app
