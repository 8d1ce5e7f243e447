// What stands on the stack while a pickle is read, and the functions and classes that a pickle may name: the reader's
// allow-list. Plain data; a Node belongs to the machine that made it. find_global: any thread may call.
#pragma once

#include "formats/pt.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace cohort::formats::unpickling {

enum class Kind : std::uint8_t { Scalar, List, Tuple, Dict, Global, Storage };

// The functions and classes that a pickle may name. Everything else is refused by name.
enum class Function : std::uint8_t {
  OrderedDict,
  Size,
  Device,
  Parameter,
  Tensor1,
  Tensor2,
  Tensor3,
  StorageType,
  UntypedStorage,
  ElementTypeName,
};

struct Global {
  Function function;
  const ElementTypeInfo* type = nullptr;
};

struct Storage {
  std::span<const std::byte> bytes;
  const ElementTypeInfo* type = nullptr;  // nullptr: untyped
};

using Index = std::uint32_t;

/// What the stack holds. Containers refer to other nodes by number, so that cycles do no harm.
struct Node {
  Kind kind = Kind::Scalar;
  bool ordered_dict = false;
  PtValue scalar;               // Kind::Scalar, tensors included
  std::vector<Index> children;  // items; for dicts key, value, key, value, ...
  Global global{};
  Storage storage;
};

/// What `module.name` stands for; nullopt for all that is not on the list, which the reader refuses.
std::optional<Global> find_global(std::string_view module, std::string_view name);

}  // namespace cohort::formats::unpickling
