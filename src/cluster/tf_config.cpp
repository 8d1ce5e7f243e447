#include "cluster/tf_config.h"

#include "base/parse.h"
#include "cluster/json_text.h"

#include <algorithm>
#include <array>

namespace cohort::cluster {
namespace {

using nlohmann::json;

constexpr std::string_view kTfConfig = "TF_CONFIG";
constexpr std::string_view kChief = "chief";
constexpr std::string_view kMaster = "master";  // the chief of TensorFlow before 1.4
constexpr std::string_view kWorker = "worker";
constexpr std::string_view kServer = "ps";
constexpr std::string_view kEvaluator = "evaluator";

tl::unexpected<Error> bad(std::string_view where, std::string_view why) { return json_error(kTfConfig, where, why); }

Result<void> add_task(TfJob& job, int index, const json& address, const std::string& where) {
  if (!address.is_string()) return bad(where, "an address that is no text");
  auto parsed = net::parse_address(address.get_ref<const std::string&>());
  if (!parsed) return bad(where, parsed.error().what());
  if (!job.tasks.emplace(index, *std::move(parsed)).second) return bad(where, "an index for the second time");
  return {};
}

Result<TfJob> read_job(const json& value, const std::string& where) {
  TfJob job;
  if (value.is_array()) {
    for (std::size_t i = 0; i < value.size(); ++i) {
      if (auto added = add_task(job, static_cast<int>(i), value[i], where); !added)
        return tl::unexpected(added.error());
    }
    return job;
  }
  if (!value.is_object()) return bad(where, "neither a list of addresses nor an object from index to address");
  job.listed = false;
  for (const auto& [key, address] : value.items()) {
    const auto index = json_index(json(key));
    if (!index) return bad(where, fmt::format("'{}' is no index", key.substr(0, 40)));
    if (auto added = add_task(job, *index, address, where); !added) return tl::unexpected(added.error());
  }
  return job;
}

std::size_t tasks_of(const TfConfig& config, std::string_view type) {
  const auto found = config.cluster.find(std::string(type));
  return found == config.cluster.end() ? 0 : found->second.tasks.size();
}

Result<void> read_task(const json& task, TfConfig& config) {
  if (!task.is_object()) return bad("task", "no object");
  auto type = json_string(task, "type", kTfConfig);
  if (!type) return tl::unexpected(type.error());
  if (!*type) return bad("task", "there is no type");
  constexpr std::array kTypes = {kChief, kMaster, kWorker, kServer, kEvaluator};
  if (std::find(kTypes.begin(), kTypes.end(), **type) == kTypes.end())
    return bad("task",
               fmt::format("the type '{}' is none of chief, worker, ps, evaluator, master", (*type)->substr(0, 40)));
  config.task_type = **type;
  const auto index = task.find("index");
  if (index == task.end()) return bad("task", "there is no index");
  const auto value = json_index(*index);
  if (!value) return bad("task", "the index is no number from 0");
  config.task_index = *value;
  return {};
}

Result<void> check(const TfConfig& config) {
  for (const std::string_view one : {kChief, kMaster, kEvaluator}) {
    if (tasks_of(config, one) > 1) return bad("cluster", fmt::format("there is more than one {}", one));
  }
  if (tasks_of(config, kChief) > 0 && tasks_of(config, kMaster) > 0)
    return bad("cluster", "there are a chief and a master, which are the same role");
  if (config.cluster.empty()) {
    if (config.task_index != 0) return bad("task", "the index is not 0, and there is no cluster");
    return {};
  }
  if (config.task_type.empty()) return bad("", "there is a cluster and no task: which of its tasks is this process?");
  if (config.task_type == kEvaluator) {
    if (tasks_of(config, kMaster) > 0) return bad("task", "an evaluator, which a cluster with a master cannot have");
    if (tasks_of(config, kEvaluator) == 0) return {};  // it may stand outside of the cluster
  }
  const auto job = config.cluster.find(config.task_type);
  if (job == config.cluster.end())
    return bad("task", fmt::format("the type '{}' is not in the cluster", config.task_type));
  if (!job->second.tasks.contains(config.task_index))
    return bad("task", fmt::format("{} {} is not in the cluster, which names {} of them", config.task_type,
                                   config.task_index, job->second.tasks.size()));
  return {};
}

}  // namespace

Result<TfConfig> parse_tf_config(std::string_view text) {
  const auto root = parse_json(text, kTfConfig);
  if (!root) return tl::unexpected(root.error());
  if (!root->is_object()) return bad("", "no object");
  TfConfig config;
  // The operator's dynamic workers are told of themselves and the servers only.
  const bool sparse = !root->contains("cluster") && root->contains("sparseCluster");
  if (const auto cluster = root->find(sparse ? "sparseCluster" : "cluster"); cluster != root->end()) {
    if (!cluster->is_object()) return bad("cluster", "no object from task type to addresses");
    for (const auto& [type, job] : cluster->items()) {
      auto read = read_job(job, fmt::format("cluster, {}", type.substr(0, 40)));
      if (!read) return tl::unexpected(read.error());
      if (sparse) read->listed = false;
      if (!read->tasks.empty()) config.cluster.emplace(type, *std::move(read));
    }
  }
  if (const auto task = root->find("task"); task != root->end() && !(task->is_object() && task->empty())) {
    if (auto read = read_task(*task, config); !read) return tl::unexpected(read.error());
  }
  const auto rpc_layer = json_string(*root, "rpc_layer", kTfConfig);
  if (!rpc_layer) return tl::unexpected(rpc_layer.error());
  config.rpc_layer = rpc_layer->value_or("");
  if (auto checked = check(config); !checked) return tl::unexpected(checked.error());
  return config;
}

Result<TfPlace> tf_place(const TfConfig& config) {
  TfPlace place;
  const bool evaluator = config.task_type == kEvaluator;
  const bool server = config.task_type == kServer;
  if (evaluator) place.role = TfPlace::Role::Evaluator;
  if (server) place.role = TfPlace::Role::ParameterServer;
  if (config.cluster.empty()) return place;
  place.servers = static_cast<int>(tasks_of(config, kServer));
  for (const std::string_view type : {kChief, kMaster, kWorker}) {
    const auto found = config.cluster.find(std::string(type));
    if (found == config.cluster.end()) continue;
    const TfJob& job = found->second;
    const int last = job.tasks.rbegin()->first;
    // With one entry it may be the task's own only: the operator's dynamic workers know no other.
    const bool complete = static_cast<std::size_t>(last) + 1 == job.tasks.size() &&
                          (job.listed || type != kWorker || job.tasks.size() > 1);
    if (!complete && !evaluator && !server) {
      return bad(fmt::format("cluster, {}", type),
                 "an object that names only some of the tasks, so that nobody knows how many ranks there are");
    }
    if (type == config.task_type) place.rank = static_cast<int>(place.ranks.size()) + config.task_index;
    for (const auto& [index, address] : job.tasks) place.ranks.push_back(address);
  }
  if (evaluator || server) return place;
  place.size = static_cast<int>(place.ranks.size());
  place.role = place.size > 1 ? TfPlace::Role::Rank : TfPlace::Role::Single;
  return place;
}

}  // namespace cohort::cluster
