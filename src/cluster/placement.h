// Who this process is within its world. Plain data.
#pragma once

#include <string>

namespace cohort::cluster {

struct Placement {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  int cross_rank = 0;  ///< number of this host among the hosts
  int cross_size = 1;
  std::string host;    ///< name for messages
  std::string source;  ///< who said so, e.g. "RANK, WORLD_SIZE set by cohort run"
};

}  // namespace cohort::cluster
