// `.pt` files, which Python's torch.save writes and `torch.load(path, weights_only=True)` opens. The reader is a small
// machine that knows tensors, numbers, text, lists, tuples and dicts and cannot call anything; the writer uses plain
// opcodes that torch 1.13 and later accept. Values: any thread may use them, as long as nobody changes them. Format:
// torch/serialization.py and Python's pickletools; the set of opcodes follows torch/_weights_only_unpickler.py. Also
// reads pickles, but only of tensors. The reader is a machine with a stack of plain values. It constructs only such
// values, and knows by name the few functions that stand for tensors. Pure functions; any thread may call.
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

  /// True if the tensor is row-major and without gaps, so that `bytes` can be called.
  bool is_contiguous() const noexcept;
  /// Returns a view of the elements; only if is_contiguous.
  std::span<const std::byte> bytes() const noexcept;
  /// Returns a row-major copy of the elements. Throws std::bad_alloc.
  std::vector<std::byte> gather() const;
};

struct PtList;
struct PtTuple;
struct PtDict;

/// One value. Containers are shared and immutable: a list to which a file refers a
/// thousand times takes the memory of one list.
using PtValue =
    std::variant<std::monostate, bool, std::int64_t, double, std::string, PtTensor, std::shared_ptr<const PtList>,
                 std::shared_ptr<const PtTuple>, std::shared_ptr<const PtDict>>;

struct PtList {
  std::vector<PtValue> items;
};
struct PtTuple {
  std::vector<PtValue> items;
};
/// A dict or collections.OrderedDict, in the order of the file; keys are text or numbers.
struct PtDict {
  std::vector<std::pair<PtValue, PtValue>> items;
  const PtValue* find(std::string_view key) const noexcept;
  void add(PtValue key, PtValue value);
};

PtValue pt_dict(PtDict dict);
/// Wraps a contiguous tensor as a value.
PtValue pt_tensor(const TensorView& tensor);

struct PtLimits {
  std::uint64_t pickle_bytes = std::uint64_t{256} << 20;  ///< size of data.pkl, which holds no tensor data
  std::size_t values = 5'000'000;
  int depth = 100;
};

/// Returns the value in a `.pt`; its tensors view `bytes`. Returns Corrupt, naming `name` and the fault, if the archive
/// is damaged (every storage's CRC-32 is checked), if it needs a class or function that plain tensors do not need (the
/// message names it), or if it has the format from before torch 1.6, is a TorchScript archive, or is big-endian.
Result<PtValue> parse_pt(std::span<const std::byte> bytes, const std::string& name, const PtLimits& limits = {});

enum class PtFloats : std::uint8_t {
  Number,  ///< written as Python floats
  Tensor,  ///< written as float64 tensors without dimensions, since torch 1.13 with weights_only=True refuses floats
};

struct PtWriteOptions {
  PtFloats floats = PtFloats::Number;
  Zip64 zip64 = Zip64::WhereNeeded;
  /// Loads the bytes of a storage, for spans without memory behind them; the result is valid until the next call.
  /// Empty: spans hold the bytes.
  std::function<Result<std::span<const std::byte>>(std::span<const std::byte>)> load = {};
};

/// Writes a `.pt`. Tensors over one storage share it in the file. Returns InvalidArgument for text that is not UTF-8,
/// for dict keys that are containers, and for values nested deeper than 100.
Result<void> write_pt(const Sink& sink, const PtValue& value, const PtWriteOptions& options = {});
/// Like the above, to a file, which is replaced atomically.
Result<void> write_pt(const std::string& path, const PtValue& value, const PtWriteOptions& options = {});

/// Function that returns the bytes of the storage with this key, or the reason why it is missing.
using StorageOf = std::function<Result<std::span<const std::byte>>(const std::string& key)>;

/// Returns the value that a pickle represents; Corrupt names `name` and the global or opcode at fault.
Result<PtValue> unpickle(std::span<const std::byte> bytes, const std::string& name, const PtLimits& limits,
                         const StorageOf& storage_of);

struct Pickled {
  std::string bytes;
  std::vector<std::span<const std::byte>> storages;  ///< storage i has the key "i"
  std::vector<std::unique_ptr<double>> numbers;      ///< memory of the storages made from numbers
};

Result<Pickled> pickle(const PtValue& value, PtFloats floats);

}  // namespace cohort::formats
