#include <cohort/torch/checkpoint.h>

#include "base/log.h"
#include "base/result.h"
#include "formats/checkpoint_folder.h"
#include "formats/safetensors.h"
#include "torch/checkpoint_collective.h"
#include "torch/checkpoint_optimizer.h"
#include "torch/checkpoint_tensors.h"

#include <array>
#include <mutex>

// clang-format off
#include <ATen/CPUGeneratorImpl.h>
// clang-format on

namespace cohort {
namespace {

namespace ck = checkpoint;

// The files of a checkpoint: docs/reference/checkpoint-format.md.
constexpr const char* kModel = "model.safetensors";
constexpr const char* kOptimizer = "optimizer.safetensors";
constexpr const char* kRandom = "random.safetensors";

std::string rank_name(int rank) { return fmt::format("rank/{}", rank); }

std::string random_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const at::Tensor state = generator.get_state().contiguous();
  return {static_cast<const char*>(state.data_ptr()), state.nbytes()};
}

void set_random_state(const at::Tensor& state) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

CheckpointInfo info_of(const formats::StoredCheckpoint& stored) {
  const formats::Manifest& manifest = stored.manifest;
  CheckpointInfo info{stored.folder,
                      manifest.generation,
                      manifest.world_size,
                      manifest.created,
                      {manifest.step, manifest.epoch, {}, manifest.values}};
  if (manifest.sampler) {
    info.progress.sampler = data::SamplerState{manifest.sampler->seed, manifest.sampler->epoch,
                                               manifest.sampler->cursor, manifest.sampler->size};
  }
  return info;
}

/// Rank 0's work of a save.
formats::StoredCheckpoint write(const CheckpointOptions& options, const torch::nn::Module& module,
                                const torch::optim::Optimizer* optimizer, const TrainingProgress& progress,
                                const std::vector<std::string>& random_states) {
  if (progress.step < 0 || progress.epoch < 0) {
    raise(ErrorCode::InvalidArgument, "cannot save the checkpoint -- step {} and epoch {} must not be negative",
          progress.step, progress.epoch);
  }
  formats::Manifest manifest;
  manifest.step = progress.step;
  manifest.epoch = progress.epoch;
  manifest.world_size = static_cast<int>(random_states.size());
  manifest.program = fmt::format("cohort, libtorch {}", TORCH_VERSION);
  manifest.values = progress.values;
  if (progress.sampler) {
    if (progress.sampler->epoch < 0 || progress.sampler->cursor < 0 || progress.sampler->size < 0) {
      raise(ErrorCode::InvalidArgument, "cannot save the checkpoint -- the sampler's position must not be negative");
    }
    manifest.sampler = formats::SamplerPosition{progress.sampler->seed, progress.sampler->epoch,
                                                progress.sampler->cursor, progress.sampler->size};
  }
  // Before anything is written: what cannot be saved should not cost a disk full of bytes.
  ck::Snapshot model;
  for (const auto& [name, tensor] : ck::named_tensors(module)) model.add(name, tensor);
  std::optional<ck::OptimizerSnapshot> optimizer_state;
  if (optimizer != nullptr) optimizer_state = ck::snapshot(*optimizer, module);
  std::vector<formats::NamedTensor> random;
  for (std::size_t rank = 0; rank < random_states.size(); ++rank) {
    const std::string& state = random_states[rank];
    random.push_back(
        {rank_name(static_cast<int>(rank)),
         {formats::ElementType::UInt8, {static_cast<std::int64_t>(state.size())}, formats::as_bytes(state)}});
  }

  auto writer = value_or_throw(formats::CheckpointWriter::begin(options.folder, std::move(manifest)));
  value_or_throw(writer.add(kModel, [&](const formats::Sink& sink) {
    return formats::write_safetensors(sink, model.tensors(), {{"format", "pt"}});
  }));
  if (optimizer_state) {
    value_or_throw(writer.add(kOptimizer, [&](const formats::Sink& sink) {
      return formats::write_safetensors(sink, optimizer_state->tensors.tensors(), optimizer_state->metadata);
    }));
  }
  value_or_throw(
      writer.add(kRandom, [&](const formats::Sink& sink) { return formats::write_safetensors(sink, random); }));
  return value_or_throw(writer.commit(options.keep));
}

/// A checkpoint's bytes, all checked.
struct Loaded {
  formats::StoredCheckpoint stored;
  std::map<std::string, sys::FileBytes> files;
};

/// Rank 0's work of a load: the newest checkpoint that is whole.
std::optional<Loaded> read_newest(const std::string& folder) {
  formats::CheckpointList list = value_or_throw(formats::list_checkpoints(folder));
  std::string reasons;
  const auto pass_over = [&](const Error& error) {
    log::warn("checkpoint", "passed over: {}", error.what());
    reasons += fmt::format("{}{}", reasons.empty() ? "" : "; ", error.what());
  };
  for (const Error& error : list.damaged) pass_over(error);
  while (!list.sound.empty()) {
    Loaded loaded{std::move(list.sound.back()), {}};
    list.sound.pop_back();
    std::optional<Error> problem;
    for (const auto& [name, digest] : loaded.stored.manifest.files) {
      auto bytes = formats::read_checkpoint_file(loaded.stored, name);
      if (bytes) {
        loaded.files.emplace(name, std::move(*bytes));
        continue;
      }
      problem = bytes.error();
      break;
    }
    if (!problem) return loaded;
    pass_over(*problem);
  }
  if (reasons.empty()) return std::nullopt;
  raise(ErrorCode::Corrupt,
        "cannot load a checkpoint from {} -- all of them are damaged: {} -- restore one from a copy, or start anew in "
        "another folder",
        folder, reasons);
}

}  // namespace

CheckpointFolder::CheckpointFolder(Communicator communicator, CheckpointOptions options)
    : communicator_(std::move(communicator)), options_(std::move(options)) {
  if (options_.folder.empty()) raise(ErrorCode::InvalidArgument, "a CheckpointFolder needs the name of a folder");
  if (options_.keep < 1)
    raise(ErrorCode::InvalidArgument, "a CheckpointFolder keeps at least 1 checkpoint, not {}", options_.keep);
}

CheckpointInfo CheckpointFolder::save(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                                      const TrainingProgress& progress) {
  const std::vector<std::string> random_states = ck::gather(communicator_, random_state());
  formats::StoredCheckpoint stored;
  std::optional<Error> error;
  std::string text;
  if (ck::rank_of(communicator_) == 0) {
    error = ck::attempt([&] {
      stored = write(options_, module, optimizer, progress, random_states);
      text = value_or_throw(formats::to_json(stored.manifest));
    });
  }
  text = ck::share(communicator_, text, error);
  stored.folder = ck::share(communicator_, stored.folder, std::nullopt);
  stored.manifest = value_or_throw(formats::parse_manifest(text, stored.folder));
  return info_of(stored);
}

std::optional<CheckpointInfo> CheckpointFolder::load_latest(torch::nn::Module& module,
                                                            torch::optim::Optimizer* optimizer) {
  std::optional<Loaded> loaded;
  std::optional<Error> error;
  std::string text;
  const bool reads = ck::rank_of(communicator_) == 0;
  if (reads) {
    error = ck::attempt([&] {
      loaded = read_newest(options_.folder);
      if (loaded) text = value_or_throw(formats::to_json(loaded->stored.manifest));
    });
  }
  text = ck::share(communicator_, text, error);
  if (text.empty()) return std::nullopt;

  // The same bytes go to every rank: no other rank needs to see the disk, and none can see other bytes.
  Loaded here;
  here.stored.folder = ck::share(communicator_, loaded ? loaded->stored.folder : std::string(), std::nullopt);
  ck::agree(communicator_, ck::attempt([&] {
              here.stored.manifest = value_or_throw(formats::parse_manifest(text, here.stored.folder));
              if (reads) here.files = std::move(loaded->files);
              for (const auto& [name, digest] : here.stored.manifest.files) {
                if (!reads && (name != kOptimizer || optimizer != nullptr))
                  here.files.emplace(name, sys::FileBytes(static_cast<std::size_t>(digest.bytes)));
              }
              if (optimizer == nullptr) here.files.erase(kOptimizer);
            }));
  for (auto& [name, bytes] : here.files) ck::share_bytes(communicator_, {bytes.data(), bytes.size()});

  // Everything is looked at before anything is changed, and nothing is changed before all ranks have looked.
  ck::Assignment weights;
  std::function<void()> restore_optimizer = [] {};
  std::optional<at::Tensor> random;
  ck::agree(communicator_, ck::attempt([&] {
              const auto parse = [&](const char* name) {
                const auto found = here.files.find(name);
                const std::string path = fmt::format("{}/{}", here.stored.folder, name);
                if (found == here.files.end()) {
                  raise(ErrorCode::InvalidArgument,
                        "{}: the checkpoint was saved without it -- pass nullptr for the optimizer", path);
                }
                return value_or_throw(formats::parse_safetensors(found->second.bytes(), path));
              };
              weights = ck::match(ck::named_tensors(module), parse(kModel).tensors,
                                  fmt::format("{}/{}", here.stored.folder, kModel), {});
              for (const auto& copy : weights.copies) {
                if (ck::to_element_type(copy.to.scalar_type()) != copy.from.type) {
                  raise(ErrorCode::InvalidArgument,
                        "{}: tensor '{}' is {} there and {} here -- make the model as it was made then",
                        here.stored.folder, copy.name, formats::info(copy.from.type).torch,
                        c10::toString(copy.to.scalar_type()));
                }
              }
              if (optimizer != nullptr) {
                const formats::Safetensors state = parse(kOptimizer);
                restore_optimizer = ck::restore(*optimizer, module, state.tensors, state.metadata,
                                                fmt::format("{}/{}", here.stored.folder, kOptimizer));
              }
              const formats::Safetensors states = parse(kRandom);
              const int rank = ck::rank_of(communicator_);
              if (const auto* state = states.find(rank_name(rank))) {
                random = ck::to_tensor(*state, rank_name(rank));
              } else {
                log::info("checkpoint", "{}: saved by {} ranks; rank {} keeps its own random state", here.stored.folder,
                          here.stored.manifest.world_size, rank);
              }
            }));
  ck::agree(communicator_, ck::attempt([&] {
              // The one step that may yet fail (a generator's state of another libtorch) comes first.
              if (random) set_random_state(*random);
              weights.apply();
              restore_optimizer();
            }));
  return info_of(here.stored);
}

std::vector<CheckpointInfo> CheckpointFolder::list() const {
  std::vector<CheckpointInfo> infos;
  for (const auto& stored : value_or_throw(formats::list_checkpoints(options_.folder)).sound)
    infos.push_back(info_of(stored));
  return infos;
}

}  // namespace cohort
