// The processes of a job by role. Each has one number, by which supervisor and agents speak of it: the ranks of the
// world come first and keep theirs, the servers follow, then the evaluator. Pure.
#pragma once

#include <cohort/role.h>

#include <string>
#include <vector>

namespace cohort::launch {

struct Roles {
  int workers = 1;
  int servers = 0;
  bool evaluator = false;

  int others() const noexcept { return servers + (evaluator ? 1 : 0); }
  int all() const noexcept { return workers + others(); }
  bool has(int process) const noexcept { return process >= 0 && process < all(); }
  bool is_rank(int process) const noexcept { return process >= 0 && process < workers; }
  Role role_of(int process) const noexcept;
  /// Among those of its role.
  int number_of(int process) const noexcept;
  int process_of(Role role, int number) const noexcept;
  /// "rank 3", "server 2", "evaluator".
  std::string name_of(int process) const;
  /// "rank 1", "ranks 0-3, servers 1-2".
  std::string names_of(const std::vector<int>& processes) const;
};

/// "rank 3", "server 2", "evaluator".
std::string process_name(Role role, int number);
/// "rank-3", "server-2", "evaluator": what files of it are called.
std::string file_name(Role role, int number);

}  // namespace cohort::launch
