#include "torch/local_sgd.h"

#include "base/parse.h"
#include "base/result.h"
#include "torch/checkpoint_tensors.h"
#include "torch/module_slots.h"
#include "train/step/methods.h"

#include <cohort/torch/tensor.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <unordered_set>

namespace cohort::optim {
namespace {

void require(bool condition, const char* what) {
  if (!condition) raise(ErrorCode::InvalidArgument, "DiLoCo, LocalSGD: {}", what);
}

std::vector<at::Tensor> trained_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> trained;
  std::unordered_set<const void*> seen;  // a parameter may be registered twice
  for (const at::Tensor& parameter : module.parameters()) {
    if (!parameter.defined() || !parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second)
      continue;
    require(parameter.is_floating_point(), "the module trains complex parameters, which are not averaged");
    trained.push_back(parameter);
  }
  require(!trained.empty(), "the module has no parameter that needs a gradient");
  return trained;
}

/// Calls `use` with each tensor and its elements in `flat`, in the tensor's shape.
template <class Use>
void for_each(const std::vector<at::Tensor>& tensors, const at::Tensor& flat, const Use& use) {
  std::int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    use(tensor, flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

at::Tensor flatten(const std::vector<at::Tensor>& tensors) {
  const bool wide =
      std::ranges::any_of(tensors, [](const at::Tensor& one) { return one.scalar_type() == at::kDouble; });
  const std::int64_t count = std::accumulate(tensors.begin(), tensors.end(), std::int64_t{0},
                                             [](std::int64_t sum, const at::Tensor& one) { return sum + one.numel(); });
  const at::Tensor flat =
      at::empty({count}, at::TensorOptions(wide ? at::kDouble : at::kFloat).device(tensors.front().device()));
  for_each(tensors, flat, [](const at::Tensor& one, const at::Tensor& place) { place.copy_(one); });
  return flat;
}

void copy(const std::vector<at::Tensor>& to, const at::Tensor& flat) {
  for_each(to, flat, [](const at::Tensor& one, const at::Tensor& place) { one.copy_(place); });
}

}  // namespace

LocalCore::LocalCore(torch::nn::Module& of, torch::optim::Optimizer& inner, const Options& how)
    : module(of), optimizer(inner), options(how), transaction(step::local_steps()) {
  const std::int64_t parts = options.fragments;
  require(options.sync_every >= 1 && options.warm_up_steps >= 0, "sync_every is 1 or more, warm_up_steps 0 or more");
  require(parts >= 1 && options.sync_every % parts == 0,
          "sync_every has to be a multiple of the number of fragments, each of which is synchronised once in it");
  require(options.fragment_sync_delay >= 0 && options.fragment_sync_delay < options.sync_every / parts,
          "fragment_sync_delay is 0 or more, and less than the steps between two synchronisations");
  require(options.fragment_update_alpha >= 0 && options.fragment_update_alpha <= 1,
          "fragment_update_alpha is between 0 and 1");
  require(options.outer_learning_rate > 0 && options.outer_momentum >= 0 && options.outer_momentum < 1,
          "outer_learning_rate is above 0, outer_momentum 0 or more and below 1");
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> trained = trained_of(module);
  require(parts <= static_cast<std::int64_t>(trained.size()), "there are more fragments than parameters");
  const std::int64_t all = std::accumulate(trained.begin(), trained.end(), std::int64_t{0},
                                           [](std::int64_t sum, const at::Tensor& one) { return sum + one.numel(); });
  std::int64_t seen = 0;
  for (std::size_t i = 0; i < trained.size(); ++i) {
    const auto made = static_cast<std::int64_t>(fragments.size());
    const bool full = seen * parts >= all * made;
    const bool needed = static_cast<std::int64_t>(trained.size() - i) <= parts - made;
    if (made == 0 || (made < parts && (full || needed))) fragments.emplace_back();
    fragments.back().parameters.push_back(trained[i]);
    seen += trained[i].numel();
  }
  for (Fragment& fragment : fragments) {
    fragment.global = flatten(fragment.parameters);
    if (options.outer_momentum > 0) fragment.momentum = at::zeros_like(fragment.global);
    note(fragment);
  }
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.defined() && !parameter.requires_grad()) kept.push_back(parameter);
  }
  transaction.keep("what travels", travels);
  const auto set = [&](const char* name, const auto& value) {
    transaction.agreement().set("DiLoCo, LocalSGD", name, fmt::format("{}", value));
  };
  set("sync_every", options.sync_every);
  set("warm_up_steps", options.warm_up_steps);
  set("outer_learning_rate", options.outer_learning_rate);
  set("outer_momentum", options.outer_momentum);
  set("nesterov", options.nesterov);
  set("fragments", options.fragments);
  set("fragment_sync_delay", options.fragment_sync_delay);
  set("fragment_update_alpha", options.fragment_update_alpha);
  require_held("made");
}

std::vector<at::Tensor> LocalCore::buffers() const {
  std::vector<at::Tensor> all;
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined() && buffer.is_floating_point()) all.push_back(buffer);
  }
  return all;
}

std::string LocalCore::described_buffers() const {
  std::string all;
  for (const auto& buffer : module.named_buffers()) {
    if (buffer.value().defined() && buffer.value().is_floating_point())
      all += fmt::format("{} {};", buffer.key(), fmt::join(buffer.value().sizes(), ","));
  }
  return all;
}

void LocalCore::begin() {
  const at::NoGradGuard no_grad;
  for (Fragment& fragment : fragments) {
    for_each(fragment.parameters, fragment.global,
             [](const at::Tensor& own, const at::Tensor& place) { place.copy_(own); });
    if (fragment.momentum.defined()) fragment.momentum.zero_();
    note(fragment);
  }
}

void LocalCore::note(Fragment& fragment) {
  fragment.versions.clear();
  for (const at::Tensor& one : fragment.parameters) fragment.versions.push_back(one._version());
}

void LocalCore::require_held(const char* where) {
  std::unordered_set<const void*> held;
  for (const Fragment& fragment : fragments) {
    for (const at::Tensor& one : fragment.parameters) held.insert(one.unsafeGetTensorImpl());
  }
  const std::string who = fmt::format("DiLoCo, LocalSGD ({})", where);
  constexpr const char* kAdvice =
      "is trained and in no fragment, so that it would never be the same on all ranks: parameters were unfrozen, "
      "replaced "
      "or added since, or the module does not have all that the optimizer steps -- give all of the module; to unfreeze "
      "or replace, synchronize() first, and then make a new one";
  std::vector<step::Shown> shown = nn::shown_of(module);
  for (const step::Shown& one : shown) {
    if (one.requires_grad && !held.contains(one.identity))
      raise(ErrorCode::InvalidArgument, "{}: parameter '{}' {}", who, one.name, kAdvice);
  }
  for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    for (const at::Tensor& one : optimizer.param_groups()[i].params()) {
      if (one.defined() && one.requires_grad() && !held.contains(one.unsafeGetTensorImpl()))
        raise(ErrorCode::InvalidArgument, "{}: parameter of {} elements in group {} of the optimizer {}", who,
              one.numel(), i, kAdvice);
    }
  }
  // Parameters that are not averaged are each rank's own, and not compared.
  std::erase_if(shown, [&](const step::Shown& one) { return !held.contains(one.identity); });
  transaction.trained().update(std::move(shown), who.c_str(),
                               "it would never be the same on all ranks: synchronize() first, and then make a new one");
}

void LocalCore::require_unwritten() const {
  const at::NoGradGuard no_grad;
  for (const Fragment& fragment : fragments) {
    bool written = false;
    for (std::size_t i = 0; i < fragment.versions.size(); ++i)
      written = written || fragment.parameters[i]._version() != fragment.versions[i];
    bool same = true;
    if (written) {
      for_each(fragment.parameters, fragment.global, [&](const at::Tensor& own, const at::Tensor& place) {
        same = same && at::equal(own, place.to(own.scalar_type()));
      });
    }
    require(
        same,
        "parameters were written to since the last synchronisation, and no step was taken (weights were loaded?), "
        "which would be taken back -- load before it is made, or call parameters_written() on all ranks afterwards");
  }
}

void LocalCore::raise_non_finite(const Fragment& fragment) {
  std::string own;
  for (const auto& item : module.named_parameters()) {
    const bool here = std::ranges::any_of(fragment.parameters, [&](const at::Tensor& one) {
      return one.unsafeGetTensorImpl() == item.value().unsafeGetTensorImpl();
    });
    if (own.empty() && here && !at::isfinite(item.value()).all().item<bool>()) own = item.key();
  }
  own = own.substr(0, 255);
  std::array<std::uint64_t, 32> words = {};
  std::memcpy(words.data(), own.data(), own.size());
  const auto rows = step::gather_rows(*step::ranks_of(comm), {words.begin(), words.end()});
  std::string which;
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    const std::string name = rows[rank].empty() ? "" : reinterpret_cast<const char*>(rows[rank].data());
    if (!name.empty()) which += fmt::format("{}'{}' of rank {}", which.empty() ? "" : ", ", name, rank);
  }
  raise(
      ErrorCode::NonFinite,
      "DiLoCo, LocalSGD, step {}: the average over ranks is not finite, and the last synchronised parameters were kept "
      "-- NaN or infinite: parameter {} -- lower the learning rate or clip gradients there, and go on from a "
      "checkpoint",
      steps, which.empty() ? "of no rank now" : which);
}

void LocalCore::raise_fault(const std::string& what) const {
  raise(ErrorCode::InvalidArgument, "DiLoCo, LocalSGD: a number of samples is 0 or more, not {}", what);
}

double LocalCore::taken(double samples) {
  if (samples >= 0 && std::isfinite(samples)) return samples;
  const std::string what = fmt::format("{} in step {}", samples, steps + 1);
  if (!comm || comm.size() == 1) raise_fault(what);
  if (fault.empty()) fault = what;
  return 0;
}

std::int64_t LocalCore::period(std::int64_t step) const noexcept {
  return step <= options.warm_up_steps ? 1 : options.sync_every / options.fragments;
}

void LocalCore::go_on() {
  if (!under_way && since >= period(steps) - options.fragment_sync_delay)
    start(static_cast<std::size_t>(turn % options.fragments));
  if (!under_way || !due()) return;
  ++turn;
  since = 0;
  complete(options.fragment_update_alpha);
}

void LocalCore::start(std::size_t number) {
  require(static_cast<bool>(comm), "there is no world yet -- give a communicator, or add it to an elastic State");
  const at::NoGradGuard no_grad;
  Fragment& fragment = fragments[number];
  difference = fragment.global.clone();
  for_each(fragment.parameters, difference, [](const at::Tensor& own, const at::Tensor& place) { place.sub_(own); });
  if (options.wire_format != WireFormat::None) difference = difference.to(at::kFloat);
  fragment.sent = fragment.samples;
  fragment.sent_at = steps;
  fault_sent = std::exchange(fault, {});
  transaction.agreement().set("", "number of samples", fault_sent.empty() ? "0 or more" : fault_sent);
  transaction.agreement().set("", "number of steps", std::to_string(steps));  // a rank may have loaded another state
  AllReduceOptions average{.op = ReduceOp::Average,
                           .weight = fragment.sent,
                           .wire_format = options.wire_format,
                           .tag = transaction.agreement().tag(number)};
  under_way = number;
  travels->prepare();
  works.push_back(all_reduce(comm, difference, average));
  rest = besides(number);
  rest_of = described_buffers();
  average.wire_format = WireFormat::None;
  works.push_back(all_reduce(comm, rest, average));
}

at::Tensor LocalCore::besides(std::size_t number) const {
  std::vector<at::Tensor> tensors = {at::ones({1}, fragments[number].global.options().dtype(at::kFloat))};
  const std::vector<at::Tensor> averaged = buffers();
  if (number == 0) tensors.insert(tensors.end(), averaged.begin(), averaged.end());
  return flatten(tensors);
}

/// Averages the values sent beside a fragment again if buffers were added or removed meanwhile, or if no rank had
/// samples. In the latter case, all ranks have the same weight.
void LocalCore::average_buffers_anew(bool samples) {
  const std::string buffers = described_buffers();
  if (samples && (*under_way != 0 || buffers == rest_of)) return;
  rest = besides(*under_way);
  const double weight = samples ? fragments[*under_way].sent : 1.0;
  all_reduce(comm, rest, {.op = ReduceOp::Average, .weight = weight, .tag = static_cast<std::uint32_t>(fnv1a(buffers))})
      .wait();
}

void LocalCore::complete(double alpha) {
  bool samples = false;
  try {
    for (Work& work : works) work.wait();
    works.clear();
    samples = rest[0].item<double>() > 0;
    average_buffers_anew(samples);
  } catch (const Error& error) {
    if (error.context().tagged) fault_sent.clear();  // all ranks have learned of it
    drop();                                          // other fragments' faults are not reported as well
    transaction.end(step::Decision::by_error(step::Outcome::Lost));
    transaction.agreement().explain(*step::ranks_of(comm), error);
    throw;
  }
  if (!fault_sent.empty()) {  // so on all ranks
    const std::string sent = std::exchange(fault_sent, {});
    drop();
    transaction.end(step::Decision::by_error(step::Outcome::Lost));
    raise_fault(sent);
  }
  const at::NoGradGuard no_grad;
  Fragment& fragment = fragments[*under_way];
  if (!at::isfinite(difference).all().item<bool>()) {  // so on all ranks
    transaction.end(step::Decision::by_averages(step::Outcome::NotFinite));
    drop();
    raise_non_finite(fragment);
  }
  if (samples) {
    at::Tensor update = difference.to(fragment.global.scalar_type());
    if (fragment.momentum.defined()) {
      fragment.momentum.mul_(options.outer_momentum).add_(update);
      update = options.nesterov ? update.add(fragment.momentum, options.outer_momentum) : fragment.momentum;
    }
    fragment.global.sub_(update, options.outer_learning_rate);
  }
  ++fragment.synchronisations;
  fragment.synchronised_at = fragment.sent_at;
  fragment.samples -= fragment.sent;
  take(fragment, alpha);
  if (*under_way == 0) copy(buffers(), rest.slice(0, 1));
  transaction.end(step::Decision::by_averages(samples ? step::Outcome::Accepted : step::Outcome::NoSamples));
  drop();
  ++version;
  if (advance) advance();
}

void LocalCore::take(Fragment& fragment, double alpha) {
  const at::NoGradGuard no_grad;
  fragment.versions.clear();
  for_each(fragment.parameters, fragment.global, [alpha](const at::Tensor& own, const at::Tensor& global) {
    own.copy_(alpha == 0 ? global : global.lerp(own.to(global.scalar_type()), alpha));
  });
  if (alpha == 0) note(fragment);
}

void LocalCore::drop() noexcept {
  for (Work& work : works) {
    try {
      work.wait();
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): its world is gone
    }
  }
  works.clear();
  difference = rest = at::Tensor();
  under_way.reset();
  if (!fault_sent.empty()) fault = std::exchange(fault_sent, {});  // no other rank has learned of it
}

std::vector<std::pair<std::string, at::Tensor>> LocalCore::outer() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    all.emplace_back(fmt::format("outer/parameters/{}", i), fragments[i].global);
    if (fragments[i].momentum.defined())
      all.emplace_back(fmt::format("outer/momentum_buffer/{}", i), fragments[i].momentum);
  }
  return all;
}

LocalSteps::LocalSteps(torch::nn::Module& module, torch::optim::Optimizer& optimizer, Communicator comm,
                       const Options& options)
    : core_(std::make_shared<LocalCore>(module, optimizer, options)) {
  if (!comm) return;
  core_->comm = std::move(comm);
  begin();
}

void LocalSteps::begin() {
  std::vector<at::Tensor> all;
  for (const auto& [name, tensor] : checkpoint::named_tensors(core_->module)) all.push_back(tensor);
  if (core_->comm) broadcast_parameters(core_->comm, all);
  core_->begin();
}

void LocalSteps::parameters_written() {
  core_->require_held("parameters_written");
  core_->drop();
  begin();
  core_->since = 0;
  for (LocalCore::Fragment& fragment : core_->fragments) {
    fragment.synchronised_at = fragment.sent_at = core_->steps;
    fragment.samples = fragment.sent = 0;
  }
  core_->fault.clear();
  ++core_->version;
}

LocalSGD::LocalSGD(torch::nn::Module& module, torch::optim::Optimizer& optimizer, Communicator comm,
                   const LocalSGDOptions& options)
    : LocalSteps(module, optimizer, std::move(comm),
                 {{.sync_every = options.sync_every,
                   .outer_learning_rate = 1,
                   .outer_momentum = 0,
                   .wire_format = options.wire_format},
                  options.warm_up_steps}) {}

void LocalSteps::step(double samples) {
  samples = core_->taken(samples);
  core_->require_held("step");
  for (LocalCore::Fragment& fragment : core_->fragments) fragment.versions.clear();
  ++core_->steps;
  ++core_->since;
  for (LocalCore::Fragment& fragment : core_->fragments) fragment.samples += samples;
  if (!core_->advance) core_->go_on();
}

void LocalSteps::synchronize() {
  core_->require_held("synchronize");
  if (core_->under_way) core_->complete(0);
  core_->require_unwritten();
  for (std::size_t i = 0; i < core_->fragments.size(); ++i) {
    // If no step has come since, ranks may still differ by the parts of their own values that they have kept; another
    // synchronisation would apply the outer momentum again.
    if (core_->fragments[i].synchronised_at == core_->steps) {
      core_->take(core_->fragments[i], 0);
      continue;
    }
    core_->since = 0;
    core_->start(i);
    core_->complete(0);
  }
}

std::int64_t LocalSteps::steps_left() const noexcept {
  return std::max<std::int64_t>(0, core_->period(core_->steps + 1) - core_->since);
}

std::map<std::string, at::Tensor> LocalSteps::state() {
  LocalCore& self = *core_;
  for (Work& work : self.works) work.wait();
  for (const std::string& fault : {self.fault_sent, self.fault})
    if (!fault.empty()) self.raise_fault(fault);
  std::map<std::string, at::Tensor> state;
  std::vector<double> counts;
  for (const std::int64_t count : {self.steps, self.since, self.turn}) counts.push_back(static_cast<double>(count));
  counts.push_back(self.under_way ? static_cast<double>(*self.under_way) : -1);
  for (const LocalCore::Fragment& one : self.fragments) {
    for (const std::int64_t count : {one.synchronisations, one.synchronised_at, one.sent_at})
      counts.push_back(static_cast<double>(count));
    counts.insert(counts.end(), {one.samples, one.sent});
  }
  state["outer/counts"] = at::tensor(counts, at::kDouble);
  for (const auto& [name, tensor] : self.outer()) state[name] = tensor;
  if (self.difference.defined()) state["outer/difference"] = self.difference;
  if (self.rest.defined()) state["outer/rest"] = self.rest;
  for (const auto& [name, tensor] : checkpoint::named_tensors(self.module)) state["inner/" + name] = tensor.detach();
  const checkpoint::OptimizerSnapshot moments = checkpoint::snapshot(self.optimizer, self.module);
  for (const auto& one : moments.tensors.tensors())
    state["optimizer/" + one.name] = checkpoint::to_tensor(one.tensor, one.name);
  return state;
}

void LocalSteps::load_state(const std::map<std::string, at::Tensor>& state, bool own) {
  LocalCore& self = *core_;
  const at::NoGradGuard no_grad;
  const auto get = [&state](const std::string& name, at::IntArrayRef sizes) {
    const auto found = state.find(name);
    if (found == state.end() || found->second.sizes() != sizes)
      raise(ErrorCode::InvalidArgument,
            "DiLoCo, LocalSGD: the state has no '{}' of {} elements -- it is of a rank that {}", name,
            c10::multiply_integers(sizes), "had another model or other options");
    return found->second;
  };
  const auto parts = static_cast<std::int64_t>(self.fragments.size());
  const at::Tensor counts = get("outer/counts", {4 + 5 * parts});
  for (const auto& [name, tensor] : self.outer()) get(name, tensor.sizes());
  const auto number = [&counts, parts](std::int64_t i) {
    const auto value = counts[i].item<double>();
    const std::int64_t least = i == 3 ? -1 : 0, most = i == 3 ? parts - 1 : std::int64_t{1} << 53;
    if (!(value >= static_cast<double>(least) && value <= static_cast<double>(most) && value == std::floor(value)))
      raise(ErrorCode::InvalidArgument, "DiLoCo, LocalSGD: the state's 'outer/counts' has {} at {} -- it is damaged",
            value, i);
    return static_cast<std::int64_t>(value);
  };
  for (std::int64_t i = 0; i < 4 + 5 * parts; ++i) {
    const bool whole = i < 4 || (i - 4) % 5 < 3;
    if (whole || !(counts[i].item<double>() >= 0 && std::isfinite(counts[i].item<double>())))
      static_cast<void>(number(i));
  }
  for (const auto& [name, tensor] : checkpoint::named_tensors(self.module)) get("inner/" + name, tensor.sizes());
  at::Tensor difference, rest;
  if (number(3) >= 0) {
    const at::Tensor& global = self.fragments.at(static_cast<std::size_t>(number(3))).global;
    difference = get("outer/difference", global.sizes()).to(global.device());
    rest = get("outer/rest", self.besides(static_cast<std::size_t>(number(3))).sizes()).to(global.device());
  }
  std::function<void()> restore_optimizer = [] {};
  checkpoint::Snapshot moments;
  if (own) {
    for (const auto& [name, tensor] : state) {
      if (name.starts_with("optimizer/")) moments.add(name.substr(10), tensor);
    }
    restore_optimizer =
        checkpoint::restore(self.optimizer, checkpoint::names_of(self.module), moments.tensors(),
                            checkpoint::snapshot(self.optimizer, self.module).metadata, "the state of this rank");
  }
  self.drop();
  self.fault.clear();
  for (const auto& [name, tensor] : self.outer()) tensor.copy_(state.at(name));
  for (const auto& [name, tensor] : checkpoint::named_tensors(self.module))
    at::Tensor(tensor).copy_(state.at("inner/" + name));
  self.steps = number(0);
  self.since = number(1);
  self.turn = number(2);
  for (std::int64_t i = 0; i < parts; ++i) {
    LocalCore::Fragment& fragment = self.fragments[static_cast<std::size_t>(i)];
    fragment.synchronisations = number(4 + 5 * i);
    fragment.synchronised_at = number(5 + 5 * i);
    fragment.sent_at = number(6 + 5 * i);
    fragment.samples = own ? counts[7 + 5 * i].item<double>() : 0;
    fragment.sent = own ? counts[8 + 5 * i].item<double>() : 0;
    fragment.versions.clear();
    if (!own) self.take(fragment, 0);
  }
  ++self.version;
  restore_optimizer();
  if (number(3) < 0) return;
  self.under_way = static_cast<std::size_t>(number(3));  // this synchronisation's result has reached all ranks
  self.travels->prepare();
  self.transaction.resume();
  self.difference = difference;
  self.rest = rest;
  self.rest_of = self.described_buffers();
}

}  // namespace cohort::optim
