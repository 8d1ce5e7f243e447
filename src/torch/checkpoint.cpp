#include <cohort/torch/checkpoint.h>

#include "base/log.h"
#include "base/result.h"
#include "telemetry/status_page.h"
#include "torch/checkpoint_tensors.h"
#include "train/checkpoint/background.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/exchange.h"
#include "train/formats/safetensors.h"

#include <functional>
#include <mutex>
#include <numeric>

namespace cohort {
namespace {

namespace ck = checkpoint;
using ck::generators_of;
using ck::state_of;

/// Generators whose states are known, each with its own, the CPU's first.
std::vector<std::pair<at::Generator, at::Tensor>> known(const torch::nn::Module& module, const RankState& random,
                                                        const std::string& folder) {
  std::vector<std::pair<at::Generator, at::Tensor>> all;
  for (auto& [name, generator] : generators_of(module)) {
    const auto saved = random.find(name);
    if (saved == random.end()) continue;
    if (name != "cpu" && state_of(generator).nbytes() != saved->second.nbytes()) {
      raise(ErrorCode::InvalidArgument,
            "{}: the random state '{}' has {} bytes, which is not how this libtorch's generator has it -- load it "
            "with the version that saved it",
            folder, name, saved->second.nbytes());
    }
    all.emplace_back(generator, saved->second);
  }
  return all;
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

formats::Manifest manifest_of(const TrainingProgress& progress) {
  if (progress.step < 0 || progress.epoch < 0) {
    raise(ErrorCode::InvalidArgument, "cannot save the checkpoint -- step {} and epoch {} must not be negative",
          progress.step, progress.epoch);
  }
  formats::Manifest manifest;
  manifest.step = progress.step;
  manifest.epoch = progress.epoch;
  manifest.program = fmt::format("cohort, libtorch {}", TORCH_VERSION);
  manifest.values = progress.values;
  if (progress.sampler) {
    if (progress.sampler->epoch < 0 || progress.sampler->cursor < 0 || progress.sampler->size < 0) {
      raise(ErrorCode::InvalidArgument, "cannot save the checkpoint -- the sampler's position must not be negative");
    }
    manifest.sampler = formats::SamplerPosition{progress.sampler->seed, progress.sampler->epoch,
                                                progress.sampler->cursor, progress.sampler->size};
  }
  return manifest;
}

/// What a rank brings to a save, and what its bundle's views are of.
struct Brought {
  ck::Snapshot model, state, random;
  std::optional<ck::OptimizerSnapshot> optimizer;
  ck::Bundle bundle;
};

/// Agreed on: throws on all ranks if one cannot.
std::unique_ptr<Brought> bring(Communicator& comm, const torch::nn::Module& module,
                               const torch::optim::Optimizer* optimizer, const TrainingProgress& progress,
                               const RankState& state) {
  auto all = std::make_unique<Brought>();
  ck::agree(comm, ck::attempt([&] {
              if (ck::rank_of(comm) == 0) {
                all->bundle.manifest = manifest_of(progress);
                for (const auto& [name, tensor] : ck::named_tensors(module)) all->model.add(name, tensor);
                all->bundle.files.push_back({ck::kModelFile, all->model.tensors(), {{"format", "pt"}}});
                if (optimizer != nullptr) {
                  all->optimizer = ck::snapshot(*optimizer, module);
                  all->bundle.files.push_back(
                      {ck::kOptimizerFile, all->optimizer->tensors.tensors(), all->optimizer->metadata});
                }
              }
              for (const auto& [name, tensor] : state) all->state.add(name, tensor);
              all->bundle.state = all->state.tensors();
              for (auto& [name, generator] : generators_of(module)) all->random.add(name, state_of(generator));
              all->bundle.random = all->random.tensors();
            }));
  return all;
}

/// The tensors of a part whose names begin with `prefix`, without it.
RankState tensors_of(std::span<const std::byte> part, const std::string& name, const std::string& prefix) {
  RankState found;
  for (const auto& [key, tensor] : value_or_throw(formats::parse_safetensors(part, name)).tensors) {
    if (key.starts_with(prefix)) found.emplace(key.substr(prefix.size()), ck::to_tensor(tensor, key));
  }
  return found;
}

}  // namespace

bool CheckpointSave::done() const { return pending_->done(); }

CheckpointInfo CheckpointSave::wait() { return info_of(pending_->wait()); }

struct CheckpointFolder::State {
  Communicator communicator;
  const ck::FolderOptions options;
  ck::BackgroundSaver saver{options};
  std::optional<formats::StoredCheckpoint> loaded = {};
  RankState rank_state = {};  // of `loaded`
};

CheckpointFolder::CheckpointFolder(Communicator communicator, CheckpointOptions options) {
  if (options.folder.empty()) raise(ErrorCode::InvalidArgument, "a CheckpointFolder needs the name of a folder");
  if (options.keep < 1)
    raise(ErrorCode::InvalidArgument, "a CheckpointFolder keeps at least 1 checkpoint, not {}", options.keep);
  if (options.copies < 1)
    raise(ErrorCode::InvalidArgument, "a CheckpointFolder has at least 1 copy of each file, not {}", options.copies);
  const ck::FolderOptions folder{std::move(options.folder), options.keep, options.place, options.copies};
  state_ = std::shared_ptr<State>(new State{std::move(communicator), folder});
}

CheckpointInfo CheckpointFolder::save(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                                      const TrainingProgress& progress, const RankState& state) {
  return status::called("CheckpointFolder::save", [&] {
    state_->saver.settle(state_->communicator);
    const auto brought = bring(state_->communicator, module, optimizer, progress, state);
    return info_of(ck::save(state_->communicator, state_->options, brought->bundle));
  });
}

CheckpointSave CheckpointFolder::save_async(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                                            const TrainingProgress& progress, const RankState& state) {
  return status::called("CheckpointFolder::save_async", [&] {
    Communicator& comm = state_->communicator;
    ck::BackgroundSaver& saver = state_->saver;
    saver.settle(comm);
    const auto brought = bring(comm, module, optimizer, progress, state);
    if (saver.needs_communicator(comm)) saver.adopt(comm.split({.background = true}));
    return CheckpointSave(saver.start(comm, brought->bundle));
  });
}

std::optional<CheckpointInfo> CheckpointFolder::load_latest(torch::nn::Module& module,
                                                            torch::optim::Optimizer* optimizer) {
  Communicator& comm = state_->communicator;
  state_->saver.settle(comm);
  ck::Found found =
      ck::load_newest(comm, state_->options,
                      optimizer == nullptr ? std::set<std::string>{ck::kOptimizerFile} : std::set<std::string>());
  if (ck::rank_of(comm) == 0) {
    for (const std::string& reason : found.passed_over) log::warn("checkpoint", "passed over: {}", reason);
  }
  if (!found.stored) {
    if (found.passed_over.empty()) return std::nullopt;
    throw ck::all_damaged(state_->options, found.passed_over);
  }
  const std::string folder = found.stored->folder;

  // Everything is looked at before anything is changed, and nothing is changed before all ranks have looked.
  ck::Assignment weights;
  std::function<void()> restore_optimizer = [] {};
  std::vector<std::pair<at::Generator, at::Tensor>> generators;
  RankState state;
  ck::agree(comm, ck::attempt([&] {
              const auto parse = [&](const char* name) {
                const auto file = found.files.find(name);
                const std::string path = fmt::format("{}/{}", folder, name);
                if (file == found.files.end()) {
                  raise(ErrorCode::InvalidArgument,
                        "{}: the checkpoint was saved without it -- pass nullptr for the optimizer", path);
                }
                return value_or_throw(formats::parse_safetensors(file->second.bytes(), path));
              };
              const std::string source = fmt::format("{}/{}", folder, ck::kModelFile);
              weights = ck::match(ck::named_tensors(module), parse(ck::kModelFile).tensors, source, {});
              for (const auto& copy : weights.copies) {
                if (ck::to_element_type(copy.to.scalar_type()) != copy.from.type) {
                  raise(ErrorCode::InvalidArgument,
                        "{}: tensor '{}' is {} there and {} here -- make the model as it was made then", folder,
                        copy.name, formats::info(copy.from.type).torch, c10::toString(copy.to.scalar_type()));
                }
              }
              if (optimizer != nullptr) {
                const formats::Safetensors saved = parse(ck::kOptimizerFile);
                restore_optimizer = ck::restore(*optimizer, module, saved.tensors, saved.metadata,
                                                fmt::format("{}/{}", folder, ck::kOptimizerFile));
              }
              const int rank = ck::rank_of(comm);
              RankState random;
              if (found.part) {
                const std::string name = fmt::format("{}/{}", folder, ck::part_file(rank));
                state = tensors_of(found.part->bytes(), name, ck::kStatePrefix);
                random = tensors_of(found.part->bytes(), name, ck::kRandomPrefix);
              } else if (found.files.contains(ck::kRandomFile)) {
                const formats::Safetensors states = parse(ck::kRandomFile);
                for (const auto& [generator, own] : generators_of(module)) {
                  const std::string name = ck::random_name(rank, generator);
                  if (const auto* saved = states.find(name)) random.emplace(generator, ck::to_tensor(*saved, name));
                }
              }
              generators = known(module, random, folder);
              if (random.empty()) {
                log::info("checkpoint", "{}: saved by {} ranks; rank {} keeps its own random state", folder,
                          found.stored->manifest.world_size, rank);
              }
            }));
  ck::agree(comm, ck::attempt([&] {
              // The one step that may yet fail (the CPU generator's state of another libtorch) comes first.
              for (auto& [generator, saved] : generators) {
                const std::lock_guard<std::mutex> lock(generator.mutex());
                generator.set_state(saved);
              }
              weights.apply();
              restore_optimizer();
            }));
  state_->rank_state = std::move(state);
  state_->loaded = std::move(found.stored);
  return info_of(*state_->loaded);
}

const RankState& CheckpointFolder::rank_state() const {
  if (!state_->loaded)
    raise(ErrorCode::InvalidArgument, "rank_state: no checkpoint has been loaded -- load_latest first");
  return state_->rank_state;
}

std::map<int, RankState> CheckpointFolder::parts(const std::set<int>& saved_ranks) {
  Communicator& comm = state_->communicator;
  ck::agree(comm, ck::attempt([&] { static_cast<void>(rank_state()); }));
  const auto bytes = ck::load_parts(comm, state_->options, *state_->loaded, saved_ranks);
  std::map<int, RankState> parts;
  ck::agree(comm, ck::attempt([&] {
              for (const auto& [rank, part] : bytes) {
                parts.emplace(
                    rank, tensors_of(part.bytes(), fmt::format("{}/{}", state_->loaded->folder, ck::part_file(rank)),
                                     ck::kStatePrefix));
              }
            }));
  return parts;
}

std::map<int, RankState> CheckpointFolder::parts() {
  std::set<int> all;
  for (int rank = 0; state_->loaded && rank < state_->loaded->manifest.world_size; ++rank) all.insert(rank);
  return parts(all);
}

void CheckpointFolder::close() { state_->saver.close(); }

std::vector<CheckpointInfo> CheckpointFolder::list() const {
  std::vector<CheckpointInfo> infos;
  for (const auto& stored : value_or_throw(formats::list_checkpoints(state_->options.path)).sound)
    infos.push_back(info_of(stored));
  return infos;
}

}  // namespace cohort
