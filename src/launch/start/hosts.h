// The hosts that a job may use: those that the command line or a file names, else those of the Slurm allocation that
// this process is in, else this one. Makes the plan from them. Reads the environment, this host's names, addresses,
// cores and GPUs, and the file.
#pragma once

#include "base/result.h"
#include "launch/plan/plan.h"
#include "launch/processes.h"

#include <string>
#include <vector>

namespace cohort::launch {

/// Returns the hosts that may run something, and how they are reached, as a plan without processes. Throws Error
/// (InvalidArgument).
Plan choose_hosts(const JobSpec& spec, const Environment& environment);

/// Returns the hosts in the output of --host-discovery-script; an empty list is no error.
Result<std::vector<PlannedHost>> listed_hosts(const JobSpec& spec, StartMethod method, const std::string& list);

/// Decides what runs where, and how the other hosts are reached. Throws Error (InvalidArgument) if options contradict
/// each other or the environment, or if the hosts have too few slots.
Plan plan_of(const JobSpec& spec);

/// Returns the default number of processes on this host: the number of tasks requested from Slurm if its allocation is
/// only this node, else one for each core.
int default_processes(const Environment& environment);

/// Throws Error (InvalidArgument) if this number of ranks does not fit --min-np and --max-np.
void check_first_ranks(const JobSpec& spec, int ranks);

/// Parses a number of processes; 0 for "auto". Throws an Error that says what is valid.
int parse_processes(const std::string& text);

/// Compares only the names; a short name and a full one with the same first part are the same host.
bool same_host(const std::string& a, const std::string& b);

/// Returns true for a name or an address of this host, also by /etc/hosts. Asks no name server.
bool is_this_host(const std::string& name);

}  // namespace cohort::launch
