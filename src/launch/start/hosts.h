// The hosts that a job may use: those of the command line or of a file, else those of the Slurm allocation that this
// process is in, else this one; and the plan that follows. Reads the environment, this host's names, addresses, cores
// and GPUs, and the file.
#pragma once

#include "base/result.h"
#include "launch/plan/plan.h"
#include "launch/processes.h"

#include <string>
#include <vector>

namespace cohort::launch {

/// Returns the hosts that may run something, and how they are reached: a plan without processes. Throws Error
/// (InvalidArgument).
Plan choose_hosts(const JobSpec& spec, const Environment& environment);

/// Returns the hosts in the output of --host-discovery-script; an empty list is no error.
Result<std::vector<PlannedHost>> listed_hosts(const JobSpec& spec, StartMethod method, const std::string& list);

/// Decides what runs where, and how the other hosts are reached. Throws Error (InvalidArgument) if options contradict
/// each other or the environment, or if the hosts have too few slots.
Plan plan_of(const JobSpec& spec);

/// Returns the default number of processes on this host alone: the number of tasks that its Slurm allocation of one
/// node was asked for, else one for each core.
int default_processes(const Environment& environment);

/// Throws Error (InvalidArgument) if this number of ranks does not fit --min-np and --max-np.
void check_first_ranks(const JobSpec& spec, int ranks);

/// Parses a number of processes; 0 for "auto". Throws an Error that says what is valid.
int parse_processes(const std::string& text);

/// Compares by name alone; a short name and a full one with the same first part are the same host.
bool same_host(const std::string& a, const std::string& b);

/// Returns true for a name or an address of this host, also by /etc/hosts. Asks no name server.
bool is_this_host(const std::string& name);

}  // namespace cohort::launch
