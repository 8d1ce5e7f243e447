// Pickles of tensors, without the rest of pickle. The reader is a machine with a stack of plain values: it constructs
// nothing but them, and knows by name the few functions that stand for tensors. Pure functions; any thread may call.
#pragma once

#include "formats/pt.h"

#include <functional>
#include <span>
#include <string>
#include <vector>

namespace cohort::formats {

/// Bytes of the storage with this key, or why there are none.
using StorageOf = std::function<Result<std::span<const std::byte>>(const std::string& key)>;

/// The value that a pickle stands for. Corrupt, naming `name`, the global or the opcode at fault.
Result<PtValue> unpickle(std::span<const std::byte> bytes, const std::string& name, const PtLimits& limits,
                         const StorageOf& storage_of);

struct Pickled {
  std::string bytes;
  std::vector<std::span<const std::byte>> storages;  ///< storage i has the key "i"
  std::vector<std::unique_ptr<double>> numbers;      ///< memory of those storages that numbers were made into
};

Result<Pickled> pickle(const PtValue& value, PtFloats floats);

}  // namespace cohort::formats
