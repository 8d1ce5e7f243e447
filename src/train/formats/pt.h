// `.pt` files: what Python's torch.save writes and `torch.load(path, weights_only=True)` opens. Read by a small machine
// that knows tensors, numbers, text, lists, tuples and dicts and can call nothing; written with plain opcodes that
// torch 1.13 and later accept. Values: any thread may use them, as long as nobody changes them. Format:
// torch/serialization.py and Python's pickletools; the set of opcodes follows torch/_weights_only_unpickler.py.
// Pickles of tensors, without the rest of pickle. The reader is a machine with a stack of plain values: it constructs
// nothing but them, and knows by name the few functions that stand for tensors. Pure functions; any thread may call.
#pragma once

#include "base/result.h"
#include "train/formats/tensor.h"
#include "train/formats/zip.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace cohort::formats {

/// A strided view of a storage. Two tensors over the same span share their storage, in files too.
struct PtTensor {
  ElementType type = ElementType::Float32;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< in elements, not negative; as many as dimensions
  std::int64_t offset = 0;            ///< in elements
  std::span<const std::byte> storage;

  /// Row-major and without gaps, so that `bytes` is a view.
  bool is_contiguous() const noexcept;
  /// The elements' bytes; only if is_contiguous.
  std::span<const std::byte> bytes() const noexcept;
  /// The elements, row-major. Throws std::bad_alloc.
  std::vector<std::byte> gather() const;
};

struct PtList;
struct PtTuple;
struct PtDict;

/// One value. Containers are shared and never change once made, so that a file in which a list stands in a
/// thousand places costs one list.
using PtValue =
    std::variant<std::monostate, bool, std::int64_t, double, std::string, PtTensor, std::shared_ptr<const PtList>,
                 std::shared_ptr<const PtTuple>, std::shared_ptr<const PtDict>>;

struct PtList {
  std::vector<PtValue> items;
};
struct PtTuple {
  std::vector<PtValue> items;
};
/// Also collections.OrderedDict. In the order of the file; keys are text or numbers.
struct PtDict {
  std::vector<std::pair<PtValue, PtValue>> items;
  const PtValue* find(std::string_view key) const noexcept;
  void add(PtValue key, PtValue value);
};

PtValue pt_dict(PtDict dict);
/// A tensor without gaps as a value.
PtValue pt_tensor(const TensorView& tensor);

struct PtLimits {
  std::uint64_t pickle_bytes = std::uint64_t{256} << 20;  ///< of data.pkl, which holds no tensor data
  std::size_t values = 5'000'000;
  int depth = 100;
};

/// The value in a `.pt`; tensors view `bytes`. Corrupt, naming `name` and what is wrong, if the archive is damaged
/// (every storage's CRC-32 is checked), if it needs a class or function other than those of plain tensors (the message
/// names it), or if it is the format from before torch 1.6, a TorchScript archive, or big-endian.
Result<PtValue> parse_pt(std::span<const std::byte> bytes, const std::string& name, const PtLimits& limits = {});

enum class PtFloats : std::uint8_t {
  Number,  ///< Python floats
  Tensor,  ///< float64 tensors without dimensions: torch 1.13 with weights_only=True refuses floats
};

struct PtWriteOptions {
  PtFloats floats = PtFloats::Number;
  Zip64 zip64 = Zip64::WhereNeeded;
  /// Returns a storage's bytes when they are needed, if its span only gives their number: valid until the next call.
  /// Empty: spans hold the bytes.
  std::function<Result<std::span<const std::byte>>(std::span<const std::byte>)> load = {};
};

/// Tensors over one storage share it in the file. InvalidArgument for text that is not UTF-8, for dict keys that are
/// containers, and for values nested deeper than 100.
Result<void> write_pt(const Sink& sink, const PtValue& value, const PtWriteOptions& options = {});
/// Replaces the file as a whole.
Result<void> write_pt(const std::string& path, const PtValue& value, const PtWriteOptions& options = {});

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
