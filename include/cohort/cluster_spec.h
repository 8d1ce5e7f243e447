// A cluster as TensorFlow describes it: jobs ("chief", "worker", "ps", "evaluator"), their tasks by index, and where
// each of them listens. A value: read from TF_CONFIG, written into it, or made by the program. Starts and connects
// nothing.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

class ClusterSpec {
 public:
  using Tasks = std::map<int, std::string>;  ///< "HOST:PORT" by index; there may be gaps

  /// Makes a cluster without jobs.
  ClusterSpec() = default;
  /// Makes a cluster from lists of addresses: {{"worker", {"a:2222", "b:2222"}}, {"ps", {"c:2222"}}}. Throws
  /// InvalidArgument, naming job and index, for an address that is no HOST:PORT; so does the next constructor, also for
  /// an index below 0.
  explicit ClusterSpec(const std::map<std::string, std::vector<std::string>>& jobs);
  explicit ClusterSpec(std::map<std::string, Tasks> jobs);
  /// Reads the cluster from the value of TF_CONFIG. Throws InvalidArgument, naming the wrong key. "" and "{}" have no
  /// jobs.
  static ClusterSpec from_tf_config(std::string_view text);

  /// Returns the value of TF_CONFIG for one task. Throws InvalidArgument if the task is not in the cluster (an
  /// evaluator need not be).
  std::string to_tf_config(std::string_view task_type, int task_index) const;

  /// Names of the jobs, in alphabetical order.
  std::vector<std::string> jobs() const;
  bool empty() const noexcept { return jobs_.empty(); }

  // Each throws InvalidArgument for a job that does not exist, naming the existing ones.
  int num_tasks(std::string_view job) const;
  std::vector<int> task_indices(std::string_view job) const;
  /// Also throws InvalidArgument for an index that does not exist.
  const std::string& task_address(std::string_view job, int task_index) const;
  const Tasks& job_tasks(std::string_view job) const;

  /// Tasks by job.
  const std::map<std::string, Tasks>& as_dict() const noexcept { return jobs_; }

  friend bool operator==(const ClusterSpec&, const ClusterSpec&) = default;

 private:
  std::map<std::string, Tasks> jobs_;
};

}  // namespace cohort
