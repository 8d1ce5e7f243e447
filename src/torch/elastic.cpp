#include <cohort/torch/elastic.h>

#include "base/log.h"
#include "base/records.h"
#include "base/result.h"
#include "torch/checkpoint_tensors.h"
#include "torch/local_sgd.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::elastic {
namespace {

struct TensorForm {
  std::uint8_t type = 0;
  std::vector<std::int64_t> shape;
};
void visit_fields(auto& m, auto& a, const TensorForm*) { a(m.type, m.shape); }

struct NamedText {
  std::string name, text;
};
void visit_fields(auto& m, auto& a, const NamedText*) { a(m.name, m.text); }

/// Layout in Contents::layout.
struct Layout {
  std::vector<TensorForm> tensors;
  std::vector<NamedText> metadata;
};
void visit_fields(auto& m, auto& a, const Layout*) { a(m.tensors, m.metadata); }

// Rates are a separate Value, since they may differ: a rank may be lost while a new world scales them.
bool is_rate(const std::string& name) { return name.starts_with("group/") && name.ends_with("/lr"); }

Contents contents_of(std::shared_ptr<const checkpoint::Snapshot> snapshot,
                     const std::map<std::string, std::string>& metadata = {}) {
  Layout layout;
  Contents contents;
  for (const formats::NamedTensor& one : snapshot->tensors()) {
    if (is_rate(one.name)) continue;
    layout.tensors.push_back({static_cast<std::uint8_t>(one.tensor.type), one.tensor.shape});
    contents.items.push_back({one.name, ConstBuffer(one.tensor.bytes.data(),
                                                    static_cast<std::int64_t>(one.tensor.bytes.size()), DType::UInt8)});
  }
  for (const auto& [name, text] : metadata) layout.metadata.push_back({name, text});
  contents.layout = codec::encode(layout);
  contents.owner = std::move(snapshot);
  return contents;
}

std::vector<formats::NamedTensor> tensors_of(const Contents& contents, std::map<std::string, std::string>& metadata) {
  const auto layout = value_or_throw(codec::decode<Layout>(
      contents.layout, {.longest_text = contents.layout.size(), .what = "the tensors of a state"}));
  if (layout.tensors.size() != contents.items.size()) raise(ErrorCode::Corrupt, "the tensors of a state do not fit");
  for (const NamedText& one : layout.metadata) metadata[one.name] = one.text;
  std::vector<formats::NamedTensor> tensors;
  for (std::size_t i = 0; i < contents.items.size(); ++i) {
    const Contents::Item& item = contents.items[i];
    const TensorForm& form = layout.tensors[i];
    const auto type = static_cast<formats::ElementType>(form.type);
    if (formats::byte_count(type, form.shape) != item.memory.bytes())
      raise(ErrorCode::Corrupt, "tensor '{}' of a state has {} bytes", item.name, item.memory.bytes());
    tensors.push_back(
        {item.name, {type, form.shape, {static_cast<const std::byte*>(item.memory.data), item.memory.bytes()}}});
  }
  return tensors;
}

// Looks up the contents of a module once for each world, since doing so in each step would take too long.
class Parameters final : public Part {
 public:
  explicit Parameters(torch::nn::Module& module) : module_(module) {}
  Contents contents() override {
    look_up();
    auto snapshot = std::make_shared<checkpoint::Snapshot>();
    for (const auto& [name, tensor] : by_name_) snapshot->add(name, tensor);
    return contents_of(std::move(snapshot));
  }
  void assign(const Contents& contents) override {
    look_up();
    std::map<std::string, std::string> metadata;
    checkpoint::match(by_name_, tensors_of(contents, metadata), "the state of another rank", {}).apply();
  }
  // Uses libtorch's counters of writes in place.
  std::uint64_t version() override {
    if (tensors_.empty()) look_up();
    std::uint64_t sum = 0;
    for (const at::Tensor& tensor : tensors_) sum += tensor._version();
    return sum;
  }

 private:
  void look_up() {
    by_name_.clear();
    tensors_.clear();
    for (const auto& item : module_.named_parameters()) {
      if (!item.value().defined()) continue;
      by_name_.emplace(item.key(), item.value());
      tensors_.push_back(item.value());
    }
  }
  torch::nn::Module& module_;
  std::map<std::string, at::Tensor> by_name_;
  std::vector<at::Tensor> tensors_;
};

std::vector<double> rates_of(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void set_rates(torch::optim::Optimizer& optimizer, const std::vector<double>& rates) {
  for (std::size_t i = 0; i < std::min(rates.size(), optimizer.param_groups().size()); ++i)
    optimizer.param_groups()[i].options().set_lr(rates[i]);
}

class Moments final : public Part {
 public:
  Moments(torch::optim::Optimizer& optimizer, torch::nn::Module& module) : optimizer_(optimizer), module_(module) {}
  Contents contents() override {
    const auto all = std::make_shared<checkpoint::OptimizerSnapshot>(checkpoint::snapshot(optimizer_, module_));
    return contents_of({all, &all->tensors}, all->metadata);
  }
  void assign(const Contents& contents) override {
    std::map<std::string, std::string> metadata;
    auto tensors = tensors_of(contents, metadata);
    const checkpoint::OptimizerSnapshot here = checkpoint::snapshot(optimizer_, module_);
    std::ranges::copy_if(here.tensors.tensors(), std::back_inserter(tensors),
                         [](const auto& one) { return is_rate(one.name); });
    checkpoint::restore(optimizer_, module_, tensors, metadata, "the state of another rank")();
  }
  // Constant, since every change of moments also changes parameters.
  std::uint64_t version() override { return 0; }

 private:
  torch::optim::Optimizer& optimizer_;
  torch::nn::Module& module_;
};

void append(std::string& bytes, const at::Tensor& tensor) {
  const at::Tensor dense =
      tensor.is_cpu() && tensor.is_contiguous() ? tensor : tensor.detach().to(at::kCPU).contiguous();
  bytes.append(static_cast<const char*>(dense.data_ptr()), dense.nbytes());
}

/// Reads the tensor's values from `bytes` at `begin`, and advances `begin`.
void extract(const std::string& bytes, std::size_t& begin, const at::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  at::Tensor dense = at::empty(tensor.sizes(), tensor.options().device(at::kCPU).requires_grad(false));
  if (begin + dense.nbytes() > bytes.size()) raise(ErrorCode::Mismatch, "the state has other buffers on another rank");
  if (dense.nbytes() > 0) std::memcpy(dense.data_ptr(), bytes.data() + begin, dense.nbytes());
  begin += dense.nbytes();
  tensor.detach().copy_(dense);
}

Value buffers_of(State& state, const torch::nn::Module& module) {
  auto buffers = std::make_shared<std::vector<at::Tensor>>();
  const auto look_up = [buffers, &module] {
    *buffers = module.buffers();
    std::erase_if(*buffers, [](const at::Tensor& buffer) { return !buffer.defined(); });
  };
  look_up();
  state.on_change([look_up](const World&) { look_up(); });
  return {[buffers](std::string& bytes) {
            bytes.clear();
            for (const at::Tensor& buffer : *buffers) append(bytes, buffer);
          },
          [buffers](const std::string& bytes) {
            std::size_t begin = 0;
            for (const at::Tensor& buffer : *buffers) extract(bytes, begin, buffer);
          }};
}

Value generators_of(const torch::nn::Module& module) {
  auto generators =
      std::make_shared<std::vector<std::pair<std::string, at::Generator>>>(checkpoint::generators_of(module));
  return {[generators](std::string& bytes) {
            bytes.clear();
            for (auto& [of, generator] : *generators) append(bytes, checkpoint::state_of(generator));
          },
          [generators](const std::string& bytes) {
            std::size_t begin = 0;
            for (auto& [of, generator] : *generators) {
              const at::Tensor state = checkpoint::state_of(generator);
              extract(bytes, begin, state);
              const std::lock_guard<std::mutex> lock(generator.mutex());
              generator.set_state(state);
            }
          },
          Value::Scope::Rank};
}

/// State of local steps that is the same on all ranks.
class Outer final : public Part {
 public:
  explicit Outer(std::shared_ptr<optim::LocalCore> core) : core_(std::move(core)) {}
  Contents contents() override {
    auto snapshot = std::make_shared<checkpoint::Snapshot>();
    for (const auto& [name, tensor] : tensors()) snapshot->add(name, tensor);
    std::map<std::string, std::string> counts;
    for (std::size_t i = 0; i < core_->fragments.size(); ++i)
      counts[std::to_string(i)] = std::to_string(core_->fragments[i].synchronisations);
    return contents_of(std::move(snapshot), counts);
  }
  // A rank that has been in a world before lacks at most one synchronisation, and keeps all other results of its steps.
  void assign(const Contents& contents) override {
    std::map<std::string, std::string> counts;
    checkpoint::match(tensors(), tensors_of(contents, counts), "the state of another rank", {}).apply();
    for (std::size_t i = 0; i < core_->fragments.size(); ++i) {
      optim::LocalCore::Fragment& fragment = core_->fragments[i];
      const std::int64_t there = std::stoll(counts[std::to_string(i)]);
      if (std::exchange(fragment.synchronisations, there) == there && !fresh) continue;
      core_->take(fragment, fresh ? 0 : core_->options.fragment_update_alpha);
      fragment.samples = fresh ? 0 : fragment.samples - fragment.sent;
    }
    ++core_->version;
  }
  std::uint64_t version() override { return core_->version; }
  bool fresh = true;

 private:
  std::map<std::string, at::Tensor> tensors() const {
    std::map<std::string, at::Tensor> by_name;
    for (const auto& [name, tensor] : core_->outer()) by_name.emplace(name, tensor);
    for (std::size_t i = 0; i < core_->kept.size(); ++i) by_name.emplace(fmt::format("kept/{}", i), core_->kept[i]);
    return by_name;
  }
  std::shared_ptr<optim::LocalCore> core_;
};

/// Rates before scaling (`plain`), and scaled (`set`). If the optimizer still has the scaled rates, the program has not
/// changed them, and the plain rates are scaled again, which avoids rounding twice.
struct Rates {
  std::vector<double> plain, set;
  double factor = 1;
};

Value rates_of(torch::optim::Optimizer& optimizer, const std::shared_ptr<Rates>& rates) {
  Value value;
  value.save = [&optimizer, rates](std::string& bytes) {
    codec::Writer out;
    out.number(rates->factor);
    for (const auto& list : {rates_of(optimizer), rates->plain, rates->set}) {
      out.number(static_cast<std::uint32_t>(list.size()));
      for (const double rate : list) out.number(rate);
    }
    bytes = out.take();
  };
  value.load = [&optimizer, rates](const std::string& bytes) {
    codec::Reader in(bytes);
    rates->factor = value_or_throw(in.number<double>());
    std::vector<double> now;
    for (std::vector<double>* const list : {&now, &rates->plain, &rates->set}) {
      list->resize(value_or_throw(in.number<std::uint32_t>()));
      for (double& rate : *list) rate = value_or_throw(in.number<double>());
    }
    set_rates(optimizer, now);
  };
  return value;
}

}  // namespace

void attach(State& state, const std::string& name, torch::nn::Module& module) {
  // Drops gradients of a step that did not end, since they lie in memory of a former world.
  state.on_change([&module](const World&) {
    for (at::Tensor& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
  });
  state.add(name, std::make_shared<Parameters>(module));
  state.add(name + "/buffers", buffers_of(state, module));
  state.add(name + "/random", generators_of(module));
}

void attach(State& state, const std::string& name, data::DistributedSampler& sampler, BatchPolicy policy) {
  const auto seen = std::make_shared<data::SamplerState>(sampler.state());  // state at the last step's end
  state.add(name, Value{[&sampler](std::string& bytes) {
                          const data::SamplerState at = sampler.state();
                          bytes.assign(reinterpret_cast<const char*>(&at), sizeof at);
                        },
                        [&sampler, seen](const std::string& bytes) {
                          if (bytes.size() != sizeof *seen) raise(ErrorCode::Mismatch, "a sampler of another version");
                          std::memcpy(seen.get(), bytes.data(), sizeof *seen);
                          sampler.load_state(*seen);
                        }});
  state.add_samples(name, [&sampler] { return SamplePosition{sampler.epoch(), sampler.cursor()}; });
  // Does nothing if the program has called `step`, as it does after accumulating batches.
  state.on_step([&sampler, seen] {
    const bool in_same_epoch = sampler.epoch() == seen->epoch;
    const bool stepped = sampler.cursor() != (in_same_epoch ? seen->cursor : 0);
    if (!stepped && sampler.global_batch() > 0) sampler.step();
    *seen = sampler.state();
  });
  state.on_change([&sampler, policy, name, said = false](const World& world) mutable {
    const std::int64_t batch = sampler.options().batch_size;
    const bool keeps = policy == BatchPolicy::KeepGlobal;
    const bool is_virtual = sampler.options().virtual_ranks > 0;  // whose steps are the same in any case
    sampler.set_world(world.rank(), world.size(), keeps && !is_virtual ? batch * world.first_size() : 0);
    if (is_virtual) return;
    if (world.rank() == 0 && world.size() == world.first_size() && !std::exchange(said, true))
      log::info("elastic", "'{}': steps of {} samples {}", name, batch * world.size(),
                keeps ? "over all ranks, however many there are"
                      : fmt::format("of {} ranks, {} of each", world.size(), batch));
  });
}

void attach(State& state, const std::string& name, torch::optim::Optimizer& optimizer, torch::nn::Module& module,
            optim::Scaling scaling) {
  (void)checkpoint::snapshot(optimizer, module);
  state.add(name, std::make_shared<Moments>(optimizer, module));
  auto rates = std::make_shared<Rates>();
  state.add(name + "/rates", rates_of(optimizer, rates));
  if (scaling == optim::Scaling::None) return;
  state.on_change([&optimizer, rates, scaling](const World& world) {
    const double factor = optim::scale_factor(scaling, world.size()) / optim::scale_factor(scaling, world.first_size());
    std::vector<double> now = rates_of(optimizer);
    if (now != rates->set) {
      rates->plain = now;
      for (double& rate : rates->plain) rate /= rates->factor;
    }
    rates->set = rates->plain;
    for (double& rate : rates->set) rate *= factor;
    rates->factor = factor;
    set_rates(optimizer, rates->set);
  });
}

}  // namespace cohort::elastic

namespace cohort::optim {

void attach(elastic::State& state, const std::string& name, LocalSteps& steps) {
  const std::shared_ptr<LocalCore> core = steps.core();
  const auto outer = std::make_shared<elastic::Outer>(core);
  state.add(name, outer);
  elastic::Value alike;
  alike.save = [core](std::string& bytes) {
    codec::Writer out;
    for (const std::int64_t count : {core->steps, core->since, core->turn}) out.number(count);
    for (const LocalCore::Fragment& fragment : core->fragments) {
      out.number(fragment.synchronised_at);
      out.number(fragment.sent_at);
    }
    bytes = out.take();
  };
  alike.load = [core](const std::string& bytes) {
    codec::Reader in(bytes);
    for (std::int64_t* const count : {&core->steps, &core->since, &core->turn})
      *count = value_or_throw(in.number<std::int64_t>());
    for (LocalCore::Fragment& fragment : core->fragments) {
      fragment.synchronised_at = value_or_throw(in.number<std::int64_t>());
      fragment.sent_at = value_or_throw(in.number<std::int64_t>());
    }
  };
  state.add(name + "/counts", std::move(alike));
  state.add(name + "/buffers", elastic::buffers_of(state, core->module));
  state.add(name + "/random", elastic::generators_of(core->module));
  state.add(name + "/rates", elastic::rates_of(core->optimizer, std::make_shared<elastic::Rates>()));
  state.on_change([core, outer](const elastic::World& world) {
    for (at::Tensor& parameter : core->module.parameters()) parameter.mutable_grad() = at::Tensor();
    core->drop();
    core->comm = elastic::World(world).communicator();
    if (std::exchange(outer->fresh, false) && core->since > 0)
      log::info("elastic",
                "this rank begins with the last synchronised parameters, {} steps before the next synchronisation",
                std::max<std::int64_t>(0, core->period(core->steps + 1) - core->since));
  });
  core->advance = [&state] { state.advance(); };
  state.after_step([core] { core->go_on(); });
}

}  // namespace cohort::optim
