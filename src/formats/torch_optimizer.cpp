#include "formats/torch_optimizer.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::formats {
namespace {

using Fields = std::map<std::string, PtValue, std::less<>>;

/// What is a tensor without dimensions there so that every bit survives.
PtValue number_of(const TensorView& tensor) {
  const auto as = [&](auto value) -> PtValue {
    std::memcpy(&value, tensor.bytes.data(), std::min(sizeof value, tensor.bytes.size()));
    return value;
  };
  if (tensor.shape.empty() && tensor.type == ElementType::Float64) return as(0.0);
  if (tensor.shape.empty() && tensor.type == ElementType::Int64) return as(std::int64_t{0});
  if (tensor.shape.empty() && tensor.type == ElementType::Bool) return tensor.bytes[0] != std::byte{0};
  return pt_tensor(tensor);
}

/// "FIELD/size", "FIELD/0", "FIELD/2" are a list, in which what is missing is None.
void gather_lists(Fields& fields) {
  constexpr std::string_view kSize = "/size";
  std::vector<std::pair<std::string, std::int64_t>> lists;
  for (const auto& [field, value] : fields) {
    const auto* const size = std::get_if<std::int64_t>(&value);
    if (size != nullptr && field.ends_with(kSize) && *size >= 0 && *size <= 1'000'000)
      lists.emplace_back(field.substr(0, field.size() - kSize.size()), *size);
  }
  for (const auto& [field, size] : lists) {
    PtList list;
    for (std::int64_t i = 0; i < size; ++i) {
      auto item = fields.extract(fmt::format("{}/{}", field, i));
      list.items.push_back(item ? std::move(item.mapped()) : PtValue());
    }
    fields.erase(field + std::string(kSize));
    fields[field] = std::make_shared<const PtList>(std::move(list));
  }
}

PtDict dict_of(Fields fields) {
  gather_lists(fields);
  PtDict dict;
  for (auto& [field, value] : fields) dict.add(field, std::move(value));
  return dict;
}

/// The options of a group by torch's names.
PtDict group_of(Fields options, std::string_view type) {
  auto first = options.extract("beta1"), second = options.extract("beta2");
  if (first && second) {
    options["betas"] =
        std::make_shared<const PtTuple>(PtTuple{{std::move(first.mapped()), std::move(second.mapped())}});
  }
  if (type.starts_with("LBFGS")) {  // torch looks for them, also where they are not set
    for (const char* const name : {"max_eval", "line_search_fn"}) options.try_emplace(name);
  }
  // "Adam maximize": what else changes the arithmetic.
  while (type.find(' ') != std::string_view::npos) {
    type.remove_prefix(type.find(' ') + 1);
    options[std::string(type.substr(0, type.find(' ')))] = true;
  }
  return dict_of(std::move(options));
}

}  // namespace

Result<PtValue> torch_optimizer(const Weights& optimizer, const std::string& name) {
  const auto text = [&](const char* key) {
    const auto found = optimizer.metadata.find(key);
    return found == optimizer.metadata.end() ? std::string() : found->second;
  };
  const auto groups = nlohmann::json::parse(text("groups"), nullptr, false);
  std::map<std::string, std::int64_t, std::less<>> numbers;
  std::vector<std::vector<std::int64_t>> members;
  for (const auto& group : groups.is_array() ? groups : nlohmann::json::array()) {
    members.emplace_back();
    for (const auto& parameter : group.is_array() ? group : nlohmann::json::array()) {
      const auto number = static_cast<std::int64_t>(numbers.size());
      if (parameter.is_string() && numbers.emplace(parameter.get<std::string>(), number).second)
        members.back().push_back(number);
    }
  }
  std::map<std::int64_t, Fields> states;
  std::vector<Fields> options(members.size());
  /// Where "group/0/lr" or "state/a.weight/exp_avg" belongs, and the name there.
  const auto place_of = [&](std::string_view whole) -> std::pair<Fields*, std::string> {
    for (std::size_t at = 0; at < options.size() && whole.starts_with("group/"); ++at) {
      const std::string prefix = fmt::format("group/{}/", at);
      if (whole.starts_with(prefix)) return {&options[at], std::string(whole.substr(prefix.size()))};
    }
    if (!whole.starts_with("state/")) return {};
    whole.remove_prefix(std::string_view("state/").size());
    for (auto end = whole.find('/'); end != std::string_view::npos; end = whole.find('/', end + 1)) {
      if (const auto found = numbers.find(whole.substr(0, end)); found != numbers.end())
        return {&states[found->second], std::string(whole.substr(end + 1))};
    }
    return {};
  };
  for (const NamedTensor& entry : optimizer.tensors) {
    const auto [to, field] = place_of(entry.name);
    if (to == nullptr) {
      return fail(ErrorCode::Corrupt, "{}: not a sound state of an optimizer -- '{}' belongs to nothing", name,
                  entry.name);
    }
    (*to)[field] = number_of(entry.tensor);
  }
  for (const auto& [key, value] : optimizer.metadata) {
    if (const auto [to, field] = place_of(key); to != nullptr) (*to)[field] = value;
  }
  PtDict state, root;
  for (auto& [number, fields] : states) state.add(number, pt_dict(dict_of(std::move(fields))));
  PtList param_groups;
  for (std::size_t at = 0; at < members.size(); ++at) {
    PtDict group = group_of(std::move(options[at]), text("type"));
    PtList params;
    for (const std::int64_t number : members[at]) params.items.emplace_back(number);
    group.add("params", std::make_shared<const PtList>(std::move(params)));
    param_groups.items.push_back(pt_dict(std::move(group)));
  }
  root.add("state", pt_dict(std::move(state)));
  root.add("param_groups", std::make_shared<const PtList>(std::move(param_groups)));
  return pt_dict(std::move(root));
}

}  // namespace cohort::formats
