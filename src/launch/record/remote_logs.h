// The complete output of ranks on other hosts, in files here as their agents would write them: what the supervisor gets
// from an agent is kept before it is shown. A file that cannot be written is told once and the job goes on. One thread.
#pragma once

#include "base/result.h"
#include "launch/messages.h"
#include "sys/unique_fd.h"

#include <functional>
#include <map>
#include <string>
#include <utility>

namespace cohort::launch {

/// "rank-3.err".
std::string log_name(int rank, Stream stream);

class RemoteLogs {
 public:
  /// `folder` is made when the first line comes.
  RemoteLogs(std::string folder, std::function<void(std::string)> on_trouble);
  /// Files of ranks that print nothing are there, too.
  void open(int first_rank, int ranks);
  void keep(const Output& output);

 private:
  sys::UniqueFd& file(int rank, Stream stream);
  Result<sys::UniqueFd> make(int rank, Stream stream) const;

  std::string folder_;
  std::function<void(std::string)> on_trouble_;
  std::map<std::pair<int, Stream>, sys::UniqueFd> files_;  ///< invalid: given up
};

}  // namespace cohort::launch
