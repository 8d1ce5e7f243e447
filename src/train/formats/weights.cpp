#include "train/formats/weights.h"

#include "base/json.h"
#include "base/log.h"
#include "base/result.h"
#include "train/formats/checkpoint_folder.h"
#include "train/formats/pt.h"
#include "train/formats/safetensors.h"
#include "train/formats/shards.h"

#include <nlohmann/json.hpp>

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
      // An expanded tensor repeats a few bytes; a hostile one could repeat them until memory is full.
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

namespace {

// Converts a checkpoint's optimizer.safetensors to what Python's torch.optim.Optimizer.state_dict() returns.

/// Returns {"state": {NUMBER: {"exp_avg": ...}}, "param_groups": [{"lr": ..., "params": [NUMBER...]}]}, with parameters
/// numbered in the order of the groups, and views of `tensors`. Returns Corrupt, naming `name`, if the input does not
/// follow docs/reference/checkpoint-format.md.
Result<PtValue> torch_optimizer(const std::vector<NamedTensor>& tensors,
                                const std::map<std::string, std::string>& metadata, const std::string& name);

using Fields = std::map<std::string, PtValue, std::less<>>;

/// Converts a number stored as a tensor without dimensions, so that every bit survives; others stay tensors.
PtValue number_of(const TensorView& tensor) {
  const auto as = [&](auto value) -> PtValue {
    std::memcpy(&value, tensor.bytes.data(), std::min(sizeof value, tensor.bytes.size()));
    return value;
  };
  if (tensor.shape.empty() && tensor.type == ElementType::Float64) return as(0.0);
  if (tensor.shape.empty() && tensor.type == ElementType::Int64) return as(std::int64_t{0});
  if (tensor.shape.empty() && tensor.type == ElementType::Bool) return tensor.bytes[0] != std::byte{0};
  return pt_tensor(tensor);
}

/// Returns a number, text or bool; None for other values.
template <class Json>
PtValue value_of(const Json& json) {
  if (json.is_boolean()) return json.template get<bool>();
  if (json.is_number_float()) return json.template get<double>();
  if (json.is_number()) return json.template get<std::int64_t>();
  if (json.is_string()) return json.template get<std::string>();
  return {};
}

/// Replaces "FIELD/size", "FIELD/0", "FIELD/2" by a list, in which missing items are None.
void gather_lists(Fields& fields) {
  constexpr std::string_view kSize = "/size";
  std::vector<std::pair<std::string, std::int64_t>> lists;
  for (const auto& [field, value] : fields) {
    const auto* const size = std::get_if<std::int64_t>(&value);
    if (size != nullptr && field.ends_with(kSize) && *size >= 0 && *size <= 1'000'000)
      lists.emplace_back(field.substr(0, field.size() - kSize.size()), *size);
  }
  for (const auto& [field, size] : lists) {
    PtList list;
    for (std::int64_t i = 0; i < size; ++i) {
      auto item = fields.extract(fmt::format("{}/{}", field, i));
      list.items.push_back(item ? std::move(item.mapped()) : PtValue());
    }
    fields.erase(field + std::string(kSize));
    fields[field] = std::make_shared<const PtList>(std::move(list));
  }
}

PtDict dict_of(Fields fields) {
  gather_lists(fields);
  PtDict dict;
  for (auto& [field, value] : fields) dict.add(field, std::move(value));
  return dict;
}

/// Returns the options of a group by torch's names.
PtDict group_of(Fields options, std::string_view type) {
  auto first = options.extract("beta1"), second = options.extract("beta2");
  if (first && second) {
    options["betas"] =
        std::make_shared<const PtTuple>(PtTuple{{std::move(first.mapped()), std::move(second.mapped())}});
  }
  if (type.starts_with("LBFGS")) {  // torch requires these keys even if unset
    for (const char* const name : {"max_eval", "line_search_fn"}) options.try_emplace(name);
  }
  // Flags that change the arithmetic follow the type: "Adam maximize".
  while (type.find(' ') != std::string_view::npos) {
    type.remove_prefix(type.find(' ') + 1);
    options[std::string(type.substr(0, type.find(' ')))] = true;
  }
  return dict_of(std::move(options));
}

Result<PtValue> torch_optimizer(const std::vector<NamedTensor>& tensors,
                                const std::map<std::string, std::string>& metadata, const std::string& name) {
  const auto text = [&](const char* key) {
    const auto found = metadata.find(key);
    return found == metadata.end() ? std::string() : found->second;
  };
  const auto groups = parse_json_or_discard(text("groups"));
  std::map<std::string, std::int64_t, std::less<>> numbers;
  std::vector<std::vector<std::int64_t>> members;
  for (const auto& group : groups.is_array() ? groups : nlohmann::json::array()) {
    members.emplace_back();
    for (const auto& parameter : group.is_array() ? group : nlohmann::json::array()) {
      const auto number = static_cast<std::int64_t>(numbers.size());
      if (parameter.is_string() && numbers.emplace(parameter.get<std::string>(), number).second)
        members.back().push_back(number);
    }
  }
  std::map<std::int64_t, Fields> states;
  std::vector<Fields> options(members.size());
  /// Finds the fields to which "group/0/lr" or "state/a.weight/exp_avg" belongs, and the name within them.
  const auto place_of = [&](std::string_view whole) -> std::pair<Fields*, std::string> {
    for (std::size_t at = 0; at < options.size() && whole.starts_with("group/"); ++at) {
      const std::string prefix = fmt::format("group/{}/", at);
      if (whole.starts_with(prefix)) return {&options[at], std::string(whole.substr(prefix.size()))};
    }
    if (!whole.starts_with("state/")) return {};
    whole.remove_prefix(std::string_view("state/").size());
    for (auto end = whole.find('/'); end != std::string_view::npos; end = whole.find('/', end + 1)) {
      if (const auto found = numbers.find(whole.substr(0, end)); found != numbers.end())
        return {&states[found->second], std::string(whole.substr(end + 1))};
    }
    return {};
  };
  for (const NamedTensor& entry : tensors) {
    const auto [to, field] = place_of(entry.name);
    if (to == nullptr) {
      return fail(ErrorCode::Corrupt, "{}: not a sound state of an optimizer -- '{}' belongs to nothing", name,
                  entry.name);
    }
    (*to)[field] = number_of(entry.tensor);
  }
  for (const auto& [key, value] : metadata) {
    if (const auto [to, field] = place_of(key); to != nullptr) (*to)[field] = value;
  }
  // Values that a schedule or the program added to groups in Python.
  const auto added = parse_json_or_discard(text("group_values"));
  if (!text("group_values").empty() && !added.is_array())  // JSON has no infinity
    return fail(ErrorCode::Corrupt, "{}: not a sound state of an optimizer -- its 'group_values' are no JSON", name);
  for (std::size_t at = 0; at < std::min(added.is_array() ? added.size() : 0, options.size()); ++at) {
    if (!added[at].is_object()) continue;
    for (const auto& [key, value] : added[at].items()) options[at].try_emplace(key, value_of(value));
  }
  PtDict state, root;
  for (auto& [number, fields] : states) state.add(number, pt_dict(dict_of(std::move(fields))));
  PtList param_groups;
  for (std::size_t at = 0; at < members.size(); ++at) {
    PtDict group = group_of(std::move(options[at]), text("type"));
    PtList params;
    for (const std::int64_t number : members[at]) params.items.emplace_back(number);
    group.add("params", std::make_shared<const PtList>(std::move(params)));
    param_groups.items.push_back(pt_dict(std::move(group)));
  }
  root.add("state", pt_dict(std::move(state)));
  root.add("param_groups", std::make_shared<const PtList>(std::move(param_groups)));
  return pt_dict(std::move(root));
}

namespace fs = std::filesystem;

PtValue dict_of(const std::vector<NamedTensor>& tensors) {
  PtDict dict;
  for (const NamedTensor& entry : tensors) dict.add(entry.name, pt_tensor(entry.tensor));
  return pt_dict(std::move(dict));
}

PtValue everything(const Manifest& manifest, const std::vector<NamedTensor>& model, std::optional<PtValue> optimizer) {
  PtDict root;
  root.add("model", dict_of(model));
  if (optimizer) root.add("optimizer", *std::move(optimizer));
  if (manifest.sampler) {
    const SamplerPosition& at = *manifest.sampler;
    PtDict sampler;
    const bool fits = at.seed <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    sampler.add("seed", fits ? PtValue(static_cast<std::int64_t>(at.seed)) : PtValue(std::to_string(at.seed)));
    sampler.add("epoch", at.epoch);
    sampler.add("cursor", at.cursor);
    sampler.add("size", at.size);
    root.add("sampler", pt_dict(std::move(sampler)));
  }
  PtDict values;
  for (const auto& [key, value] : manifest.values) {
    values.add(key, std::visit([](const auto& plain) { return PtValue(plain); }, value));
  }
  root.add("values", pt_dict(std::move(values)));
  root.add("step", manifest.step);
  root.add("epoch", manifest.epoch);
  root.add("world_size", std::int64_t{manifest.world_size});
  root.add("created", manifest.created);
  return pt_dict(std::move(root));
}

enum class Target : std::uint8_t { Pt, Safetensors };

Result<Target> target_of(const std::string& path) {
  const std::string extension = fs::path(path).extension().string();
  if (extension == ".pt" || extension == ".pth" || extension == ".tar") return Target::Pt;
  if (extension == ".safetensors") return Target::Safetensors;
  return fail(ErrorCode::InvalidArgument,
              "cannot export to {} -- its name says no format -- let it end in .pt, .pth, .pth.tar or .safetensors",
              path);
}

Result<void> write(const ExportOptions& options, Target target, const PtValue& value,
                   const std::vector<NamedTensor>& tensors) {
  if (target == Target::Pt) return write_pt(options.to, value, {.floats = options.floats});
  return write_safetensors(options.to, tensors, {{"format", "pt"}});
}

/// The tensors of a checkpoint. One is in memory at a time; the others have reserved addresses without memory.
class LazyTensors {
 public:
  explicit LazyTensors(TensorReader reader) : reader_(std::move(reader)) {}
  LazyTensors(const LazyTensors&) = delete;
  LazyTensors& operator=(const LazyTensors&) = delete;
  ~LazyTensors() {
    if (addresses_ != MAP_FAILED) ::munmap(addresses_, bytes_);
  }

  /// Returns the tensors whose names begin with `prefix`, named without the prefix, in the order of a safetensors file.
  Result<std::vector<NamedTensor>> views(std::string_view prefix) {
    std::vector<NamedTensor> found;
    for (const auto& [name, tensor] : reader_.all().tensors) {
      if (!name.starts_with(prefix)) continue;
      NamedTensor view{name.substr(prefix.size()), {tensor.type, tensor.sizes(), {}}};
      const auto size = static_cast<std::size_t>(byte_count(tensor.type, tensor.sizes()).value_or(0));
      if (tensor.sizes().empty()) {  // numbers are read immediately
        std::vector<std::byte>& number = numbers_.emplace_back(size);
        if (auto done = reader_.read(name, number); !done) return tl::unexpected(done.error());
        view.tensor.bytes = number;
      } else {
        if (auto done = reserve(); !done) return tl::unexpected(done.error());
        const std::byte* const address = static_cast<const std::byte*>(addresses_) + used_;
        view.tensor.bytes = {address, size};
        names_.emplace(address, name);
        used_ += std::max<std::size_t>(size, 1);
      }
      found.push_back(std::move(view));
    }
    const auto layout = lay_out_safetensors(found);
    if (!layout) return tl::unexpected(layout.error());
    std::vector<NamedTensor> ordered;
    for (const std::size_t index : layout->order) ordered.push_back(std::move(found[index]));
    return ordered;
  }

  /// Returns the bytes of a view, valid until the next call.
  Result<std::span<const std::byte>> load(std::span<const std::byte> view) {
    const auto name = names_.find(view.data());
    if (name == names_.end()) return view;
    try {
      current_.resize(view.size());
    } catch (const std::bad_alloc&) {
      return fail(ErrorCode::Unavailable, "tensor '{}' of {} bytes does not fit into memory -- free some memory",
                  name->second, view.size());
    }
    if (auto done = reader_.read(name->second, current_); !done) return tl::unexpected(done.error());
    return std::span<const std::byte>(current_);
  }

  const TensorReader& reader() const noexcept { return reader_; }

 private:
  Result<void> reserve() {
    if (addresses_ != MAP_FAILED) return {};
    for (const auto& [name, tensor] : reader_.all().tensors)
      bytes_ += std::max<std::size_t>(byte_count(tensor.type, tensor.sizes()).value_or(0), 1);
    addresses_ = ::mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (addresses_ == MAP_FAILED)
      return fail(ErrorCode::Unavailable, "cannot export -- no addresses for {} bytes: {} -- raise ulimit -v", bytes_,
                  errno_text(errno));
    return {};
  }

  TensorReader reader_;
  void* addresses_ = MAP_FAILED;
  std::size_t bytes_ = 0, used_ = 0;
  std::map<const std::byte*, std::string> names_;
  std::deque<std::vector<std::byte>> numbers_;
  std::vector<std::byte> current_;
};

Result<void> write(const ExportOptions& options, Target target, const PtValue& value,
                   const std::vector<NamedTensor>& tensors, LazyTensors& lazy) {
  const auto load = [&](std::span<const std::byte> view) { return lazy.load(view); };
  if (target == Target::Pt) return write_pt(options.to, value, {.floats = options.floats, .load = load});
  auto file = sys::AtomicFile::create(options.to);
  if (!file) return tl::unexpected(file.error());
  const auto layout = lay_out_safetensors(tensors, {{"format", "pt"}});
  if (!layout) return tl::unexpected(layout.error());
  if (auto done = file->writer().write(layout->head); !done) return done;
  for (const std::size_t index : layout->order) {
    const auto bytes = lazy.load(tensors[index].tensor.bytes);
    if (!bytes) return tl::unexpected(bytes.error());
    if (auto done = file->writer().write(*bytes); !done) return done;
  }
  return file->commit();
}

ExportSummary summary_of(std::string from, const std::vector<NamedTensor>& tensors) {
  ExportSummary summary{std::move(from), tensors.size(), 0};
  for (const NamedTensor& entry : tensors) summary.bytes += entry.tensor.bytes.size();
  return summary;
}

Result<ExportSummary> export_checkpoint(const ExportOptions& options, Target target,
                                        const StoredCheckpoint& checkpoint) {
  const bool everything_of_it = options.content == ExportContent::Everything;
  auto reader = TensorReader::open(checkpoint, everything_of_it);
  if (!reader) return tl::unexpected(reader.error());
  LazyTensors lazy(std::move(*reader));
  const auto model = lazy.views(kModelPrefix);
  if (!model) return tl::unexpected(model.error());
  PtValue value = dict_of(*model);
  if (everything_of_it) {
    std::optional<PtValue> state;
    const auto& files = lazy.reader().all().files;
    if (const auto optimizer = files.find(kOptimizerFile); optimizer != files.end()) {
      auto views = lazy.views(kOptimizerPrefix);
      if (!views) return tl::unexpected(views.error());
      auto made =
          torch_optimizer(*views, optimizer->second.metadata, fmt::format("{}/{}", checkpoint.folder, kOptimizerFile));
      if (!made) return tl::unexpected(made.error());
      state = std::move(*made);
    }
    value = everything(checkpoint.manifest, *model, std::move(state));
  }
  if (auto done = write(options, target, value, *model, lazy); !done) return tl::unexpected(done.error());
  return summary_of(checkpoint.folder, *model);
}

Result<ExportSummary> export_newest(const ExportOptions& options, Target target) {
  auto list = list_checkpoints(options.from);
  if (!list) return tl::unexpected(list.error());
  for (const Error& error : list->damaged) log::warn("checkpoint", "passed over: {}", error.what());
  for (; !list->sound.empty(); list->sound.pop_back()) {
    if (list->unjudged_above(list->sound.back().manifest.generation)) break;
    auto summary = export_checkpoint(options, target, list->sound.back());
    if (summary || summary.error().code() != ErrorCode::Corrupt) return summary;
    log::warn("checkpoint", "passed over: {}", summary.error().what());
  }
  if (const auto unjudged = list->unjudged_above(0)) return tl::unexpected(*unjudged);
  return fail(
      ErrorCode::InvalidArgument,
      "cannot export from {} -- it is neither a checkpoint nor a folder with one that is whole -- check the path",
      options.from);
}

}  // namespace

Result<ExportSummary> export_weights(const ExportOptions& options) {
  const auto target = target_of(options.to);
  if (!target) return tl::unexpected(target.error());
  if (options.content == ExportContent::Everything && *target != Target::Pt) {
    return fail(ErrorCode::InvalidArgument,
                "cannot export everything to {} -- safetensors holds tensors alone -- export to a .pt", options.to);
  }
  std::error_code ignored;
  if (fs::is_directory(options.from, ignored)) {
    if (!options.key.empty())
      return fail(ErrorCode::InvalidArgument,
                  "cannot export the key '{}' of {} -- that is a checkpoint, and keys are of a .pt -- leave --key out",
                  options.key, options.from);
    if (!fs::exists(fs::path(options.from) / kManifestFile, ignored)) return export_newest(options, *target);
    const auto checkpoint = read_checkpoint(options.from);
    if (!checkpoint) return tl::unexpected(checkpoint.error());
    return export_checkpoint(options, *target, *checkpoint);
  }
  if (options.content == ExportContent::Everything) {
    return fail(ErrorCode::InvalidArgument, "cannot export everything from {} -- it is no checkpoint", options.from);
  }
  const auto weights = read_weights(options.from, {.key = options.key});
  if (!weights) return tl::unexpected(weights.error());
  if (auto done = write(options, *target, dict_of(weights->tensors), weights->tensors); !done)
    return tl::unexpected(done.error());
  return summary_of(options.from, weights->tensors);
}

}  // namespace cohort::formats
