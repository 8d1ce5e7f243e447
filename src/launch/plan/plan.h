// The plan of a job: which rank runs where. Pure functions over plain data; nothing here starts anything or asks the
// system, so that a plan can be made, printed and tested anywhere.
#pragma once

#include "base/result.h"

#include <string>
#include <vector>

namespace cohort::launch {

/// A host that may run workers.
struct HostSlots {
  std::string name;   ///< for messages
  int slots = 1;      ///< how many workers it takes
  bool local = true;  ///< it is the one that this process is on
  /// Several with the same one are parts of one host, each with an agent of its own, and stand beside each other;
  /// empty: it is a host by itself.
  std::string machine = {};
  std::vector<std::string> devices = {};  ///< GPUs that it brings along, as CUDA_VISIBLE_DEVICES names them
};

struct PlannedHost {
  std::string name;
  int index = 0;       ///< of its agent
  int first_rank = 0;  ///< its ranks are consecutive
  int ranks = 0;
  bool local = true;
  // Of the host that it is, or is a part of.
  int machine = 0;                        ///< GROUP_RANK
  int first_local = 0;                    ///< LOCAL_RANK of its first rank
  int local_ranks = 0;                    ///< LOCAL_WORLD_SIZE
  std::vector<std::string> devices = {};  ///< of all its parts; empty: nobody said
};

struct Plan {
  int world_size = 0;
  int machines = 0;
  std::vector<PlannedHost> hosts;  ///< only those that run something
};

/// More than anyone has meant so far; catches a mistyped number.
inline constexpr int kMostProcesses = 65536;

/// Fills the hosts in order, each up to its slots. Errors (InvalidArgument): no process asked for, too many for the
/// slots (the message says how many there are), a host named twice.
Result<Plan> make_plan(const std::vector<HostSlots>& hosts, int processes);

/// "4 processes on 1 host (vm: ranks 0-3)".
std::string to_string(const Plan& plan);

}  // namespace cohort::launch
