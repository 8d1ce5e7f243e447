// The complete output of processes on other hosts, in files here as their agents would write them: what the supervisor
// gets from an agent is kept before it is shown. A file that cannot be written is told once and the job goes on. One
// thread.
#pragma once

#include "base/result.h"
#include "launch/messages.h"
#include "launch/roles.h"
#include "sys/unique_fd.h"

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {

/// "rank-3.err", "server-0.out", "evaluator.out".
std::string log_name(Role role, int number, Stream stream);

class RemoteLogs {
 public:
  /// `folder` is made when the first line comes.
  RemoteLogs(std::string folder, const Roles& roles, std::function<void(std::string)> on_trouble);
  /// Files of those that print nothing are there, too.
  void open(const std::vector<int>& processes);
  void keep(const Output& output);

 private:
  sys::UniqueFd& file(int process, Stream stream);
  Result<sys::UniqueFd> make(int process, Stream stream) const;
  std::string name_of(int process, Stream stream) const;

  std::string folder_;
  Roles roles_;
  std::function<void(std::string)> on_trouble_;
  std::map<std::pair<int, Stream>, sys::UniqueFd> files_;  ///< invalid: given up
};

}  // namespace cohort::launch
