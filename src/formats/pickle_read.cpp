// From the end of a pickle to its value: what stays on the stack becomes PtValues.
#include "formats/pickle.h"
#include "formats/pickle_machine.h"

#include <unordered_set>

namespace cohort::formats::unpickling {

bool Machine::convert(Index index, int depth, PtValue& out) {
  const Node& node = nodes_[index];
  switch (node.kind) {
    case Kind::Scalar: out = node.scalar; return true;
    case Kind::Global:
      if (node.global.function != Function::ElementTypeName) return problem("a class stands where a value belongs");
      out = fmt::format("torch.{}", node.global.type->torch);
      return true;
    case Kind::Storage: return problem("a storage stands where a tensor belongs");
    case Kind::List:
    case Kind::Tuple:
    case Kind::Dict: break;
  }
  if (depth >= limits_.depth) return problem(fmt::format("it is nested deeper than {}", limits_.depth));
  if (states_[index] == State::Open) return problem("a value contains itself");
  if (states_[index] == State::Done) {
    out = results_[index];
    return true;
  }
  states_[index] = State::Open;
  std::vector<PtValue> items(node.children.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!convert(node.children[i], depth + 1, items[i])) return false;
  }
  if (node.kind == Kind::List) {
    out = std::make_shared<const PtList>(PtList{std::move(items)});
  } else if (node.kind == Kind::Tuple) {
    out = std::make_shared<const PtTuple>(PtTuple{std::move(items)});
  } else if (!make_dict(std::move(items), out)) {
    return false;
  }
  results_[index] = out;
  states_[index] = State::Done;
  return true;
}

bool Machine::make_dict(std::vector<PtValue> items, PtValue& out) {
  PtDict dict;
  std::unordered_set<std::string> keys;
  for (std::size_t i = 0; i < items.size(); i += 2) {
    std::string key;
    if (const auto* name = std::get_if<std::string>(&items[i]))
      key = "s" + *name;
    else if (const auto* value = std::get_if<std::int64_t>(&items[i]))
      key = fmt::format("i{}", *value);
    else if (const auto* flag = std::get_if<bool>(&items[i]))
      key = fmt::format("i{}", static_cast<int>(*flag));
    else
      return problem("a dict's key is neither text nor an integer");
    if (!keys.insert(key).second) return problem(fmt::format("the key '{}' stands in a dict twice", key.substr(1)));
    dict.items.emplace_back(std::move(items[i]), std::move(items[i + 1]));
  }
  out = std::make_shared<const PtDict>(std::move(dict));
  return true;
}

}  // namespace cohort::formats::unpickling

namespace cohort::formats {

Result<PtValue> unpickle(std::span<const std::byte> bytes, const std::string& name, const PtLimits& limits,
                         const StorageOf& storage_of) {
  return unpickling::Machine(bytes, name, limits, storage_of).run();
}

}  // namespace cohort::formats
