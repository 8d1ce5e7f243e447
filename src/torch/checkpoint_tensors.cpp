#include "torch/checkpoint_tensors.h"

#include "base/log.h"
#include "base/result.h"
#include "train/formats/pt.h"
#include "train/formats/safetensors.h"
#include "train/formats/weights.h"

#include <algorithm>
#include <cstring>
#include <set>

// clang-format off
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/InferenceMode.h>
// clang-format on

namespace cohort::checkpoint {
namespace {

using formats::ElementType;

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
#define COHORT_TORCH_HAS_UNSIGNED 1
#else
#define COHORT_TORCH_HAS_UNSIGNED 0
#endif

struct TypeRow {
  at::ScalarType torch;
  ElementType file;
};
constexpr TypeRow kTypes[] = {
    {at::kDouble, ElementType::Float64},
    {at::kFloat, ElementType::Float32},
    {at::kHalf, ElementType::Float16},
    {at::kBFloat16, ElementType::BFloat16},
    {at::kLong, ElementType::Int64},
    {at::kInt, ElementType::Int32},
    {at::kShort, ElementType::Int16},
    {at::kChar, ElementType::Int8},
    {at::kByte, ElementType::UInt8},
    {at::kBool, ElementType::Bool},
    {at::kComplexFloat, ElementType::Complex64},
#if COHORT_TORCH_HAS_UNSIGNED
    {at::kUInt16, ElementType::UInt16},
    {at::kUInt32, ElementType::UInt32},
    {at::kUInt64, ElementType::UInt64},
    {at::kFloat8_e4m3fn, ElementType::Float8E4M3},
    {at::kFloat8_e5m2, ElementType::Float8E5M2},
#endif
};

/// True if every value of `from` is a value of `to`.
bool is_exact(ElementType from, ElementType to) {
  if (from == to) return true;
  switch (from) {
    case ElementType::Float8E4M3:
    case ElementType::Float8E5M2:
      return to == ElementType::Float16 || to == ElementType::BFloat16 || to == ElementType::Float32 ||
             to == ElementType::Float64;
    case ElementType::Float16:
    case ElementType::BFloat16: return to == ElementType::Float32 || to == ElementType::Float64;
    case ElementType::Float32: return to == ElementType::Float64;
    case ElementType::Int8: return to == ElementType::Int16 || to == ElementType::Int32 || to == ElementType::Int64;
    case ElementType::UInt8: return to == ElementType::Int16 || to == ElementType::Int32 || to == ElementType::Int64;
    case ElementType::Int16: return to == ElementType::Int32 || to == ElementType::Int64;
    case ElementType::Int32: return to == ElementType::Int64;
    default: return false;
  }
}

std::vector<std::int64_t> shape_of(const at::Tensor& tensor) { return tensor.sizes().vec(); }

/// True if several elements of the tensor share memory, as in an expanded tensor.
bool overlaps(const at::Tensor& tensor) {
  for (std::int64_t dim = 0; tensor.layout() == at::kStrided && dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) == 0) return true;
  }
  return false;
}

/// "a, b, c and 7 more".
std::string listing(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 20;
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kShown; ++i)
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", names[i]);
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

constexpr std::string_view kWrapperPrefix = "module.";

/// Returns a tensor's name as in an unwrapped module, without the parts that Python's torch.compile, activation
/// checkpointing and FSDP add.
std::string plain_name(const std::string& name) {
  std::string plain;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    begin = end + 1;
    if (part == "_orig_mod" || part == "_checkpoint_wrapped_module" || part == "_fsdp_wrapped_module") continue;
    plain += (plain.empty() ? "" : ".") + part;
  }
  return plain;
}

/// True if all names have the prefix of DistributedDataParallel's state_dict() in Python, and the module's do not.
bool has_wrapper_prefix(const std::map<std::string, at::Tensor>& tensors,
                        const std::vector<formats::NamedTensor>& weights) {
  for (const auto& weight : weights) {
    if (!plain_name(weight.name).starts_with(kWrapperPrefix) || tensors.contains(weight.name)) return false;
  }
  return !weights.empty();
}

}  // namespace

ElementType to_element_type(at::ScalarType type) {
  for (const TypeRow& row : kTypes) {
    if (row.torch == type) return row.file;
  }
  raise(ErrorCode::InvalidArgument, "cannot save a tensor of type {} -- files have no such type -- convert it first",
        c10::toString(type));
}

at::ScalarType to_scalar_type(ElementType type, const std::string& name) {
  for (const TypeRow& row : kTypes) {
    if (row.file == type) return row.torch;
  }
  raise(ErrorCode::InvalidArgument,
        "cannot load tensor '{}' -- libtorch {} has no type {} -- convert the file, or use a newer libtorch", name,
        TORCH_VERSION, formats::info(type).torch);
}

void Snapshot::add(std::string name, const at::Tensor& tensor) {
  if (!tensor.defined()) raise(ErrorCode::InvalidArgument, "cannot save tensor '{}' -- it is undefined", name);
  if (tensor.layout() != at::kStrided) {
    raise(ErrorCode::InvalidArgument, "cannot save tensor '{}' -- it is sparse -- make it dense first", name);
  }
  at::Tensor dense = tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
  const formats::TensorView view{to_element_type(dense.scalar_type()),
                                 shape_of(dense),
                                 {static_cast<const std::byte*>(dense.data_ptr()), dense.nbytes()}};
  owned_.push_back(std::move(dense));
  tensors_.push_back({std::move(name), view});
}

std::string unwritable(const at::Tensor& tensor) {
  if (overlaps(tensor)) return "has several elements in one place here (expand): make it a clone()";
  if (tensor.is_inference() && !c10::InferenceMode::is_enabled())
    return "was made in inference mode, and cannot be changed outside of it";
  return {};
}

void require_loadable(const std::string& name, const at::Tensor& tensor) {
  if (!overlaps(tensor)) return;
  raise(ErrorCode::InvalidArgument,
        "cannot save the module's '{}' -- several of its elements lie in one place (expand), so that it could not be "
        "loaded -- make it a clone()",
        name);
}

at::Tensor to_tensor(const formats::TensorView& view, const std::string& name) {
  at::Tensor tensor = at::empty(view.shape, at::TensorOptions().dtype(to_scalar_type(view.type, name)));
  if (view.type == ElementType::Bool) {
    for (const std::byte value : view.bytes) {
      if (value > std::byte{1}) raise(ErrorCode::Corrupt, "tensor '{}' has bools that are neither 0 nor 1", name);
    }
  }
  if (!view.bytes.empty()) std::memcpy(tensor.data_ptr(), view.bytes.data(), view.bytes.size());
  return tensor;
}

std::map<std::string, at::Tensor> named_tensors(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : module.named_parameters()) {
    if (item.value().defined()) tensors.emplace(item.key(), item.value());
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) tensors.emplace(item.key(), item.value());
  }
  return tensors;
}

std::vector<std::pair<std::string, at::Generator>> generators_of(const torch::nn::Module& module) {
  std::set<c10::DeviceIndex> gpus;
  for (const auto& [name, tensor] : named_tensors(module)) {
    if (tensor.is_cuda()) gpus.insert(tensor.device().index());
  }
  std::vector<std::pair<std::string, at::Generator>> all = {{"cpu", at::detail::getDefaultCPUGenerator()}};
  for (const c10::DeviceIndex index : gpus) {
    all.emplace_back(fmt::format("cuda/{}", all.size() - 1),
                     at::globalContext().defaultGenerator(at::Device(at::kCUDA, index)));
  }
  return all;
}

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void Assignment::apply() const {
  const torch::NoGradGuard no_grad;
  for (const Copy& copy : copies) copy.to.copy_(to_tensor(copy.from, copy.name));
}

Assignment match(const std::map<std::string, at::Tensor>& tensors, const std::vector<formats::NamedTensor>& weights,
                 const std::string& source, const LoadWeightsOptions& options) {
  const std::size_t prefix = has_wrapper_prefix(tensors, weights) ? kWrapperPrefix.size() : 0;
  if (prefix != 0) log::info("checkpoint", "{}: the prefix '{}' of its names is passed over", source, kWrapperPrefix);
  Assignment assignment;
  std::vector<std::string> problems;
  std::map<std::string, at::Tensor> missing = tensors;
  for (const auto& weight : weights) {
    const std::string name = tensors.contains(weight.name) ? weight.name : plain_name(weight.name).substr(prefix);
    const auto found = tensors.find(name);
    if (found == tensors.end()) {
      assignment.report.unexpected.push_back(name);
      continue;
    }
    missing.erase(name);
    const at::Tensor& to = found->second;
    if (shape_of(to) != weight.tensor.shape) {
      problems.push_back(fmt::format("'{}' has shape {} there and {} here", name,
                                     formats::shape_text(weight.tensor.shape), formats::shape_text(shape_of(to))));
      continue;
    }
    const ElementType here = to_element_type(to.scalar_type());
    if (!is_exact(weight.tensor.type, here) && options.convert == Convert::Exact) {
      problems.push_back(fmt::format("'{}' is {} there and {} here (Convert::Any rounds)", name,
                                     formats::info(weight.tensor.type).torch, formats::info(here).torch));
      continue;
    }
    if (const std::string why = unwritable(to); !why.empty()) {
      problems.push_back(fmt::format("'{}' {}", name, why));
      continue;
    }
    to_scalar_type(weight.tensor.type, name);
    assignment.copies.push_back({to, weight.tensor, name});
  }
  for (const auto& [name, tensor] : missing) assignment.report.missing.push_back(name);
  const LoadedWeights& report = assignment.report;
  if (options.match == Match::Strict) {
    if (!report.missing.empty()) problems.push_back("missing in the file: " + listing(report.missing));
    if (!report.unexpected.empty()) problems.push_back("not in the module: " + listing(report.unexpected));
  } else if (!report.missing.empty() || !report.unexpected.empty()) {
    log::info("checkpoint", "{}: passed over; only in the module: {}; only in the file: {}", source,
              listing(report.missing), listing(report.unexpected));
  }
  if (!problems.empty()) {
    std::string text;
    for (const std::string& problem : problems) text += (text.empty() ? "" : "; ") + problem;
    raise(ErrorCode::InvalidArgument, "{}: does not fit the module -- {} -- was it saved from another model?", source,
          text);
  }
  return assignment;
}

}  // namespace cohort::checkpoint

namespace cohort {

LoadedWeights load_weights(torch::nn::Module& module, const std::string& path, const LoadWeightsOptions& options) {
  const formats::Weights weights = value_or_throw(formats::read_weights(path, {.key = options.key}));
  const checkpoint::Assignment assignment =
      checkpoint::match(checkpoint::named_tensors(module), weights.tensors, path, options);
  assignment.apply();
  return assignment.report;
}

void save_weights(const torch::nn::Module& module, const std::string& path, WeightsFormat format) {
  checkpoint::Snapshot snapshot;
  for (const auto& [name, tensor] : checkpoint::named_tensors(module)) snapshot.add(name, tensor);
  if (format == WeightsFormat::Safetensors) {
    value_or_throw(formats::write_safetensors(path, snapshot.tensors(), {{"format", "pt"}}));
    return;
  }
  formats::PtDict dict;
  for (const auto& [name, tensor] : snapshot.tensors()) dict.add(name, formats::pt_tensor(tensor));
  value_or_throw(formats::write_pt(path, std::make_shared<const formats::PtDict>(std::move(dict))));
}

}  // namespace cohort
