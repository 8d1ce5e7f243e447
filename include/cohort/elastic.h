// Training that goes on when ranks are lost, leave or come: `run` calls a function once for each world of an elastic
// job (`cohort run --min-np`), in processes that keep their memory. A State holds the training's state: `step` marks
// the end of each optimizer step. Before the next world trains, all ranks get the state of the last step that any of
// them has ended. States of the same step are compared. State and World belong to the thread that calls `run`.
//
//   cohort::elastic::State state;
//   state.add("model", *net).add("optimizer", optimizer, *net).add("sampler", sampler);    // <cohort/torch/elastic.h>
//   return cohort::elastic::run(state, [&](cohort::elastic::World& world) {
//     cohort::nn::DistributedDataParallel model(net, world.communicator(), {.sampler = &sampler});
//     for (; sampler.epoch() < 10; sampler.next_epoch()) {
//       while (auto batch = sampler.next_batch()) { ...; loss.backward(); optimizer.step(); state.step(); }
//     }
//   });
#pragma once

#include <cohort/buffer.h>
#include <cohort/communicator.h>
#include <cohort/error.h>
#include <cohort/exit_status.h>
#include <cohort/init_options.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cohort::elastic {

class State;

/// Thrown by `step`, on all ranks, when the world has changed. `run` catches it; a function that catches it has to
/// rethrow.
class MembershipChanged : public Error {
 public:
  using Error::Error;
};

/// One world of the job.
class World {
 public:
  /// `epoch`: epoch of the job's membership; nullopt if the job is not elastic.
  World(Communicator communicator, std::optional<std::uint64_t> epoch)
      : communicator_(std::move(communicator)), epoch_(epoch) {}

  Communicator& communicator() noexcept { return communicator_; }
  int rank() const noexcept { return communicator_.rank(); }
  int size() const noexcept { return communicator_.size(); }
  std::optional<std::uint64_t> epoch() const noexcept { return epoch_; }
  /// Size of this state's first world, for which a global batch or learning rate was chosen; the same on new ranks.
  int first_size() const noexcept { return first_size_; }

 private:
  friend class State;
  Communicator communicator_;
  std::optional<std::uint64_t> epoch_;
  int first_size_ = 0;
};

/// Contents of a part at one moment.
struct Contents {
  struct Item {
    std::string name;
    ConstBuffer memory;  ///< the item's bytes, on the CPU
  };
  std::string layout;                      ///< text that `assign` needs besides the items
  std::vector<Item> items = {};            ///< in the part's own order, the same on all ranks
  std::shared_ptr<const void> owner = {};  ///< owner of the items' memory
};

/// A large part of the state that only optimizer steps change, and that is the same on all ranks: parameters, moments.
/// Steps do not copy it.
class Part {
 public:
  virtual ~Part() = default;
  /// The result is valid until the part changes.
  virtual Contents contents() = 0;
  /// Takes over another rank's contents. Throws, without changing anything, if they do not fit.
  virtual void assign(const Contents& contents) = 0;
  /// Returns a number that differs from earlier ones if the part may have changed since.
  virtual std::uint64_t version() = 0;
};

/// A small part of the state, copied at each step: counters, a sampler's position, statistics of BatchNorm, the state
/// of a generator.
struct Value {
  enum class Scope : std::uint8_t {
    World,  ///< all ranks have the same value: a rank that is new or lags behind receives it
    Rank,   ///< each rank has its own value, never sent; a repeated step starts with the value after the last step
  };
  std::function<void(std::string& bytes)> save;  ///< overwrites `bytes` with text for `load`
  std::function<void(const std::string& bytes)> load;
  Scope scope = Scope::World;
};

/// Position of a sampler, as recorded in the ledger.
struct SamplePosition {
  std::int64_t epoch = 0;   ///< number of the pass over the data set
  std::int64_t cursor = 0;  ///< samples of this epoch used by steps, over all ranks
};

class State {
 public:
  State();
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Adds to the state, before `run`, under a name that is the same on all ranks. Throws InvalidArgument for a name in
  // use.
  State& add(const std::string& name, std::shared_ptr<Part> part);
  State& add(const std::string& name, Value value);
  /// Adds a number that the caller owns.
  template <class T>
  requires std::is_arithmetic_v<T> State& add(const std::string& name, T& number) {
    return add(
        name,
        Value{[&number](std::string& bytes) { bytes.assign(reinterpret_cast<const char*>(&number), sizeof number); },
              [&number](const std::string& bytes) { bytes.copy(reinterpret_cast<char*>(&number), sizeof number); }});
  }
  /// Adds any object that has an `attach(State&, const std::string&, T&, options...)`; <cohort/torch/elastic.h> has one
  /// for modules, optimizers and samplers.
  template <class T, class... More>
  requires(!std::is_arithmetic_v<T> && !std::is_convertible_v<T&, std::shared_ptr<Part>> &&
           !std::is_convertible_v<T&, Value>) State& add(const std::string& name, T& thing, More&&... more) {
    attach(*this, name, thing, std::forward<More>(more)...);
    return *this;
  }
  /// Makes the ledger record which samples each step has used; see Options.
  void add_samples(const std::string& name, std::function<SamplePosition()> position);

  /// `callback` is called with each new world, after all ranks have the same state and before the function trains.
  void on_change(std::function<void(const World&)> callback);
  /// `step` calls `callback` before anything else.
  void on_step(std::function<void()> callback);
  /// `step` calls `callback` after everything else. Use it for operations of all ranks that follow a step, such as
  /// synchronising parameters that differ between ranks. A callback that changes a part calls `advance`.
  void after_step(std::function<void()> callback);

  /// Marks the end of a step. Call it right after the optimizer's step and all other changes of that step (a rate, an
  /// average of weights), with no collective in between. If a rank fails after this call, training goes on from here;
  /// if one fails before, the step is repeated. Later changes are lost if the members change with this step. Throws
  /// MembershipChanged, on all ranks at the same step, if ranks come or leave as planned, and what a collective throws.
  void step();
  /// Marks a change that all ranks have made to a part outside of a step, so that the change is kept if the next step
  /// fails. Call it right after the change. `steps` does not count it. Only with an `after_step`.
  void advance();
  /// Number of steps that have ended since training began, over all worlds.
  std::int64_t steps() const noexcept;
  /// Sets the steps of a checkpoint that training resumes from; before `run`.
  void set_steps(std::int64_t steps);

  // The stages of `run`, for programs that form worlds themselves.

  /// Gives all ranks the state of the last step that any of them has ended. Collective. Throws Mismatch if ranks that
  /// ended the same step differ and at most half of them agree; Unavailable if no rank has a whole state, or if all
  /// ranks are new and others had trained in this attempt of the job.
  void enter(World& world, const std::filesystem::path& ledger = {});
  /// Leaves the world of `enter` because of this error. Returns whether another world can take its place.
  bool leave(const Error& error);
  enum class Wait : std::uint8_t {
    Over,  ///< the next world is to be formed
    Save,  ///< no other rank has come for 10 s, or the job is to end: this rank saves its state, since it is furthest
           ///< in training (or, if the job's launcher is lost, since it was the first rank of the last world)
    End,   ///< the job is to end
  };
  /// After `leave`, waits until the job has members for another world; after 10 s, `init` does the waiting.
  Wait await_members();
  /// Returns whether `init` failed to form the next world because the job ends, so that its members do not come any
  /// more. `await_members` then says which rank saves. Waits for a second.
  bool ends_without_world(const Error& error);
  /// Writes the rest of the ledger when training has ended.
  void finish();
  /// True if the job is to end: the launcher has asked all ranks, and they have agreed at this step.
  bool told_to_end() const noexcept;
  /// True if only this rank is to leave, and the others go on without it.
  bool told_to_leave() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct Options {
  InitOptions init = {};
  /// File in which rank 0 records the samples that each step has used, a JSON line for each 64 steps and each change
  /// (docs/reference/elastic.md). Default: samples-W.jsonl in the run's folder, where W is the number of the process in
  /// its job; no ledger without `cohort run`.
  std::optional<std::filesystem::path> ledger = {};
  /// Saves a checkpoint. Called on all ranks at the same step, with their world, when the job is to end (SIGTERM,
  /// SIGUSR1); `run` returns kRequeueStatus afterwards, and 143 (128 + SIGTERM) if there is no `save`. Also called once
  /// while a job waits for more members, with a world of one, on the rank that is furthest in training.
  std::function<void(World&)> save = {};
};

/// Calls `train` with a world, and again with the next world, until `train` returns in a world that has lost no rank.
/// `train` may be called at any point of training, also at its end, so its loops have to begin where the state says.
/// Returns 0, or kRequeueStatus if the job is to end or goes on without this process: return that from main. Rethrows
/// exceptions of `train` that do not report the loss of a rank. A job that is not elastic has one world.
int run(State& state, const std::function<void(World&)>& train, const Options& options = {});

}  // namespace cohort::elastic
