// Which hosts a job may use: those of the command line or of a file, else those of the Slurm allocation that this
// process is in, else this one; and the plan that follows. Looks at the environment, at this host's names, addresses,
// cores and GPUs, and reads the file.
#pragma once

#include "base/result.h"
#include "launch/plan/plan.h"
#include "launch/processes.h"

#include <string>
#include <vector>

namespace cohort::launch {

/// The hosts that may run something, and how they are reached: a plan with nobody in it yet. Throws Error
/// (InvalidArgument).
Plan choose_hosts(const JobSpec& spec, const Environment& environment);

/// Hosts that the output of --host-discovery-script names; none is no error.
Result<std::vector<PlannedHost>> listed_hosts(const JobSpec& spec, StartMethod method, const std::string& list);

/// Decides what runs where, and how the other hosts are reached. Throws Error (InvalidArgument) if options contradict
/// each other or the environment, or if the hosts have too few slots.
Plan plan_of(const JobSpec& spec);

/// Default number of processes on this host alone: the tasks that its Slurm allocation of one node was asked for, else
/// one for each core.
int default_processes(const Environment& environment);

/// So many do not fit --min-np and --max-np: throws Error (InvalidArgument).
void check_first_ranks(const JobSpec& spec, int ranks);

/// A number of processes, 0 for "auto". Throws what is wanted.
int parse_processes(const std::string& text);

/// By name alone; a short name and a full one with the same first part are the same host.
bool same_host(const std::string& a, const std::string& b);

/// It is a name or an address of this host, also by /etc/hosts. Nobody else is asked.
bool is_this_host(const std::string& name);

}  // namespace cohort::launch
