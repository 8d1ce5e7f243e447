// What a job consists of, from the options of who starts it: plan, program, environment, limits; and the orders that
// agents get. Looks at this process and its files, starts nothing. One thread.
#pragma once

#include "launch/processes.h"
#include "launch/messages.h"
#include "launch/plan/plan.h"
#include "launch/plan/program.h"
#include "launch/plan/rank_environment.h"
#include "launch/supervise/run_options.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::launch {

struct JobSetup {
  Plan plan;
  Program program;
  std::vector<RoleProgram> programs = {};  ///< of roles that run something else
  Environment environment;                 ///< of the workers, without what differs between ranks
  Binding bind = Binding::None;
  bool as_horovod = false;
  bool trace = false;
  bool servers_again = false;            ///< one that fails may be started again
  std::vector<int> ignored = {};         ///< signals that our caller has us ignore
  std::vector<std::string> chosen = {};  ///< names of variables that go along to every host, whatever they are
  std::uint64_t open_files = 0;          ///< the limit that workers get: what it was before it was raised for ourselves
};

/// Throws InvalidArgument where the hosts do not have so many places.
Plan plan_of(const RunOptions& options);
/// Raises this process's limit of open files. Throws cohort::Error on options that cannot be met.
JobSetup set_up_job(const RunOptions& options);

/// Those of --ranks; empty: all. Throws cohort::Error where it names one that there is not.
std::vector<int> shown_ranks(const RunOptions& options, const Plan& plan);

/// There are hosts other than this one.
bool goes_elsewhere(const Plan& plan);
/// The executable of a process, by its number in the plan's Roles; of -1 the ranks'.
const std::string& program_of(const JobSetup& setup, int process);
/// What the agent of `host` is to start.
StartJob order_for(const JobSetup& setup, const PlannedHost& host, const JobFacts& facts);

/// Where `path` leads from the current folder.
std::string absolute_path(const std::string& path);

std::string random_hex(std::size_t bytes);

}  // namespace cohort::launch
