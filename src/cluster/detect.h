// Who a process is, as its launcher says in the environment. Pure functions over a map of variables; what launchers set
// is one table (detect.cpp), a row for each. To add a launcher, add a row.
#pragma once

#include "base/result.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::cluster {

using Environment = std::map<std::string, std::string, std::less<>>;

/// The variables of this process; empty ones are left out.
Environment current_environment();

/// How the ranks of a detected world meet.
enum class Meeting {
  None,      ///< a world of one
  JobStore,  ///< at COHORT_STORE, with the secret at COHORT_SECRET_FD
  Master,    ///< at MASTER_ADDR, MASTER_PORT (env://)
};

struct Detected {
  std::string launcher;  ///< "cohort run", "torchrun", "env://"; empty if there is none
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;
  std::optional<int> local_size;
  Meeting meeting = Meeting::None;
  bool alone = false;  ///< COHORT_ALONE=1
  std::string source;  ///< for messages: "RANK=1, WORLD_SIZE=4 (torchrun)"
};

/// The innermost launcher's word. Fails with InvalidArgument, naming the variables and both values, when they have no
/// meaning or disagree, and when a world of one would be formed although a launcher meant several.
Result<Detected> detect(const Environment& environment);

/// What one launcher says about the number of processes.
struct SizeClaim {
  std::string launcher;
  std::string variable;
  int size = 1;
};
/// All that say so, whether ranks can meet under them or not.
std::vector<SizeClaim> size_claims(const Environment& environment);

/// InvalidArgument if `size` is 1 although a launcher meant several. `source` says where the 1 comes from.
Result<void> refuse_unmeant_world_of_one(const Environment& environment, int size, const std::string& source);

}  // namespace cohort::cluster
