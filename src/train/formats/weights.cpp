#include "train/formats/weights.h"

#include "train/formats/pt.h"
#include "train/formats/safetensors.h"

#include <new>
#include <string_view>

namespace cohort::formats {
namespace {

using Dict = std::shared_ptr<const PtDict>;

constexpr std::size_t kSmall = std::size_t{1} << 20;

std::string_view kind_of(const PtValue& value) {
  constexpr std::string_view kNames[] = {"None",     "a bool", "a number", "a number", "a text",
                                         "a tensor", "a list", "a tuple",  "a dict"};
  return kNames[value.index()];
}

std::string key_text(const PtValue& key) {
  if (const auto* text = std::get_if<std::string>(&key)) return *text;
  if (const auto* number = std::get_if<std::int64_t>(&key)) return std::to_string(*number);
  return "?";
}

/// "its keys: 'model' (a dict), 'epoch' (a number)".
std::string keys_of(const PtDict& dict) {
  std::string text = "its keys:";
  std::size_t shown = 0;
  for (const auto& [key, value] : dict.items) {
    if (++shown > 20) {
      text += fmt::format(" and {} more", dict.items.size() - 20);
      break;
    }
    text += fmt::format("{} '{}' ({})", shown == 1 ? "" : ",", key_text(key), kind_of(value));
  }
  return text;
}

Result<Dict> descend(const PtValue& root, const std::string& name, const std::string& key) {
  PtValue at = root;
  for (std::string_view rest = key; !rest.empty();) {
    const std::size_t slash = rest.find('/');
    const std::string_view part = rest.substr(0, slash);
    rest = slash == std::string_view::npos ? std::string_view() : rest.substr(slash + 1);
    const auto* const dict = std::get_if<Dict>(&at);
    const PtValue* const next = dict == nullptr ? nullptr : (*dict)->find(part);
    if (next == nullptr) {
      return fail(ErrorCode::InvalidArgument, "{}: has no '{}' on the way to '{}' -- {}", name, part, key,
                  dict == nullptr ? std::string("there is no dict") : keys_of(**dict));
    }
    PtValue inner = *next;  // `at` owns what `next` points into
    at = std::move(inner);
  }
  if (const auto* dict = std::get_if<Dict>(&at)) return *dict;
  return fail(ErrorCode::InvalidArgument, "{}: holds {} where a dict of tensors belongs", name, kind_of(at));
}

Result<Weights> weights_of_pt(std::span<const std::byte> bytes, const std::string& name,
                              const WeightsOptions& options) {
  const auto root = parse_pt(bytes, name);
  if (!root) return tl::unexpected(root.error());
  const auto dict = descend(*root, name, options.key);
  if (!dict) return tl::unexpected(dict.error());
  Weights weights;
  for (const auto& [key, value] : (*dict)->items) {
    const auto* const tensor_name = std::get_if<std::string>(&key);
    const auto* const tensor = std::get_if<PtTensor>(&value);
    if (tensor_name == nullptr || tensor == nullptr) {
      return fail(ErrorCode::InvalidArgument,
                  "{}: '{}' is {} where tensors belong -- {} -- choose the dict of tensors by its key (--key, or "
                  "\"a/b\" for one below another)",
                  name, key_text(key), kind_of(value), keys_of(**dict));
    }
    std::span<const std::byte> content = tensor->bytes();
    if (!tensor->is_contiguous()) {
      // An expanded tensor repeats few bytes; a hostile one repeats them until memory is full.
      if (byte_count(tensor->type, tensor->shape).value_or(0) / 64 > tensor->storage.size() + kSmall) {
        return fail(ErrorCode::Corrupt, "{}: tensor '{}' {} repeats {} bytes far too often", name, *tensor_name,
                    shape_text(tensor->shape), tensor->storage.size());
      }
      weights.gathered.push_back(tensor->gather());
      content = weights.gathered.back();
    }
    weights.tensors.push_back({*tensor_name, {tensor->type, tensor->shape, content}});
  }
  return weights;
}

}  // namespace

Result<Weights> parse_weights(std::span<const std::byte> bytes, const std::string& name,
                              const WeightsOptions& options) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  try {
    if (text.starts_with("PK") || text.starts_with("\x80\x02")) return weights_of_pt(bytes, name, options);
  } catch (const std::bad_alloc&) {
    return fail(ErrorCode::Unavailable, "{}: its tensors do not fit into memory -- free some memory", name);
  }
  if (text.size() < 9 || text[8] != '{') {
    return fail(ErrorCode::Corrupt, "{}: neither safetensors nor a .pt of torch 1.6 or later -- is it the right file?",
                name);
  }
  auto file = parse_safetensors(bytes, name);
  if (!file) return tl::unexpected(file.error());
  if (!options.key.empty()) {
    return fail(ErrorCode::InvalidArgument, "{}: safetensors has no keys to choose from ('{}' was asked for)", name,
                options.key);
  }
  Weights weights;
  weights.tensors = std::move(file->tensors);
  weights.metadata = std::move(file->metadata);
  return weights;
}

Result<Weights> read_weights(const std::string& path, const WeightsOptions& options) {
  auto bytes = sys::read_file(path);
  if (!bytes) return tl::unexpected(bytes.error());
  auto weights = parse_weights(bytes->bytes(), path, options);
  if (weights) weights->file = std::move(*bytes);
  return weights;
}

}  // namespace cohort::formats
