#include "formats/pickle_values.h"

#include <array>

namespace cohort::formats::unpickling {

std::optional<Global> find_global(std::string_view module, std::string_view name) {
  struct Row {
    std::string_view module, name;
    Function function;
  };
  constexpr std::array<Row, 9> kRows = {{{"collections", "OrderedDict", Function::OrderedDict},
                                         {"torch", "Size", Function::Size},
                                         {"torch", "device", Function::Device},
                                         {"torch._utils", "_rebuild_parameter", Function::Parameter},
                                         {"torch._utils", "_rebuild_tensor", Function::Tensor1},
                                         {"torch._utils", "_rebuild_tensor_v2", Function::Tensor2},
                                         {"torch._utils", "_rebuild_tensor_v3", Function::Tensor3},
                                         {"torch.storage", "UntypedStorage", Function::UntypedStorage},
                                         {"torch", "UntypedStorage", Function::UntypedStorage}}};
  for (const Row& row : kRows) {
    if (row.module == module && row.name == name) return Global{row.function, nullptr};
  }
  if (module != "torch") return std::nullopt;
  if (const auto* type = find_torch_storage(name)) return Global{Function::StorageType, type};
  if (const auto* type = find_torch_type(name)) return Global{Function::ElementTypeName, type};
  return std::nullopt;
}

}  // namespace cohort::formats::unpickling
