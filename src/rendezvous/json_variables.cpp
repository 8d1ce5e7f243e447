#include "rendezvous/json_variables.h"

#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/parse.h"
#include "base/result.h"
#include "rendezvous/host_list.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace cohort::rendezvous {
namespace {

// Strict reading of launchers' JSON: each error names the variable, the position and the wrong value. Used only within
// this folder. Pure; any thread.

using nlohmann::json;

constexpr std::size_t kLongestText = std::size_t{4} << 20;
constexpr int kLargestIndex = 1000000;

/// Throws "WHAT: WHERE: WHY -- ADVICE".
[[noreturn]] void json_error(std::string_view what, std::string_view where, std::string_view why) {
  raise(ErrorCode::InvalidArgument, "{}: {}{}{} -- correct or unset it", what, where, where.empty() ? "" : ": ", why);
}

/// Parses the whole text as one value. `what` names it in messages.
json parse_json(std::string_view text, std::string_view what) {
  if (text.size() > kLongestText) json_error(what, "", "a text of more than 4 MiB");
  auto value = cohort::parse_json(text);
  if (!value) json_error(what, "", value.error().what());
  return *std::move(value);
}

/// Returns the string under the key; nullopt if there is none.
std::optional<std::string> json_string(const json& object, std::string_view key, std::string_view what) {
  const auto found = object.find(key);
  if (found == object.end()) return std::nullopt;
  if (!found->is_string()) json_error(what, key, "no text");
  return found->get<std::string>();
}

/// Returns a list of non-empty strings.
std::vector<std::string> json_strings(const json& list, std::string_view where, std::string_view what) {
  if (!list.is_array()) json_error(what, where, "no list");
  std::vector<std::string> texts;
  texts.reserve(list.size());
  for (const json& item : list) {
    if (!item.is_string() || item.get_ref<const std::string&>().empty())
      json_error(what, where, fmt::format("item {} is no text", texts.size()));
    texts.push_back(item.get<std::string>());
  }
  return texts;
}

/// Returns a number from 0 to a million, given as a number or as text.
std::optional<int> json_index(const json& value) {
  std::optional<int> index;
  if (value.is_string()) {
    index = parse_integer<int>(value.get_ref<const std::string&>());
  } else if (value.is_number_unsigned()) {
    const auto number = value.get<std::uint64_t>();
    if (number <= kLargestIndex) index = static_cast<int>(number);
  }
  return index && *index >= 0 && *index <= kLargestIndex ? index : std::nullopt;
}

constexpr std::string_view kTfConfig = "TF_CONFIG";
constexpr std::string_view kChief = "chief";
constexpr std::string_view kMaster = "master";  // the chief of TensorFlow before 1.4
constexpr std::string_view kWorker = "worker";
constexpr std::string_view kServer = "ps";
constexpr std::string_view kEvaluator = "evaluator";

[[noreturn]] void bad(std::string_view where, std::string_view why) { json_error(kTfConfig, where, why); }

void add_task(TfJob& job, int index, const json& address, const std::string& where) {
  if (!address.is_string()) bad(where, "an address that is no text");
  auto parsed = net::parse_address(address.get_ref<const std::string&>());
  if (!parsed) bad(where, parsed.error().what());
  if (!job.tasks.emplace(index, *std::move(parsed)).second) bad(where, "an index for the second time");
}

TfJob read_job(const json& value, const std::string& where) {
  TfJob job;
  if (value.is_array()) {
    for (std::size_t i = 0; i < value.size(); ++i) {
      add_task(job, static_cast<int>(i), value[i], where);
    }
    return job;
  }
  if (!value.is_object()) bad(where, "neither a list of addresses nor an object from index to address");
  job.listed = false;
  for (const auto& [key, address] : value.items()) {
    const auto index = json_index(json(key));
    if (!index) bad(where, fmt::format("'{}' is no index", key.substr(0, 40)));
    add_task(job, *index, address, where);
  }
  return job;
}

std::size_t tasks_of(const TfConfig& config, std::string_view type) {
  const auto found = config.cluster.find(std::string(type));
  return found == config.cluster.end() ? 0 : found->second.tasks.size();
}

void read_task(const json& task, TfConfig& config) {
  if (!task.is_object()) bad("task", "no object");
  auto type = json_string(task, "type", kTfConfig);
  if (!type) bad("task", "there is no type");
  constexpr std::array kTypes = {kChief, kMaster, kWorker, kServer, kEvaluator};
  if (std::find(kTypes.begin(), kTypes.end(), *type) == kTypes.end())
    bad("task", fmt::format("the type '{}' is none of chief, worker, ps, evaluator, master", type->substr(0, 40)));
  config.task_type = *type;
  const auto index = task.find("index");
  if (index == task.end()) bad("task", "there is no index");
  const auto value = json_index(*index);
  if (!value) bad("task", "the index is no number from 0");
  config.task_index = *value;
}

void check(const TfConfig& config) {
  for (const std::string_view one : {kChief, kMaster, kEvaluator}) {
    if (tasks_of(config, one) > 1) bad("cluster", fmt::format("there is more than one {}", one));
  }
  if (tasks_of(config, kChief) > 0 && tasks_of(config, kMaster) > 0)
    bad("cluster", "there are a chief and a master, which are the same role");
  if (config.cluster.empty()) {
    if (config.task_index != 0) bad("task", "the index is not 0, and there is no cluster");
    return;
  }
  if (config.task_type.empty()) bad("", "there is a cluster and no task: which of its tasks is this process?");
  if (config.task_type == kEvaluator) {
    if (tasks_of(config, kMaster) > 0) bad("task", "an evaluator, which a cluster with a master cannot have");
    if (tasks_of(config, kEvaluator) == 0) return;  // an evaluator need not be in the cluster
  }
  const auto job = config.cluster.find(config.task_type);
  if (job == config.cluster.end()) bad("task", fmt::format("the type '{}' is not in the cluster", config.task_type));
  if (!job->second.tasks.contains(config.task_index))
    bad("task", fmt::format("{} {} is not in the cluster, which names {} of them", config.task_type, config.task_index,
                            job->second.tasks.size()));
}

}  // namespace

Result<TfConfig> parse_tf_config(std::string_view text) {
  return result_of([&] {
    const auto root = parse_json(text, kTfConfig);
    if (!root.is_object()) bad("", "no object");
    TfConfig config;
    // The operator's dynamic workers know only themselves and the servers ("sparseCluster").
    const bool sparse = !root.contains("cluster") && root.contains("sparseCluster");
    if (const auto cluster = root.find(sparse ? "sparseCluster" : "cluster"); cluster != root.end()) {
      if (!cluster->is_object()) bad("cluster", "no object from task type to addresses");
      for (const auto& [type, job] : cluster->items()) {
        auto read = read_job(job, fmt::format("cluster, {}", type.substr(0, 40)));
        if (sparse) read.listed = false;
        if (!read.tasks.empty()) config.cluster.emplace(type, std::move(read));
      }
    }
    if (const auto task = root.find("task"); task != root.end() && !(task->is_object() && task->empty())) {
      read_task(*task, config);
    }
    config.rpc_layer = json_string(root, "rpc_layer", kTfConfig).value_or("");
    check(config);
    return config;
  });
}

Result<TfPlace> tf_place(const TfConfig& config) {
  return result_of([&]() -> TfPlace {
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
      // A single worker entry may be this task's own, since the operator's dynamic workers know no others.
      const bool complete = static_cast<std::size_t>(last) + 1 == job.tasks.size() &&
                            (job.listed || type != kWorker || job.tasks.size() > 1);
      if (!complete && !evaluator && !server) {
        bad(fmt::format("cluster, {}", type),
            "an object that names only some of the tasks, so that nobody knows how many ranks there are");
      }
      if (type == config.task_type) place.rank = static_cast<int>(place.ranks.size()) + config.task_index;
      for (const auto& [index, address] : job.tasks) place.ranks.push_back(address);
    }
    if (evaluator || server) return place;
    place.size = static_cast<int>(place.ranks.size());
    place.role = place.size > 1 ? TfPlace::Role::Rank : TfPlace::Role::Single;
    return place;
  });
}

namespace {

constexpr std::string_view kConfig = "resourceconfig.json";
constexpr std::uint64_t kLargestConfig = std::uint64_t{1} << 20;

void check_hosts(const SageMakerHosts& all, std::string_view what) {
  if (all.hosts.empty()) json_error(what, "hosts", "there is none");
  std::set<std::string_view> known;
  for (const std::string& host : all.hosts) {
    if (const std::string_view fault = fault_of_host(host); !fault.empty()) json_error(what, "hosts", fault);
    if (!known.insert(host).second) json_error(what, "hosts", fmt::format("'{}' is there twice", host));
  }
  if (!known.contains(all.current))
    json_error(what, "hosts", fmt::format("the current host '{}' is not among them", all.current.substr(0, 60)));
  for (const SageMakerGroup& group : all.groups) {
    for (const std::string& host : group.hosts) {
      if (!known.contains(host)) {
        json_error(what, "instance_groups",
                   fmt::format("'{}' of group '{}' is not among the hosts", host.substr(0, 60), group.name));
      }
    }
  }
}

SageMakerGroup read_group(const json& value) {
  constexpr std::string_view kWhere = "instance_groups";
  if (!value.is_object()) json_error(kConfig, kWhere, "an item that is no object");
  SageMakerGroup group;
  auto name = json_string(value, "instance_group_name", kConfig);
  if (!name) json_error(kConfig, kWhere, "a group without instance_group_name");
  group.name = *name;
  group.instance_type = json_string(value, "instance_type", kConfig).value_or("");
  const auto hosts = value.find("hosts");
  if (hosts == value.end()) json_error(kConfig, kWhere, fmt::format("group '{}' has no hosts", group.name));
  group.hosts = json_strings(*hosts, kWhere, kConfig);
  return group;
}

}  // namespace

Result<SageMakerHosts> parse_resource_config(std::string_view text) {
  return result_of([&] {
    const auto root = parse_json(text, kConfig);
    if (!root.is_object()) json_error(kConfig, "", "no object");
    SageMakerHosts all;
    for (const auto& [key, target, required] : {std::tuple("current_host", &all.current, true),
                                                std::tuple("network_interface_name", &all.network_interface, false)}) {
      auto value = json_string(root, key, kConfig);
      if (!value && required) json_error(kConfig, key, "it is missing");
      *target = value.value_or("");
    }
    const auto hosts = root.find("hosts");
    if (hosts == root.end()) json_error(kConfig, "hosts", "it is missing");
    all.hosts = json_strings(*hosts, "hosts", kConfig);
    if (const auto groups = root.find("instance_groups"); groups != root.end() && !groups->is_null()) {
      if (!groups->is_array()) json_error(kConfig, "instance_groups", "no list");
      for (const json& value : *groups) all.groups.push_back(read_group(value));
    }
    check_hosts(all, kConfig);
    return all;
  });
}

Result<SageMakerHosts> parse_sagemaker_hosts(std::string_view hosts, std::string_view current) {
  return result_of([&] {
    constexpr std::string_view kWhat = "SM_HOSTS";
    SageMakerHosts all;
    all.current = current;
    all.hosts = json_strings(parse_json(hosts, kWhat), "", kWhat);
    check_hosts(all, kWhat);
    return all;
  });
}

Result<std::vector<std::string>> training_hosts(const SageMakerHosts& all, std::string_view groups) {
  return result_of([&]() -> std::vector<std::string> {
    constexpr std::string_view kWhat = "SM_DISTRIBUTION_INSTANCE_GROUPS";
    if (groups.empty()) return all.hosts;
    const auto names = json_strings(parse_json(groups, kWhat), "", kWhat);
    if (names.empty()) return all.hosts;
    std::set<std::string_view> training;
    for (const std::string& name : names) {
      const auto group = std::find_if(all.groups.begin(), all.groups.end(),
                                      [&](const SageMakerGroup& candidate) { return candidate.name == name; });
      if (group == all.groups.end())
        json_error(kWhat, "", fmt::format("there is no instance group '{}'", name.substr(0, 60)));
      training.insert(group->hosts.begin(), group->hosts.end());
    }
    std::vector<std::string> hosts;
    std::copy_if(all.hosts.begin(), all.hosts.end(), std::back_inserter(hosts),
                 [&](const std::string& host) { return training.contains(host); });
    return hosts;
  });
}

void add_resource_config(Environment& environment, const std::string& path) {
  if (!environment.contains("TRAINING_JOB_NAME") || environment.contains("SM_CURRENT_HOST")) return;
  if (environment.contains("SM_HOSTS") || environment.contains("SM_RESOURCE_CONFIG")) return;
  const auto file = sys::read_file(path, {.max_bytes = kLargestConfig});
  if (!file) {
    log::debug("cluster", "no hosts of SageMaker: {}", file.error().what());
    return;
  }
  const auto all = parse_resource_config(file->text());
  environment.emplace("SM_CURRENT_HOST", all ? all->current : "unknown");
  environment.emplace("SM_RESOURCE_CONFIG", file->text());
}

}  // namespace cohort::rendezvous
