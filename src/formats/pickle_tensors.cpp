// The calls that a pickle of tensors makes: storages, tensors, and the few functions of the allow-list.
#include "formats/pickle_machine.h"

namespace cohort::formats::unpickling {

bool Machine::push_storage() {
  Index id = 0;
  if (!pop(id)) return false;
  const std::vector<Index>& parts = nodes_[id].children;
  if (nodes_[id].kind != Kind::Tuple || parts.size() != 5) return problem("a storage's id is not a tuple of five");
  const auto* tag = std::get_if<std::string>(&nodes_[parts[0]].scalar);
  const Node& type = nodes_[parts[1]];
  const auto* key = std::get_if<std::string>(&nodes_[parts[2]].scalar);
  const std::int64_t* const count = integer(parts[4]);
  if (tag == nullptr || *tag != "storage" || key == nullptr || count == nullptr || type.kind != Kind::Global ||
      (type.global.function != Function::StorageType && type.global.function != Function::UntypedStorage)) {
    return problem("a storage's id is not what torch writes");
  }
  auto bytes = storage_of_(*key);
  if (!bytes) {
    cause_ = bytes.error();
    return false;
  }
  Node node;
  node.kind = Kind::Storage;
  node.storage = {*bytes, type.global.type};
  const std::size_t element = node.storage.type == nullptr ? 1 : node.storage.type->bytes;
  if (*count < 0 || bytes->size() % element != 0 || static_cast<std::uint64_t>(*count) != bytes->size() / element) {
    return problem(fmt::format("storage '{}' has {} bytes, but is said to have {} elements of {}", *key, bytes->size(),
                               *count, element));
  }
  return push(std::move(node));
}

bool Machine::reduce() {
  Index arguments = 0, function = 0;
  if (!pop(arguments) || !pop(function)) return false;
  if (nodes_[function].kind != Kind::Global || nodes_[arguments].kind != Kind::Tuple) {
    return problem("it calls what is no function");
  }
  const std::vector<Index> parts = nodes_[arguments].children;
  switch (nodes_[function].global.function) {
    case Function::OrderedDict: {
      if (!parts.empty()) return problem("an OrderedDict is made from something");
      Node node;
      node.kind = Kind::Dict;
      node.ordered_dict = true;
      return push(std::move(node));
    }
    case Function::Size: {
      if (parts.size() != 1 || nodes_[parts[0]].kind != Kind::Tuple) return problem("a torch.Size has no tuple");
      return push_kind(Kind::Tuple, std::vector<Index>(nodes_[parts[0]].children));
    }
    case Function::Device: {
      if (parts.empty() || parts.size() > 2 || !std::holds_alternative<std::string>(nodes_[parts[0]].scalar)) {
        return problem("a torch.device has no name");
      }
      return push_scalar(std::string(std::get<std::string>(nodes_[parts[0]].scalar)));
    }
    case Function::Parameter:
      if (parts.size() != 3 || !std::holds_alternative<PtTensor>(nodes_[parts[0]].scalar))
        return problem("a parameter has no tensor");
      stack_.push_back(parts[0]);
      return true;
    case Function::Tensor1: return push_tensor(parts, 4, nullptr);
    case Function::Tensor2: return push_tensor(parts, 6, nullptr);
    case Function::Tensor3: {
      if (parts.size() < 7 || nodes_[parts[6]].kind != Kind::Global ||
          nodes_[parts[6]].global.function != Function::ElementTypeName) {
        return problem("a tensor has no element type");
      }
      return push_tensor(parts, 7, nodes_[parts[6]].global.type);
    }
    case Function::StorageType:
    case Function::UntypedStorage:
    case Function::ElementTypeName: return problem("it calls a type");
  }
  return problem("it calls an unknown function");
}

bool Machine::dimensions(Index index, std::vector<std::int64_t>& out) {
  const Node& node = nodes_[index];
  if (node.kind != Kind::Tuple || node.children.size() > 64)
    return problem("a tensor's shape is not a tuple of numbers");
  for (const Index child : node.children) {
    const std::int64_t* const value = integer(child);
    if (value == nullptr || *value < 0) return problem("a tensor's shape or strides are not numbers from 0 on");
    out.push_back(*value);
  }
  return true;
}

bool Machine::push_tensor(const std::vector<Index>& parts, std::size_t known, const ElementTypeInfo* type) {
  // After the known arguments there may be a dict of rare properties (conjugate, negative), which has to be empty.
  if (parts.size() < known || parts.size() > known + 1) return problem("a tensor has the wrong number of arguments");
  if (parts.size() == known + 1) {
    const Node& extra = nodes_[parts[known]];
    const bool none = extra.kind == Kind::Scalar && std::holds_alternative<std::monostate>(extra.scalar);
    if (!none && (extra.kind != Kind::Dict || !extra.children.empty()))
      return problem("a tensor is conjugate, negative or otherwise unusual");
  }
  if (nodes_[parts[0]].kind != Kind::Storage) return problem("a tensor has no storage");
  const Storage& storage = nodes_[parts[0]].storage;
  if (type == nullptr) type = storage.type;
  if (type == nullptr || (storage.type != nullptr && storage.type != type))
    return problem("a tensor's element type is not known");
  const std::int64_t* const offset = integer(parts[1]);
  PtTensor tensor;
  tensor.type = type->type;
  tensor.storage = storage.bytes;
  if (offset == nullptr || *offset < 0) return problem("a tensor has no offset");
  tensor.offset = *offset;
  if (!dimensions(parts[2], tensor.shape) || !dimensions(parts[3], tensor.strides)) return false;
  if (tensor.shape.size() != tensor.strides.size()) return problem("a tensor has not as many strides as dimensions");
  const auto elements = element_count(tensor.shape);
  if (!elements || !byte_count(tensor.type, tensor.shape)) return problem("a tensor is too large");
  if (*elements > 0) {
    std::int64_t last = tensor.offset;
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      std::int64_t reach = 0;
      if (__builtin_mul_overflow(tensor.shape[i] - 1, tensor.strides[i], &reach) ||
          __builtin_add_overflow(last, reach, &last)) {
        return problem("a tensor is too large");
      }
    }
    if (static_cast<std::uint64_t>(last) >= storage.bytes.size() / type->bytes)
      return problem("a tensor reaches beyond its storage");
  }
  return push_scalar(std::move(tensor));
}

}  // namespace cohort::formats::unpickling
