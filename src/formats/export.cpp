#include "formats/export.h"

#include "base/log.h"
#include "formats/checkpoint_folder.h"
#include "formats/safetensors.h"
#include "formats/torch_optimizer.h"
#include "formats/weights.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>

namespace cohort::formats {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModel = "model.safetensors";
constexpr const char* kOptimizer = "optimizer.safetensors";

PtValue dict_of(const std::vector<NamedTensor>& tensors) {
  PtDict dict;
  for (const NamedTensor& entry : tensors) dict.add(entry.name, pt_tensor(entry.tensor));
  return pt_dict(std::move(dict));
}

PtValue everything(const Manifest& manifest, const Weights& model, std::optional<PtValue> optimizer) {
  PtDict root;
  root.add("model", dict_of(model.tensors));
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

Result<Weights> read_file_of(const StoredCheckpoint& checkpoint, const std::string& name) {
  auto bytes = read_checkpoint_file(checkpoint, name);
  if (!bytes) return tl::unexpected(bytes.error());
  auto weights = parse_weights(bytes->bytes(), fmt::format("{}/{}", checkpoint.folder, name));
  if (weights) weights->file = std::move(*bytes);
  return weights;
}

ExportSummary summary_of(std::string from, const std::vector<NamedTensor>& tensors) {
  ExportSummary summary{std::move(from), tensors.size(), 0};
  for (const NamedTensor& entry : tensors) summary.bytes += entry.tensor.bytes.size();
  return summary;
}

Result<ExportSummary> export_checkpoint(const ExportOptions& options, Target target,
                                        const StoredCheckpoint& checkpoint) {
  const auto model = read_file_of(checkpoint, kModel);
  if (!model) return tl::unexpected(model.error());
  PtValue value;
  if (options.content == ExportContent::Weights) {
    value = dict_of(model->tensors);
    if (auto done = write(options, target, value, model->tensors); !done) return tl::unexpected(done.error());
    return summary_of(checkpoint.folder, model->tensors);
  }
  Weights optimizer;  // what the value views
  std::optional<PtValue> state;
  if (checkpoint.manifest.files.contains(kOptimizer)) {
    auto read = read_file_of(checkpoint, kOptimizer);
    if (!read) return tl::unexpected(read.error());
    optimizer = std::move(*read);
    auto made = torch_optimizer(optimizer, fmt::format("{}/{}", checkpoint.folder, kOptimizer));
    if (!made) return tl::unexpected(made.error());
    state = std::move(*made);
  }
  value = everything(checkpoint.manifest, *model, std::move(state));
  if (auto done = write(options, target, value, {}); !done) return tl::unexpected(done.error());
  return summary_of(checkpoint.folder, model->tensors);
}

Result<ExportSummary> export_newest(const ExportOptions& options, Target target) {
  auto list = list_checkpoints(options.from);
  if (!list) return tl::unexpected(list.error());
  for (const Error& error : list->damaged) log::warn("checkpoint", "passed over: {}", error.what());
  for (; !list->sound.empty(); list->sound.pop_back()) {
    if (!list->newer.empty() && list->newer.back().first > list->sound.back().manifest.generation) break;
    auto summary = export_checkpoint(options, target, list->sound.back());
    if (summary || summary.error().code() != ErrorCode::Corrupt) return summary;
    log::warn("checkpoint", "passed over: {}", summary.error().what());
  }
  if (!list->newer.empty()) return tl::unexpected(list->newer.back().second);
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
