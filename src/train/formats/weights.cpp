#include "train/formats/weights.h"

#include "base/log.h"
#include "base/result.h"
#include "train/formats/checkpoint_folder.h"
#include "train/formats/safetensors.h"
#include "train/formats/shards.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace cohort::formats {

Result<Weights> read_weights(const std::string& path, const WeightsOptions& options) {
  const bool pt = is_pt(path);
  auto converted = pt ? read_pt(path, options.key) : Result<sys::UniqueFd>();
  if (!converted) return tl::unexpected(converted.error());
  auto bytes = sys::read_file(pt ? fmt::format("/proc/self/fd/{}", converted->get()) : path);
  if (!bytes) return tl::unexpected(bytes.error());
  if (bytes->size() < 9 || bytes->text()[8] != '{')
    return fail(ErrorCode::Corrupt, "{}: neither safetensors nor a .pt -- is it the right file?", path);
  auto parsed = parse_safetensors(bytes->bytes(), path);
  if (!parsed) return tl::unexpected(parsed.error());
  if (!pt && !options.key.empty()) {
    return fail(ErrorCode::InvalidArgument, "{}: safetensors has no keys to choose from ('{}' was asked for)", path,
                options.key);
  }
  return Weights{std::move(parsed->tensors), std::move(parsed->metadata), *std::move(bytes)};
}

namespace {

namespace fs = std::filesystem;

const std::map<std::string, std::string> kMetadata = {{"format", "pt"}};

enum class Target : std::uint8_t { Pt, Safetensors };

Result<Target> target_of(const std::string& path) {
  const std::string extension = fs::path(path).extension().string();
  if (extension == ".pt" || extension == ".pth" || extension == ".tar") return Target::Pt;
  if (extension == ".safetensors") return Target::Safetensors;
  return fail(ErrorCode::InvalidArgument,
              "cannot export to {} -- its name says no format -- let it end in .pt, .pth, .pth.tar or .safetensors",
              path);
}

/// Writes the safetensors that `put` gives; a .pt is made of them in a file without a name beside it.
Result<void> write(const ExportOptions& options, Target target, const std::function<Result<void>(const Sink&)>& put) {
  auto file = sys::AtomicFile::create(options.to);
  if (!file) return tl::unexpected(file.error());
  auto done = put([&](std::span<const std::byte> bytes) { return file->writer().write(bytes); });
  if (!done) return done;
  if (target == Target::Safetensors) return file->commit();
  return write_pt(options.to, file->writer().fd(), options.content, options.floats);
}

/// Writes tensors of a checkpoint, one of which is in memory at a time. `prefix`: left out of their names.
Result<void> put_tensors(TensorReader& reader, const std::vector<NamedTensor>& tensors, std::string_view prefix,
                         const std::map<std::string, std::string>& metadata, const Sink& sink) {
  const auto layout = lay_out_safetensors(tensors, metadata);
  if (!layout) return tl::unexpected(layout.error());
  if (auto done = sink(as_bytes(layout->head)); !done) return done;
  std::vector<std::byte> bytes;
  for (const std::size_t index : layout->order) {
    const auto& [name, tensor] = tensors[index];
    const std::uint64_t size = *byte_count(tensor.type, tensor.shape);
    try {
      bytes.resize(size);
    } catch (const std::bad_alloc&) {
      return fail(ErrorCode::Unavailable, "tensor '{}' of {} bytes does not fit into memory -- free some memory", name,
                  size);
    }
    if (auto done = reader.read(fmt::format("{}{}", prefix, name), bytes); !done) return done;
    if (auto done = sink(bytes); !done) return done;
  }
  return {};
}

Result<ExportSummary> export_checkpoint(const ExportOptions& options, Target target,
                                        const StoredCheckpoint& checkpoint) {
  const bool everything = options.content == PtContent::Everything;
  auto reader = TensorReader::open(checkpoint, everything);
  if (!reader) return tl::unexpected(reader.error());
  const std::string_view prefix = everything ? std::string_view() : kModelPrefix;
  ExportSummary summary{checkpoint.folder, 0, 0};
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : reader->all().tensors) {
    if (!name.starts_with(prefix)) continue;
    tensors.push_back({name.substr(prefix.size()), {tensor.type, tensor.sizes(), {}}});
    if (!name.starts_with(kModelPrefix)) continue;
    ++summary.tensors;
    summary.bytes += byte_count(tensor.type, tensor.sizes()).value_or(0);
  }
  std::map<std::string, std::string> metadata = kMetadata;
  if (everything) {
    const auto& files = reader->all().files;
    if (const auto optimizer = files.find(kOptimizerFile); optimizer != files.end()) {
      metadata = optimizer->second.metadata;
      metadata["optimizer"] = fmt::format("{}/{}", checkpoint.folder, kOptimizerFile);
    }
    auto manifest = to_json(checkpoint.manifest);
    if (!manifest) return tl::unexpected(manifest.error());
    metadata["manifest"] = *std::move(manifest);
  }
  auto done =
      write(options, target, [&](const Sink& sink) { return put_tensors(*reader, tensors, prefix, metadata, sink); });
  if (!done) return tl::unexpected(done.error());
  return summary;
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
  if (options.content == PtContent::Everything && *target != Target::Pt) {
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
  if (options.content == PtContent::Everything) {
    return fail(ErrorCode::InvalidArgument, "cannot export everything from {} -- it is no checkpoint", options.from);
  }
  const auto weights = read_weights(options.from, {.key = options.key});
  if (!weights) return tl::unexpected(weights.error());
  const std::vector<NamedTensor>& tensors = weights->tensors;
  auto done = write(options, *target, [&](const Sink& sink) { return write_safetensors(sink, tensors, kMetadata); });
  if (!done) return tl::unexpected(done.error());
  ExportSummary summary{options.from, tensors.size(), 0};
  for (const NamedTensor& entry : tensors) summary.bytes += entry.tensor.bytes.size();
  return summary;
}

}  // namespace cohort::formats
