#include "base/result.h"
#include "net/address.h"
#include "rendezvous/detect.h"
#include "rendezvous/json_variables.h"

#include <cohort/cluster_spec.h>
#include <cohort/role.h>

#include <nlohmann/json.hpp>

#include <utility>

namespace cohort {
namespace {

std::map<std::string, ClusterSpec::Tasks> numbered(const std::map<std::string, std::vector<std::string>>& jobs) {
  std::map<std::string, ClusterSpec::Tasks> out;
  for (const auto& [job, addresses] : jobs) {
    ClusterSpec::Tasks& tasks = out[job];
    for (const std::string& address : addresses) tasks.emplace(static_cast<int>(tasks.size()), address);
  }
  return out;
}

/// True if the indices are 0, 1, 2, ... without gaps.
bool is_dense(const ClusterSpec::Tasks& tasks) {
  return tasks.empty() || (tasks.begin()->first == 0 && tasks.rbegin()->first + 1 == static_cast<int>(tasks.size()));
}

}  // namespace

ClusterSpec::ClusterSpec(const std::map<std::string, std::vector<std::string>>& jobs) : ClusterSpec(numbered(jobs)) {}

ClusterSpec::ClusterSpec(std::map<std::string, Tasks> jobs) : jobs_(std::move(jobs)) {
  for (const auto& [job, tasks] : jobs_) {
    for (const auto& [index, address] : tasks) {
      if (index < 0) raise(ErrorCode::InvalidArgument, "ClusterSpec: {} {}: indices count from 0", job, index);
      if (const auto parsed = net::parse_address(address); !parsed)
        raise(ErrorCode::InvalidArgument, "ClusterSpec: {} {}: {}", job, index, parsed.error().what());
    }
  }
}

ClusterSpec ClusterSpec::from_tf_config(std::string_view text) {
  ClusterSpec spec;
  if (text.empty()) return spec;
  const auto config = value_or_throw(rendezvous::parse_tf_config(text));
  for (const auto& [job, tasks] : config.cluster) {
    for (const auto& [index, address] : tasks.tasks) spec.jobs_[job].emplace(index, net::to_string(address));
  }
  return spec;
}

std::string ClusterSpec::to_tf_config(std::string_view task_type, int task_index) const {
  const bool outside = task_type == "evaluator" && !jobs_.contains(std::string(task_type));
  if (!outside) (void)task_address(task_type, task_index);
  nlohmann::ordered_json cluster = nlohmann::ordered_json::object();
  for (const auto& [job, tasks] : jobs_) {
    nlohmann::ordered_json& out = cluster[job];
    const bool dense = is_dense(tasks);
    out = dense ? nlohmann::ordered_json::array() : nlohmann::ordered_json::object();
    for (const auto& [index, address] : tasks) {
      if (dense)
        out.push_back(address);
      else
        out[std::to_string(index)] = address;
    }
  }
  std::string text =
      nlohmann::ordered_json({{"cluster", std::move(cluster)}, {"task", {{"type", task_type}, {"index", task_index}}}})
          .dump();
  // Throws if the text is no valid TF_CONFIG, e.g. with two chiefs or an unknown type.
  (void)value_or_throw(rendezvous::parse_tf_config(text));
  return text;
}

std::vector<std::string> ClusterSpec::jobs() const {
  std::vector<std::string> names;
  for (const auto& [job, tasks] : jobs_) names.push_back(job);
  return names;
}

const ClusterSpec::Tasks& ClusterSpec::job_tasks(std::string_view job) const {
  const auto found = jobs_.find(std::string(job));
  if (found != jobs_.end()) return found->second;
  raise(ErrorCode::InvalidArgument, "ClusterSpec: there is no job '{}'; the jobs are: {}", job,
        fmt::join(jobs(), ", "));
}

int ClusterSpec::num_tasks(std::string_view job) const { return static_cast<int>(job_tasks(job).size()); }

std::vector<int> ClusterSpec::task_indices(std::string_view job) const {
  std::vector<int> indices;
  for (const auto& [index, address] : job_tasks(job)) indices.push_back(index);
  return indices;
}

const std::string& ClusterSpec::task_address(std::string_view job, int task_index) const {
  const Tasks& tasks = job_tasks(job);
  const auto found = tasks.find(task_index);
  if (found != tasks.end()) return found->second;
  raise(ErrorCode::InvalidArgument, "ClusterSpec: there is no task {} of job '{}', which has {}", task_index, job,
        tasks.size());
}

const char* to_string(Role role) noexcept {
  switch (role) {
    case Role::Worker: return "worker";
    case Role::Server: return "server";
    case Role::Evaluator: return "evaluator";
  }
  return "?";
}

namespace {
rendezvous::Detected here() { return value_or_throw(rendezvous::detect(rendezvous::current_environment())); }
}  // namespace

Role role() { return here().role; }

int role_number() {
  const rendezvous::Detected detected = here();
  if (!detected.number)
    raise(ErrorCode::Unavailable, "role_number: {} does not say which of them this process is", detected.source);
  return *detected.number;
}

int num_workers() { return here().workers; }

int num_servers() { return here().servers; }

}  // namespace cohort
