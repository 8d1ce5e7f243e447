#include "cluster/sagemaker.h"

#include "base/log.h"
#include "cluster/host_text.h"
#include "cluster/json_text.h"
#include "sys/files.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>

namespace cohort::cluster {
namespace {

using nlohmann::json;

constexpr std::string_view kConfig = "resourceconfig.json";
constexpr std::uint64_t kLargestConfig = std::uint64_t{1} << 20;

Result<void> check_hosts(const SageMakerHosts& all, std::string_view what) {
  if (all.hosts.empty()) return json_error(what, "hosts", "there is none");
  std::set<std::string_view> known;
  for (const std::string& host : all.hosts) {
    if (const std::string_view fault = fault_of_host(host); !fault.empty()) return json_error(what, "hosts", fault);
    if (!known.insert(host).second) return json_error(what, "hosts", fmt::format("'{}' is there twice", host));
  }
  if (!known.contains(all.current))
    return json_error(what, "hosts", fmt::format("the current host '{}' is not among them", all.current.substr(0, 60)));
  for (const SageMakerGroup& group : all.groups) {
    for (const std::string& host : group.hosts) {
      if (!known.contains(host)) {
        return json_error(what, "instance_groups",
                          fmt::format("'{}' of group '{}' is not among the hosts", host.substr(0, 60), group.name));
      }
    }
  }
  return {};
}

Result<SageMakerGroup> read_group(const json& value) {
  constexpr std::string_view kWhere = "instance_groups";
  if (!value.is_object()) return json_error(kConfig, kWhere, "an item that is no object");
  SageMakerGroup group;
  auto name = json_string(value, "instance_group_name", kConfig);
  if (!name) return tl::unexpected(name.error());
  if (!*name) return json_error(kConfig, kWhere, "a group without instance_group_name");
  group.name = **name;
  auto type = json_string(value, "instance_type", kConfig);
  if (!type) return tl::unexpected(type.error());
  group.instance_type = type->value_or("");
  const auto hosts = value.find("hosts");
  if (hosts == value.end()) return json_error(kConfig, kWhere, fmt::format("group '{}' has no hosts", group.name));
  auto names = json_strings(*hosts, kWhere, kConfig);
  if (!names) return tl::unexpected(names.error());
  group.hosts = *std::move(names);
  return group;
}

}  // namespace

Result<SageMakerHosts> parse_resource_config(std::string_view text) {
  const auto root = parse_json(text, kConfig);
  if (!root) return tl::unexpected(root.error());
  if (!root->is_object()) return json_error(kConfig, "", "no object");
  SageMakerHosts all;
  for (const auto& [key, target, required] : {std::tuple("current_host", &all.current, true),
                                              std::tuple("network_interface_name", &all.network_interface, false)}) {
    auto value = json_string(*root, key, kConfig);
    if (!value) return tl::unexpected(value.error());
    if (!*value && required) return json_error(kConfig, key, "it is missing");
    *target = value->value_or("");
  }
  const auto hosts = root->find("hosts");
  if (hosts == root->end()) return json_error(kConfig, "hosts", "it is missing");
  auto names = json_strings(*hosts, "hosts", kConfig);
  if (!names) return tl::unexpected(names.error());
  all.hosts = *std::move(names);
  if (const auto groups = root->find("instance_groups"); groups != root->end() && !groups->is_null()) {
    if (!groups->is_array()) return json_error(kConfig, "instance_groups", "no list");
    for (const json& value : *groups) {
      auto group = read_group(value);
      if (!group) return tl::unexpected(group.error());
      all.groups.push_back(*std::move(group));
    }
  }
  if (auto checked = check_hosts(all, kConfig); !checked) return tl::unexpected(checked.error());
  return all;
}

Result<SageMakerHosts> parse_sagemaker_hosts(std::string_view hosts, std::string_view current) {
  constexpr std::string_view kWhat = "SM_HOSTS";
  const auto list = parse_json(hosts, kWhat);
  if (!list) return tl::unexpected(list.error());
  auto names = json_strings(*list, "", kWhat);
  if (!names) return tl::unexpected(names.error());
  SageMakerHosts all;
  all.current = current;
  all.hosts = *std::move(names);
  if (auto checked = check_hosts(all, kWhat); !checked) return tl::unexpected(checked.error());
  return all;
}

Result<std::vector<std::string>> training_hosts(const SageMakerHosts& all, std::string_view groups) {
  constexpr std::string_view kWhat = "SM_DISTRIBUTION_INSTANCE_GROUPS";
  if (groups.empty()) return all.hosts;
  const auto list = parse_json(groups, kWhat);
  if (!list) return tl::unexpected(list.error());
  const auto names = json_strings(*list, "", kWhat);
  if (!names) return tl::unexpected(names.error());
  if (names->empty()) return all.hosts;
  std::set<std::string_view> training;
  for (const std::string& name : *names) {
    const auto group = std::find_if(all.groups.begin(), all.groups.end(),
                                    [&](const SageMakerGroup& candidate) { return candidate.name == name; });
    if (group == all.groups.end())
      return json_error(kWhat, "", fmt::format("there is no instance group '{}'", name.substr(0, 60)));
    training.insert(group->hosts.begin(), group->hosts.end());
  }
  std::vector<std::string> hosts;
  std::copy_if(all.hosts.begin(), all.hosts.end(), std::back_inserter(hosts),
               [&](const std::string& host) { return training.contains(host); });
  return hosts;
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

}  // namespace cohort::cluster
