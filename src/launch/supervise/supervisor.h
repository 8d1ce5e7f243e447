// `cohort run`: makes the plan, has an agent placed on every host, tells the agents what to start, shows the output,
// and ends the job as soon as anything in it has failed. The supervisor owns the job's store and its lock on
// MASTER_PORT, and touches workers only through their agents. JobSetup has everything of a job that its spec does not
// have. To make it, this process's environment and files are read, but nothing is started. One thread.
#pragma once

#include "launch/messages.h"
#include "launch/plan/job_spec.h"
#include "launch/plan/plan.h"
#include "launch/plan/program.h"
#include "launch/plan/rank_environment.h"
#include "launch/processes.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::launch {

/// Exit statuses that do not come from a rank.
inline constexpr int kTimeoutStatus = 124;
inline constexpr int kCannotStartStatus = 127;

struct JobResult {
  int status = 1;
  std::string traced = {};  ///< the run's folder, if it has pieces of a trace (--trace)
};

/// Runs the job to its end. Returns the exit status as a shell gives it: 0 if all ranks succeeded; the first failing
/// rank's code, or 128 + signal; kRequeueStatus if all have ended with it; 124 after `timeout`; 127 if the program
/// could not be started; 128 and the signal's number if a signal has told this process to end. Throws cohort::Error if
/// nothing was started. Blocks signals and adopts orphans for this process: call it from a process that does nothing
/// else, before it has a second thread.
JobResult run_job(const JobSpec& spec, Plan plan);

/// Runs this node's part of a job, `plan.node`. Rank 0 runs the job as soon as the other launchers can find it. Any
/// other launcher runs its node's ranks until the job ends, and returns the job's exit status. Otherwise like run_job.
JobResult run_node(const JobSpec& spec, Plan plan);

/// Everything that a job consists of: plan, programs, environment, limits; agents' orders are made from it.
struct JobSetup {
  const JobSpec& spec;
  Plan plan = {};
  Program program = {};
  std::vector<RoleProgram> programs = {};  ///< programs of roles that do not run the ranks' program
  Environment environment = {};          ///< the workers' environment, without the variables that differ between ranks
  std::vector<int> ignored = {};         ///< signals that this process ignores because its caller does
  std::vector<std::string> chosen = {};  ///< variables that are sent to every host, even those of one host or login
  std::uint64_t open_files = 0;          ///< the workers' limit, which this process had before it raised its own
};

/// Makes a JobSetup (`spec` has to outlive it), and raises this process's limit of open files. Throws cohort::Error on
/// options that cannot be met.
JobSetup set_up_job(const JobSpec& spec, Plan plan);

/// Returns the ranks of --ranks; empty: all. Throws cohort::Error if it names a rank that does not exist.
std::vector<int> shown_ranks(const JobSpec& spec, const Plan& plan);

/// Returns the executable of a process, by its number in the plan's Roles; for -1 the ranks' executable.
const std::string& program_of(const JobSetup& setup, int process);
/// Returns the order that tells the agent of `host` what to start.
StartJob order_for(const JobSetup& setup, const PlannedHost& host, const JobFacts& facts);

/// Makes `path` absolute, from the current folder.
std::string absolute_path(const std::string& path);

/// Describes in whole lines what `cohort run` would start: the plan as a table, the exact command, and the variables
/// that each rank has beyond this command's environment. Starts nothing. Throws cohort::Error on options that cannot be
/// met, as `run_job` does.
std::string describe_job(const JobSpec& spec, Plan plan);

}  // namespace cohort::launch
