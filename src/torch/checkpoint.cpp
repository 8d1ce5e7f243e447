#include <cohort/torch/checkpoint.h>

#include "base/log.h"
#include "base/parse.h"
#include "base/result.h"
#include "telemetry/status_page.h"
#include "torch/checkpoint_tensors.h"
#include "train/checkpoint/background.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/exchange.h"
#include "train/formats/safetensors.h"
#include "train/formats/shards.h"

#include <cohort/torch/parallel.h>
#include <cohort/torch/sharded.h>

#include <algorithm>
#include <functional>
#include <list>
#include <mutex>
#include <numeric>

namespace cohort {
namespace {

namespace ck = checkpoint;
using ck::generators_of;
using ck::state_of;

/// Returns the generators whose states `state` has, each with its state; the CPU's first.
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

std::map<std::string, Shard> shards_of(const torch::nn::Module& module) {
  std::map<std::string, Shard> all;
  const auto add = [&](const torch::nn::Module& one, const std::string& prefix) {
    const auto* const has = dynamic_cast<const nn::HasShards*>(&one);
    if (has == nullptr) return;
    for (auto& [name, shard] : has->shards()) all.emplace(prefix + name, std::move(shard));
  };
  add(module, "");
  for (const auto& item : module.named_modules("", false)) add(*item.value(), item.key() + ".");
  return all;
}

/// Throws for a module that has only parts of tensors, since rank 0's parts would be saved as if they were whole.
void require_whole(const torch::nn::Module& module) {
  for (const auto& [name, shard] : shards_of(module)) {
    if (shard != formats::whole_shard(shard.sizes)) {
      raise(ErrorCode::InvalidArgument,
            "cannot save or load the module -- this rank has only a part of '{}' -- give model_shards(module, "
            "&optimizer)",
            name);
    }
  }
}

/// A rank's contribution to a save, with the data that its bundle's views refer to.
struct Brought {
  ck::Snapshot model, state, random;
  std::optional<ck::OptimizerSnapshot> optimizer;
  ck::Bundle bundle;
};

void add_own(Brought& all, const torch::nn::Module& module, const RankState& state) {
  for (const auto& [name, tensor] : state) all.state.add(name, tensor);
  all.bundle.state = all.state.tensors();
  for (auto& [name, generator] : generators_of(module)) all.random.add(name, state_of(generator));
  all.bundle.random = all.random.tensors();
}

/// Makes this rank's contribution; throws on all ranks if one rank fails.
std::unique_ptr<Brought> bring(Communicator& comm, const torch::nn::Module& module,
                               const torch::optim::Optimizer* optimizer, const TrainingProgress& progress,
                               const RankState& state) {
  auto all = std::make_unique<Brought>();
  ck::agree(comm, ck::attempt([&] {
              require_whole(module);
              if (ck::rank_of(comm) == 0) {
                all->bundle.manifest = manifest_of(progress);
                for (const auto& [name, tensor] : ck::named_tensors(module)) {
                  ck::require_loadable(name, tensor);
                  all->model.add(name, tensor);
                }
                all->bundle.files.push_back({ck::kModelFile, all->model.tensors(), {{"format", "pt"}}});
                if (optimizer != nullptr) {
                  all->optimizer = ck::snapshot(*optimizer, module);
                  all->bundle.files.push_back(
                      {ck::kOptimizerFile, all->optimizer->tensors.tensors(), all->optimizer->metadata});
                }
              }
              add_own(*all, module, state);
            }));
  return all;
}

// Functions for models that no rank holds whole.

Shard shard_of(const ModelShards& model, const std::string& name, const at::Tensor& tensor) {
  const auto found = model.tensors.find(name);
  Shard shard = found == model.tensors.end() ? formats::whole_shard(tensor.sizes().vec()) : found->second;
  if (formats::problem_of(shard) || formats::shape_of(shard) != tensor.sizes().vec()) {
    raise(ErrorCode::InvalidArgument,
          "cannot save or load '{}' of shape {} -- its Shard is {} -- let HasShards::shards say which box of the whole "
          "it is",
          name, formats::shape_text(tensor.sizes().vec()), formats::shard_text(shard));
  }
  return shard;
}

/// A tensor that an optimizer has as a parameter; its snapshots name such tensors by their index in the list.
struct Stepped {
  std::string parameter;
  Shard shard;
  at::Tensor tensor;
  bool is_master = false;  // true: not the parameter's own memory
};

std::vector<Stepped> stepped_of(const ModelShards& model) {
  std::vector<Stepped> all;
  if (model.optimizer == nullptr) return all;
  if (model.sharded == nullptr) {
    for (const auto& item : model.module->named_parameters())
      all.push_back({item.key(), shard_of(model, item.key(), item.value()), item.value()});
    return all;
  }
  for (const optim::Piece& piece : model.sharded->pieces()) {
    Shard shard = shard_of(model, piece.parameter, piece.parameter_tensor);
    shard.begin = piece.begin;
    shard.count = piece.tensor.numel();
    all.push_back({piece.parameter, std::move(shard), piece.tensor,
                   piece.tensor.scalar_type() != piece.parameter_tensor.scalar_type()});
  }
  return all;
}

ck::ParameterNames numbers_of(const std::vector<Stepped>& all) {
  ck::ParameterNames names;
  for (std::size_t i = 0; i < all.size(); ++i) names.emplace(all[i].tensor.unsafeGetTensorImpl(), std::to_string(i));
  return names;
}

/// Converts groups of such indices to groups of parameter names, in which each name occurs once.
std::vector<std::vector<std::string>> parameters_of(std::vector<std::vector<std::string>> groups,
                                                    const std::vector<Stepped>& all) {
  for (auto& group : groups) {
    std::vector<std::string> names;
    for (const std::string& number : group) {
      const std::string& name = all.at(std::stoul(number)).parameter;
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
    group = std::move(names);
  }
  return groups;
}

/// Position in a Sequential of the parameter's layer: "12.weight" -> 12.
std::optional<std::int64_t> layer_of(const std::string& name) {
  return parse_integer<std::int64_t>(std::string_view(name).substr(0, name.find('.')));
}

/// Merges the groups of all ranks. Parameters come in the order that a process with the whole model would have.
/// `options` must be the same on all ranks.
std::vector<std::vector<std::string>> groups_of_all(Communicator& comm, const torch::nn::Module& module,
                                                    const std::vector<std::vector<std::string>>& groups,
                                                    const std::string& options) {
  std::vector<std::string> own;
  for (const auto& item : module.named_parameters()) own.push_back(item.key());
  const auto names = ck::gather(comm, ck::groups_text({own}));
  const auto texts = ck::gather(comm, ck::groups_text(groups));
  const auto all_options = ck::gather(comm, options);
  std::vector<std::vector<std::string>> all = groups;
  bool differ = false;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const auto theirs = ck::parse_groups(texts[rank]);
    if (all_options[rank] != all_options[0] || theirs.size() != groups.size()) {
      raise(ErrorCode::InvalidArgument,
            "cannot save the checkpoint -- the optimizer of rank {} has other options or groups than that of rank 0 -- "
            "make them alike on all ranks",
            rank);
    }
    differ = differ || texts[rank] != texts[0];
    for (std::size_t i = 0; i < theirs.size(); ++i) all[i].insert(all[i].end(), theirs[i].begin(), theirs[i].end());
  }
  if (!differ) return groups;
  std::vector<std::string> order;
  for (const std::string& text : names) {
    const auto theirs = ck::parse_groups(text).at(0);
    order.insert(order.end(), theirs.begin(), theirs.end());
  }
  // Sorts by layer, since stages may be interleaved over the ranks.
  if (std::all_of(order.begin(), order.end(), layer_of)) {
    std::stable_sort(order.begin(), order.end(),
                     [](const auto& a, const auto& b) { return layer_of(a) < layer_of(b); });
  }
  std::map<std::string, std::size_t> places;
  for (const std::string& name : order) places.emplace(name, places.size());
  for (auto& group : all) {
    std::sort(group.begin(), group.end(), [&](const auto& a, const auto& b) { return places.at(a) < places.at(b); });
    group.erase(std::unique(group.begin(), group.end()), group.end());
  }
  return all;
}

std::unique_ptr<Brought> bring(Communicator& comm, const ModelShards& model, const TrainingProgress& progress,
                               const RankState& state) {
  auto all = std::make_unique<Brought>();
  std::vector<ck::ShardName> names;
  std::vector<std::pair<at::Tensor, formats::TensorView>> values;  // a tensor to be read, or a view
  std::vector<std::vector<std::string>> groups;
  ck::TensorFile options{ck::kOptimizerFile, {}, {}};
  std::string options_text;
  ck::agree(
      comm, ck::attempt([&] {
        if (ck::rank_of(comm) == 0) all->bundle.manifest = manifest_of(progress);
        for (const auto& [name, tensor] : ck::named_tensors(*model.module)) {
          ck::require_loadable(name, tensor);
          names.push_back({std::string(formats::kModelPrefix) + name, shard_of(model, name, tensor)});
          values.emplace_back(tensor, formats::TensorView());
        }
        add_own(*all, *model.module, state);
        if (model.optimizer == nullptr) return;
        const std::vector<Stepped> stepped = stepped_of(model);
        all->optimizer = ck::snapshot(*model.optimizer, numbers_of(stepped));
        options.metadata = all->optimizer->metadata;
        groups = parameters_of(ck::parse_groups(options.metadata.at("groups")), stepped);
        options.metadata.erase("groups");
        for (const auto& [key, text] : options.metadata) options_text += key + '=' + text + '\n';
        for (const auto& [name, tensor] : all->optimizer->tensors.tensors()) {
          if (!name.starts_with("state/")) {
            options.tensors.push_back({name, tensor});
            options_text += name + '=';
            options_text.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
            continue;
          }
          // "state/NUMBER/FIELD"
          const std::size_t slash = name.find('/', 6);
          const Stepped& of = stepped.at(std::stoul(name.substr(6, slash - 6)));
          const bool is_part = tensor.shape == of.tensor.sizes().vec();
          if (!is_part && !tensor.shape.empty()) {
            raise(ErrorCode::InvalidArgument,
                  "cannot save the optimizer in shards -- its state '{}' of '{}' has another shape than that",
                  name.substr(slash + 1), of.parameter);
          }
          names.push_back({fmt::format("{}state/{}{}", formats::kOptimizerPrefix, of.parameter, name.substr(slash)),
                           is_part ? of.shard : formats::whole_shard({})});
          values.emplace_back(at::Tensor(), tensor);
        }
        for (const Stepped& one : stepped) {
          if (!one.is_master) continue;
          names.push_back(
              {fmt::format("{}state/{}{}", formats::kOptimizerPrefix, one.parameter, ck::kMasterField), one.shard});
          values.emplace_back(one.tensor, formats::TensorView());
        }
      }));
  if (ck::any(comm, model.optimizer != nullptr)) {
    options.metadata["groups"] = ck::groups_text(groups_of_all(comm, *model.module, groups, options_text));
    if (ck::rank_of(comm) == 0) all->bundle.files.push_back(std::move(options));
  }
  const std::vector<bool> mine = ck::without_replicas(comm, names);
  ck::agree(comm, ck::attempt([&] {
              for (std::size_t i = 0; i < names.size(); ++i) {
                if (!mine[i]) continue;
                auto& [tensor, view] = values[i];
                if (tensor.defined()) {
                  all->model.add(names[i].tensor, tensor);
                  view = all->model.tensors().back().tensor;
                }
                all->bundle.shards.push_back({std::move(names[i]), view.type, view.bytes});
              }
            }));
  return all;
}

/// Returns the tensors of a part whose names begin with `prefix`, and removes the prefix.
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
  RankState rank_state = {};  // the state in `loaded`

  using Bring = std::function<std::unique_ptr<Brought>(Communicator&)>;
  CheckpointInfo save(const Bring& bring_all) {
    return status::called("CheckpointFolder::save", [&] {
      saver.settle(communicator);
      const auto brought = bring_all(communicator);
      return info_of(ck::save(communicator, options, brought->bundle));
    });
  }
  CheckpointSave save_async(const Bring& bring_all) {
    return status::called("CheckpointFolder::save_async", [&] {
      saver.settle(communicator);
      const auto brought = bring_all(communicator);
      if (saver.needs_communicator(communicator)) saver.adopt(communicator.split({.background = true}));
      return CheckpointSave(saver.start(communicator, brought->bundle));
    });
  }
};

CheckpointFolder::CheckpointFolder(Communicator communicator, CheckpointOptions options) {
  ck::FolderOptions folder{std::move(options.folder),
                           options.keep,
                           options.place,
                           options.copies,
                           {std::move(options.best_by), options.best_mode, options.keep_best}};
  ck::check(folder);
  state_ = std::shared_ptr<State>(new State{std::move(communicator), std::move(folder)});
}

CheckpointInfo CheckpointFolder::save(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                                      const TrainingProgress& progress, const RankState& state) {
  return state_->save([&](Communicator& comm) { return bring(comm, module, optimizer, progress, state); });
}
CheckpointInfo CheckpointFolder::save(const ModelShards& model, const TrainingProgress& progress,
                                      const RankState& state) {
  return state_->save([&](Communicator& comm) { return bring(comm, model, progress, state); });
}

CheckpointSave CheckpointFolder::save_async(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                                            const TrainingProgress& progress, const RankState& state) {
  return state_->save_async([&](Communicator& comm) { return bring(comm, module, optimizer, progress, state); });
}
CheckpointSave CheckpointFolder::save_async(const ModelShards& model, const TrainingProgress& progress,
                                            const RankState& state) {
  return state_->save_async([&](Communicator& comm) { return bring(comm, model, progress, state); });
}

ModelShards model_shards(torch::nn::Module& module, torch::optim::Optimizer* optimizer) {
  return {&module, optimizer, shards_of(module), dynamic_cast<optim::ShardedCore*>(optimizer)};
}

namespace {

/// Changes to be made when all ranks have checked everything.
struct Changes {
  ck::Assignment weights;
  std::function<void()> restore_optimizer = [] {};
  std::vector<std::pair<at::Generator, at::Tensor>> generators;
  RankState state;

  void add_own(Communicator& comm, const torch::nn::Module& module, const ck::Found& found) {
    const std::string& folder = found.stored->folder;
    const int rank = ck::rank_of(comm);
    RankState random;
    if (found.part) {
      const std::string name = fmt::format("{}/{}", folder, ck::part_file(rank));
      state = tensors_of(found.part->bytes(), name, ck::kStatePrefix);
      random = tensors_of(found.part->bytes(), name, ck::kRandomPrefix);
    } else if (const auto file = found.files.find(ck::kRandomFile); file != found.files.end()) {
      const auto states = value_or_throw(
          formats::parse_safetensors(file->second.bytes(), fmt::format("{}/{}", folder, ck::kRandomFile)));
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
  }

  void apply() {
    // Comes first, since only this may still fail (the state of another libtorch's CPU generator).
    for (auto& [generator, saved] : generators) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(saved);
    }
    weights.apply();
    restore_optimizer();
  }
};

/// Finds the newest whole checkpoint, or the best.
ck::Found find(Communicator& comm, const ck::FolderOptions& options, const std::set<std::string>& unwanted, bool best) {
  ck::Found found = ck::load_newest(comm, options, unwanted, {}, best ? ck::Order::BestFirst : ck::Order::NewestFirst);
  if (ck::rank_of(comm) == 0) {
    for (const std::string& reason : found.passed_over) log::warn("checkpoint", "passed over: {}", reason);
  }
  if (!found.stored && !found.passed_over.empty()) throw ck::all_damaged(options, found.passed_over);
  return found;
}

[[noreturn]] void refuse_without(const std::string& folder, const std::string& file) {
  raise(ErrorCode::InvalidArgument, "{}/{}: the checkpoint was saved without it -- pass nullptr for the optimizer",
        folder, file);
}

void require_same_type(const std::string& folder, const std::string& name, formats::ElementType there,
                       at::ScalarType here) {
  if (ck::to_element_type(here) == there) return;
  raise(ErrorCode::InvalidArgument, "{}: tensor '{}' is {} there and {} here -- make the model as it was made then",
        folder, name, formats::info(there).torch, c10::toString(here));
}

/// A rank's request for parts of a checkpoint's tensors, to be read into the rank's own memory.
class Asked {
 public:
  explicit Asked(const ck::StoredTensors& tensors) : tensors_(tensors) {}

  const formats::PartedTensor* find(const std::string& name) const {
    const auto found = tensors_.content.tensors.find(name);
    return found == tensors_.content.tensors.end() ? nullptr : &found->second;
  }
  formats::TensorView add(const std::string& name, Shard shard, std::vector<std::int64_t> shape) {
    const formats::ElementType type = tensors_.content.tensors.at(name).type;
    sys::FileBytes& bytes =
        memory_.emplace_back(static_cast<std::size_t>(formats::byte_count(type, shape).value_or(0)));
    wanted_.push_back({{name, std::move(shard)}, {bytes.data(), bytes.size()}});
    return {type, std::move(shape), bytes.bytes()};
  }
  void read(Communicator& comm) const { ck::read_shards(comm, tensors_, wanted_); }

 private:
  const ck::StoredTensors& tensors_;
  std::list<sys::FileBytes> memory_;
  std::vector<ck::WantedShard> wanted_;
};

/// Throws on all ranks if the tensors of all ranks together are not those of the checkpoint.
void ask_for_module(Communicator& comm, const ModelShards& model, const ck::Found& found, Asked& asked,
                    ck::Assignment& weights) {
  const std::string source = fmt::format("{}/{}", found.stored->folder, ck::kModelFile);
  std::vector<std::string> own;
  ck::agree(comm, ck::attempt([&] {
              std::string problems;
              for (const auto& [name, tensor] : ck::named_tensors(*model.module)) {
                const std::string whole = std::string(formats::kModelPrefix) + name;
                own.push_back(whole);
                const Shard shard = shard_of(model, name, tensor);
                const auto* const saved = asked.find(whole);
                if (const std::string why = ck::unwritable(tensor); !why.empty()) {
                  problems += fmt::format("{}'{}' {}", problems.empty() ? "" : "; ", name, why);
                  continue;
                }
                if (saved != nullptr && saved->sizes() == shard.sizes) {
                  require_same_type(found.stored->folder, name, saved->type, tensor.scalar_type());
                  weights.copies.push_back({tensor, asked.add(whole, shard, tensor.sizes().vec()), name});
                  continue;
                }
                problems += problems.empty() ? "" : "; ";
                problems += saved == nullptr
                                ? fmt::format("missing in the file: '{}'", name)
                                : fmt::format("'{}' has shape {} there and {} here", name,
                                              formats::shape_text(saved->sizes()), formats::shape_text(shard.sizes));
              }
              if (!problems.empty())
                raise(ErrorCode::InvalidArgument,
                      "{}: does not fit the module -- {} -- was it saved from another model?", source, problems);
            }));
  std::set<std::string> known_names;
  for (const std::string& text : ck::gather(comm, ck::groups_text({own}))) {
    const auto theirs = ck::parse_groups(text).at(0);
    known_names.insert(theirs.begin(), theirs.end());
  }
  for (const auto& [name, tensor] : found.tensors->content.tensors) {
    if (!name.starts_with(formats::kModelPrefix) || known_names.contains(name)) continue;
    raise(ErrorCode::InvalidArgument,
          "{}: does not fit the module -- not in the module of any rank: '{}' -- was it saved from another model?",
          source, name.substr(formats::kModelPrefix.size()));
  }
}

/// The state of the tensors that this rank steps, as if an optimizer had only these.
struct AskedOptimizer {
  std::vector<Stepped> stepped;
  std::vector<formats::NamedTensor> tensors;
  std::map<std::string, std::string> metadata;
  std::vector<std::pair<at::Tensor, formats::TensorView>> masters;
  std::string source;
};

AskedOptimizer ask_for_optimizer(const ModelShards& model, const ck::Found& found, Asked& asked) {
  AskedOptimizer all{stepped_of(model), {}, {}, {}, fmt::format("{}/{}", found.stored->folder, ck::kOptimizerFile)};
  const auto& content = found.tensors->content;
  const auto file = content.files.find(ck::kOptimizerFile);
  if (file == content.files.end()) refuse_without(found.stored->folder, ck::kOptimizerFile);
  all.metadata = file->second.metadata;
  const auto members = ck::group_members(*model.optimizer, numbers_of(all.stepped));
  const auto saved = ck::parse_groups(all.metadata["groups"]);
  const auto own = parameters_of(members, all.stepped);
  for (std::size_t i = 0; i < own.size(); ++i) {
    for (const std::string& name : own[i]) {
      if (i < saved.size() && std::find(saved[i].begin(), saved[i].end(), name) != saved[i].end()) continue;
      raise(
          ErrorCode::InvalidArgument,
          "{}: does not fit the optimizer -- its group {} has no parameter '{}' there -- make the optimizer as it was "
          "made then",
          all.source, i, name);
    }
  }
  all.metadata["groups"] = ck::groups_text(members);
  const auto each = [&](const std::string& prefix, const auto& visit) {
    for (auto at = content.tensors.lower_bound(prefix); at != content.tensors.end() && at->first.starts_with(prefix);
         ++at)
      visit(at->first, at->first.substr(prefix.size()), at->second);
  };
  const std::string groups = std::string(formats::kOptimizerPrefix) + "group/";
  each(groups, [&](const std::string& name, const std::string& option, const formats::PartedTensor&) {
    all.tensors.push_back({"group/" + option, asked.add(name, formats::whole_shard({}), {})});
  });
  for (std::size_t i = 0; i < all.stepped.size(); ++i) {
    const Stepped& one = all.stepped[i];
    each(fmt::format("{}state/{}/", formats::kOptimizerPrefix, one.parameter),
         [&](const std::string& name, const std::string& field, const formats::PartedTensor& tensor) {
           // The type distinguishes a step count from a part, since both may lack dimensions.
           const bool is_part = tensor.sizes() == one.shard.sizes && tensor.type != formats::ElementType::Int64;
           if (!is_part && !tensor.sizes().empty())
             raise(ErrorCode::Corrupt, "{}: not a sound state of an optimizer -- '{}' has shape {}", all.source, name,
                   formats::shape_text(tensor.sizes()));
           if (name.ends_with(ck::kMasterField)) {
             if (one.is_master)
               all.masters.emplace_back(one.tensor, asked.add(name, one.shard, one.tensor.sizes().vec()));
             return;
           }
           all.tensors.push_back(
               {fmt::format("state/{}/{}", i, field), is_part ? asked.add(name, one.shard, one.tensor.sizes().vec())
                                                              : asked.add(name, formats::whole_shard({}), {})});
         });
  }
  return all;
}

}  // namespace

std::optional<CheckpointInfo> CheckpointFolder::load_latest(torch::nn::Module& module,
                                                            torch::optim::Optimizer* optimizer) {
  return load(module, optimizer, false);
}
std::optional<CheckpointInfo> CheckpointFolder::load_latest(const ModelShards& model) { return load(model, false); }
std::optional<CheckpointInfo> CheckpointFolder::load_best(torch::nn::Module& module,
                                                          torch::optim::Optimizer* optimizer) {
  return load(module, optimizer, true);
}
std::optional<CheckpointInfo> CheckpointFolder::load_best(const ModelShards& model) { return load(model, true); }

std::optional<CheckpointInfo> CheckpointFolder::load(torch::nn::Module& module, torch::optim::Optimizer* optimizer,
                                                     bool best) {
  Communicator& comm = state_->communicator;
  state_->saver.settle(comm);
  ck::Found found =
      find(comm, state_->options,
           optimizer == nullptr ? std::set<std::string>{ck::kOptimizerFile} : std::set<std::string>(), best);
  if (!found.stored) return std::nullopt;
  const std::string folder = found.stored->folder;

  // Nothing is changed before all ranks have checked everything.
  Changes changes;
  ck::agree(
      comm, ck::attempt([&] {
        require_whole(module);
        const auto parse = [&](const char* name) {
          const auto file = found.files.find(name);
          if (file == found.files.end()) refuse_without(folder, name);
          return value_or_throw(formats::parse_safetensors(file->second.bytes(), fmt::format("{}/{}", folder, name)));
        };
        changes.weights = ck::match(ck::named_tensors(module), parse(ck::kModelFile).tensors,
                                    fmt::format("{}/{}", folder, ck::kModelFile), {});
        for (const auto& copy : changes.weights.copies)
          require_same_type(folder, copy.name, copy.from.type, copy.to.scalar_type());
        if (optimizer != nullptr) {
          const formats::Safetensors saved = parse(ck::kOptimizerFile);
          changes.restore_optimizer = ck::restore(*optimizer, module, saved.tensors, saved.metadata,
                                                  fmt::format("{}/{}", folder, ck::kOptimizerFile));
        }
        changes.add_own(comm, module, found);
      }));
  ck::agree(comm, ck::attempt([&] { changes.apply(); }));
  state_->rank_state = std::move(changes.state);
  state_->loaded = std::move(found.stored);
  return info_of(*state_->loaded);
}

std::optional<CheckpointInfo> CheckpointFolder::load(const ModelShards& model, bool best) {
  Communicator& comm = state_->communicator;
  state_->saver.settle(comm);
  ck::Found found = find(comm, state_->options, {ck::kModelFile, ck::kOptimizerFile}, best);
  if (!found.stored) return std::nullopt;
  Changes changes;
  Asked asked(*found.tensors);
  ask_for_module(comm, model, found, asked, changes.weights);
  AskedOptimizer optimizer;
  ck::agree(comm, ck::attempt([&] {
              if (model.optimizer != nullptr) optimizer = ask_for_optimizer(model, found, asked);
            }));
  asked.read(comm);
  ck::agree(comm, ck::attempt([&] {
              if (model.optimizer != nullptr)
                changes.restore_optimizer = ck::restore(*model.optimizer, numbers_of(optimizer.stepped),
                                                        optimizer.tensors, optimizer.metadata, optimizer.source);
              changes.add_own(comm, *model.module, found);
            }));
  const auto applied = ck::attempt([&] {
    if (model.sharded != nullptr) model.sharded->allow_writes();
    changes.apply();
  });
  if (model.sharded != nullptr) model.sharded->forbid_writes();
  ck::agree(comm, applied);
  if (model.sharded != nullptr) {
    model.sharded->model().parameters_written();
    const torch::NoGradGuard no_grad;
    for (const auto& [master, view] : optimizer.masters) master.copy_(ck::to_tensor(view, "master"));
    if (!optimizer.masters.empty()) model.sharded->masters_written();
  }
  state_->rank_state = std::move(changes.state);
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
