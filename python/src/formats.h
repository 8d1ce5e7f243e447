// Files of tensors as bytes with a name, a type and a shape: the package makes torch's tensors of them. What the files
// look like is decided in formats/. Needs the GIL.
#pragma once

#include "arrays.h"

#include "base/files.h"
#include "train/formats/tensor.h"

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace cohort::python {

/// Bytes that somebody owns: a whole file, or a tensor in it.
struct Bytes {
  std::shared_ptr<const void> owner;
  const std::byte* data = nullptr;
  std::size_t size = 0;

  std::span<const std::byte> span() const noexcept { return {data, size}; }
};

Bytes bytes_of(sys::FileBytes file);

/// (name, type as torch calls it, shape, bytes).
using NamedBytes = std::tuple<std::string, std::string, std::vector<std::int64_t>, Bytes>;
using Metadata = std::map<std::string, std::string>;

/// What Python gives to be written; keeps its arrays.
class Tensors {
 public:
  Tensors() = default;
  explicit Tensors(const pybind11::list& items);
  const std::vector<formats::NamedTensor>& all() const noexcept { return tensors_; }

 private:
  std::vector<Array> arrays_;
  std::vector<formats::NamedTensor> tensors_;
};

}  // namespace cohort::python
