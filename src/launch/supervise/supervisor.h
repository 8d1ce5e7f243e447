// `cohort run`: makes the plan, has an agent placed on every host, tells them what to start, shows the output, and ends
// the job as soon as anything in it has failed. It owns the job's store and its lock on MASTER_PORT. It touches workers
// only through their agents. JobSetup is what a job consists of besides its spec: it looks at this process and its
// files, and starts nothing. One thread.
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

/// Exit statuses that are not a rank's.
inline constexpr int kTimeoutStatus = 124;
inline constexpr int kCannotStartStatus = 127;

struct JobResult {
  int status = 1;
  std::string traced = {};  ///< the run's folder, where it has pieces of a trace (--trace)
};

/// Runs the job to its end. Returns the exit status as a shell gives it: 0; the first failing rank's code, or 128 +
/// signal; kRequeueStatus once all have ended with it; 124 after `timeout`; 127 if the program could not be started;
/// 128 + signal if this process was told to end. Throws cohort::Error where nothing was started. Blocks signals and
/// adopts orphans for this process: call it from a process that does nothing else, before it has a second thread.
JobResult run_job(const JobSpec& spec, Plan plan);

/// The part of a job that `plan.node` is: of rank 0 the job, once the others can find it; else this node's ranks, to
/// the job's end, whose exit status it returns. Likewise for the rest.
JobResult run_node(const JobSpec& spec, Plan plan);

/// Everything a job consists of: plan, programs, environment, limits; and the orders that agents get.
struct JobSetup {
  const JobSpec& spec;
  Plan plan = {};
  Program program = {};
  std::vector<RoleProgram> programs = {};  ///< of roles that run something else
  Environment environment = {};            ///< of the workers, without what differs between ranks
  std::vector<int> ignored = {};           ///< signals that our caller has us ignore
  std::vector<std::string> chosen = {};    ///< names of variables that go along to every host, whatever they are
  std::uint64_t open_files = 0;            ///< the limit that workers get: that before it was raised for ourselves
};

/// Raises this process's limit of open files. Throws cohort::Error on options that cannot be met. `spec` outlives it.
JobSetup set_up_job(const JobSpec& spec, Plan plan);

/// Those of --ranks; empty: all. Throws cohort::Error where it names one that there is not.
std::vector<int> shown_ranks(const JobSpec& spec, const Plan& plan);

/// The executable of a process, by its number in the plan's Roles; of -1 the ranks'.
const std::string& program_of(const JobSetup& setup, int process);
/// The order that tells the agent of `host` what to start.
StartJob order_for(const JobSetup& setup, const PlannedHost& host, const JobFacts& facts);

/// Makes `path` absolute, from the current folder.
std::string absolute_path(const std::string& path);

/// Describes what `cohort run` would start: the plan as a table, the exact command, and what each rank's environment
/// has beyond the command's own. Starts nothing. Whole lines. Throws cohort::Error on options that cannot be met, as
/// `run_job` does.
std::string describe_job(const JobSpec& spec, Plan plan);

}  // namespace cohort::launch
