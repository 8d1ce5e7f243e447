// Training that goes on when ranks are lost, leave or come: `run` calls a function once for each world of an elastic
// job
// (`cohort run --min-np`), in processes that keep their memory. A State has what the training consists of: `step` marks
// the end of each optimizer step, and before the next world trains all ranks have the state of the last step that any
// of them has ended, compared to the bit. State and World belong to the thread that calls `run`.
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
#include <cohort/join_options.h>

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

/// Thrown by `step` when the world has changed, on all ranks alike. `run` catches it; a function that catches it has to
/// rethrow it.
class MembershipChanged : public Error {
 public:
  using Error::Error;
};

/// One world of the job.
class World {
 public:
  /// `epoch`: of the job's membership; nothing where it is not elastic.
  World(Communicator communicator, std::optional<std::uint64_t> epoch)
      : communicator_(std::move(communicator)), epoch_(epoch) {}

  Communicator& communicator() noexcept { return communicator_; }
  int rank() const noexcept { return communicator_.rank(); }
  int size() const noexcept { return communicator_.size(); }
  std::optional<std::uint64_t> epoch() const noexcept { return epoch_; }
  /// Size of the first world of this state, on any rank: a global batch or learning rate was made for it.
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
    ConstBuffer memory;  ///< of the CPU
  };
  std::string layout;                      ///< all that `assign` needs beside the items
  std::vector<Item> items = {};            ///< in an order of the part's own, the same on all ranks
  std::shared_ptr<const void> owner = {};  ///< of their memory
};

/// Something large that only optimizer steps change, and that all ranks have alike: parameters, moments. It is not
/// copied while nothing happens.
class Part {
 public:
  virtual ~Part() = default;
  /// Good until the part changes.
  virtual Contents contents() = 0;
  /// Takes what another rank's has. Throws if it does not fit; then nothing is changed.
  virtual void assign(const Contents& contents) = 0;
  /// Another number whenever it may have been changed since.
  virtual std::uint64_t version() = 0;
};

/// Something small, of which a copy is kept at each step: counters, a sampler's position, statistics of BatchNorm, the
/// state of a generator.
struct Value {
  enum class Scope : std::uint8_t {
    World,  ///< all ranks are to have the same: a rank that comes or lags behind gets it
    Rank,   ///< each rank has its own: it goes back to that of the last step, and is never sent
  };
  std::function<void(std::string& bytes)> save;  ///< overwrites them, with what `load` takes
  std::function<void(const std::string& bytes)> load;
  Scope scope = Scope::World;
};

/// Position of a sampler, as the ledger has it.
struct SamplePosition {
  std::int64_t epoch = 0;   ///< of the data set
  std::int64_t cursor = 0;  ///< samples of this epoch that steps have used, over all ranks
};

class State {
 public:
  State();
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Adds to the state, before `run`, under a name that all ranks give. Throws InvalidArgument for a name that is taken.
  State& add(const std::string& name, std::shared_ptr<Part> part);
  State& add(const std::string& name, Value value);
  /// A number of the caller's.
  template <class T>
  requires std::is_arithmetic_v<T> State& add(const std::string& name, T& number) {
    return add(
        name,
        Value{[&number](std::string& bytes) { bytes.assign(reinterpret_cast<const char*>(&number), sizeof number); },
              [&number](const std::string& bytes) { bytes.copy(reinterpret_cast<char*>(&number), sizeof number); }});
  }
  /// Adds anything that has an `attach(State&, const std::string&, T&, options...)`, as <cohort/torch/elastic.h> has
  /// for modules, optimizers and samplers.
  template <class T, class... More>
  requires(!std::is_arithmetic_v<T> && !std::is_convertible_v<T&, std::shared_ptr<Part>> &&
           !std::is_convertible_v<T&, Value>) State& add(const std::string& name, T& thing, More&&... more) {
    attach(*this, name, thing, std::forward<More>(more)...);
    return *this;
  }
  /// The ledger says which samples each step has used; see Options.
  void add_samples(const std::string& name, std::function<SamplePosition()> position);

  /// Called with each new world, once all ranks have the same state and before the function trains in it.
  void on_change(std::function<void(const World&)> callback);
  /// Called by `step` before anything else.
  void on_step(std::function<void()> callback);
  /// Called by `step` after everything else: for what all ranks do together once a step has ended, such as
  /// synchronising parameters of which each has its own. A callback that changes a part calls `advance`.
  void after_step(std::function<void()> callback);

  /// The optimizer has taken a step. Call it right after that, and after whatever else a step changes (a rate, an
  /// average of weights), with no collective in between: after a later failure training goes on from here, and after an
  /// earlier one the step is done again. Later changes are lost if the members change with this step. Throws
  /// MembershipChanged, on all ranks at the same step, where ranks come or leave as planned, and what a collective
  /// throws.
  void step();
  /// A part has been changed beside a step, on all ranks alike, and is not to be lost with the next one: right after
  /// that. Not counted by `steps`. Only where there is an `after_step`.
  void advance();
  /// Steps that have ended since training began, in whatever world.
  std::int64_t steps() const noexcept;
  /// Sets the steps of a checkpoint that training resumes from; before `run`.
  void set_steps(std::int64_t steps);

  // The stages of `run`, for programs that form worlds themselves.

  /// Makes all ranks' state that of the last step that any of them has ended. Collective. Throws Mismatch where ranks
  /// that ended the same step differ and no more than half of them agree; Unavailable where nobody has a whole state,
  /// and where all ranks have come anew and others had trained in this attempt of the job.
  void enter(World& world, const std::filesystem::path& ledger = {});
  /// The world of `enter` is left, because of this error: whether another one can take its place.
  bool leave(const Error& error);
  enum class Wait : std::uint8_t {
    Over,  ///< the next world is to be formed
    Save,  ///< others have not come for 10 s, or the job is to end: this rank, which has gone furthest, saves its state
    End,   ///< the job is to end
  };
  /// Waits, after `leave`, until the job has members for another world, which `join` waits for after 10 s.
  Wait await_members();
  /// The training has ended: the rest of the ledger is written.
  void finish();
  /// The job is to end: asked of all ranks by the launcher, and agreed at this step.
  bool told_to_end() const noexcept;
  /// Likewise, of this rank alone: the others go on without it.
  bool told_to_leave() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct Options {
  JoinOptions join = {};
  /// File in which rank 0 records the samples that each step has used, a JSON line for each 64 steps and each change
  /// (docs/reference/elastic.md). Default: samples-W.jsonl in the run's folder, W the number of the process in its job;
  /// none without `cohort run`.
  std::optional<std::filesystem::path> ledger = {};
  /// Saves a checkpoint. Called on all ranks at the same step, with their world, when the job is to end (SIGTERM,
  /// SIGUSR1); `run` returns kRequeueStatus afterwards, and 143 (128 + SIGTERM) if there is no `save`. Also called once
  /// while a job waits for more members, with a world of one, on the rank that has gone furthest.
  std::function<void(World&)> save = {};
};

/// Calls `train` with a world, and again with the next one, until it returns in a world of which no rank is lost. It is
/// called with the state as it stands, also at its end: loops begin where the state says. Returns 0, or kRequeueStatus
/// if the job is to end, or goes on without this process: return it from main. Rethrows exceptions of `train` that are
/// no loss of a rank. If the job is not elastic there is one world.
int run(State& state, const std::function<void(World&)>& train, const Options& options = {});

}  // namespace cohort::elastic
