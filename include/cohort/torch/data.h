// Defines which rank reads which sample. The sampler has one permutation per epoch for the whole world, cut into steps
// of a global batch, each step spread evenly over the ranks, so every sample occurs exactly once, for any number of
// ranks. Pure arithmetic, without communication. One thread at a time per sampler. `scatter_dataset` gives each rank a
// permanent part of a data set, which only one rank need have.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::nn {
class DataParallelCore;
}
namespace cohort::step {
class Ranks;
}

namespace cohort::data {

/// Treatment of the last samples of an epoch when they do not fill a global batch.
enum class Remainder : std::uint8_t {
  Keep,  ///< they make a smaller step, spread over the ranks; some ranks may get none (weight 0)
  Drop,  ///< they are left out in this epoch
  Pad,   ///< the step is filled up with the first samples of the epoch's permutation
};

struct DistributedSamplerOptions {
  std::int64_t batch_size = 1;  ///< samples per rank and step
  bool shuffle = true;
  std::uint64_t seed = 0;
  Remainder remainder = Remainder::Keep;
  /// The ranks' shares of a step (of batch_size samples times the number of ranks), a number for each, such as "2,1".
  /// "measured": shares follow the ranks' speeds, measured during training; needs a DistributedDataParallel with this
  /// sampler. "even": equal shares. Empty: as COHORT_SHARES says in a DistributedDataParallel with this sampler, else
  /// even. Uneven shares need averages by samples, as of a DistributedDataParallel with a sampler.
  std::string shares = {};
  /// V > 0, for a DistributedDataParallel with as many virtual_ranks: a step has batch_size * V samples, and
  /// `next_batch` serves this rank's virtual ranks in turn, each as a rank in a world of V ranks. Call `step` after
  /// each. Not with shares.
  std::int64_t virtual_ranks = 0;
  int rank = 0;        ///< used where no Communicator is given
  int world_size = 1;  ///< used where no Communicator is given
};

/// State to resume from, with any number of ranks and any batch size. Plain numbers, for checkpoints.
struct SamplerState {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
  std::int64_t cursor = 0;  ///< samples of this epoch that optimizer steps have used, over all ranks
  std::int64_t size = 0;    ///< size of the data set
  friend bool operator==(const SamplerState&, const SamplerState&) = default;
};

namespace detail {
// libtorch's optional is c10's in 1.13 and std's in 2.x: take it from the functions that we override.
template <class>
struct Signature;
template <class Class, class Result, class Argument>
struct Signature<Result (Class::*)(Argument)> {
  using result = Result;
  using argument = Argument;
};
template <class Member>
using ResultOf = typename Signature<Member>::result;
template <class Member>
using ArgumentOf = typename Signature<Member>::argument;
}  // namespace detail

/// For use with torch's DataLoader, or by itself:
///
///   while (auto batch = sampler.next_batch()) { ...; optimizer.step(); sampler.step(); }
///   sampler.next_epoch();
///
/// A handle: copies are the same sampler (the DataLoader keeps a copy, `step` is called on yours). A
/// DistributedDataParallel with this sampler weights each rank's gradients by its samples. Then call `step` after each
/// batch, also if several batches are accumulated. All ranks see the same number of steps. In the last step of an epoch
/// a rank may get fewer samples, or none: an empty batch, of weight 0. With measured shares `step` is collective.
///
/// The permutation is the same for every world size, platform and version of Cohort and torch: a Fisher-Yates shuffle
/// (for i = size-1 .. 1 swap element i with element draw(i+1)) on std::mt19937_64 seeded with
/// splitmix64(splitmix64(seed) + epoch); draw(n) is the high word of x * n (Lemire 2019, arXiv 1805.10941, with its
/// rejection, so that it is unbiased).
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  using OptionalBatch = detail::ResultOf<decltype(&torch::data::samplers::Sampler<>::next)>;
  using OptionalSize = detail::ArgumentOf<decltype(&torch::data::samplers::Sampler<>::reset)>;

  /// Samples are numbered from 0 to `size` - 1. Throws InvalidArgument for negative sizes, batch sizes below 1, a rank
  /// outside the world, or a number of shares that is not the number of ranks.
  DistributedSampler(std::int64_t size, const DistributedSamplerOptions& options = {});
  DistributedSampler(std::int64_t size, const Communicator& comm, DistributedSamplerOptions options = {});

  /// This rank's samples of the next step, possibly none; nullopt at the end of the epoch. May draw ahead of `step`:
  /// drawn batches whose `step` has not been called are drawn again after `reset` or a restored state.
  std::optional<std::vector<std::int64_t>> next_batch();
  /// Moves the cursor past the oldest drawn batch, which the optimizer has used (with virtual ranks: past a step, at
  /// this rank's last batch of that step). With `steps`, moves it past that many batches, accumulated in one step of
  /// the optimizer. A DistributedDataParallel demands that these batches have equally many samples, or a `step` after
  /// each. Throws InvalidArgument for more steps than were drawn, and below 1.
  void step(std::int64_t steps = 1);

  /// Virtual rank of the oldest drawn batch whose `step` was not called; -1 if there is none, or without virtual ranks.
  int virtual_rank() const noexcept;
  /// The global batch, that is the samples over all ranks, of the oldest batch drawn whose `step` has not been called;
  /// 0 if there is none.
  std::int64_t global_batch() const noexcept;
  /// Steps from the cursor to the end of the epoch, the same on all ranks.
  std::int64_t steps_left() const noexcept;
  /// Steps in a whole epoch.
  std::int64_t steps_per_epoch() const noexcept;

  std::int64_t epoch() const noexcept;
  std::int64_t cursor() const noexcept;
  std::int64_t size() const noexcept;
  /// Goes to the beginning of an epoch.
  void set_epoch(std::int64_t epoch);
  void next_epoch();

  const DistributedSamplerOptions& options() const noexcept;
  SamplerState state() const noexcept;
  /// Continues from `state`. Throws InvalidArgument if `state` is of a data set of another size.
  void load_state(const SamplerState& state);
  /// Divides the rest of the epoch over the ranks of another world, in steps of `global_batch` samples over all ranks,
  /// of which each rank has its share (equal or not). 0: batch_size for each rank. Drawn batches whose `step` has not
  /// been called are drawn again. Virtual ranks and a step's samples keep their numbers. Throws InvalidArgument for a
  /// rank outside the world, more ranks than virtual ranks, and another global batch than theirs.
  void set_world(int rank, int world_size, std::int64_t global_batch = 0);

  // For torch's DataLoader. The DataLoader's batch size replaces options().batch_size; give both the same. The
  // DataLoader calls `reset` when an epoch begins: `reset` continues at the cursor, or begins the next epoch if this
  // one was used up (or drawn to its end without any `step`). The data set's get_batch has to accept an empty list: a
  // rank may get no sample in the last step.
  void reset(OptionalSize new_size = {}) override;
  OptionalBatch next(std::size_t batch_size) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  friend class nn::DataParallelCore;
  struct Shared;
  /// Called by DistributedDataParallel, which weights each rank's gradients by its samples.
  void bind(std::shared_ptr<step::Ranks> ranks) const;
  /// Called by synchronising forwards of DistributedDataParallel: if shares are measured, the ranks exchange their
  /// speeds (collective).
  void begin_step() const;
  std::int64_t full_step() const noexcept;
  std::int64_t samples_of_batch(std::optional<std::int64_t> trained_at) const;
  std::optional<std::vector<std::int64_t>> draw(std::int64_t batch_size);
  std::int64_t steps_from(std::int64_t cursor) const noexcept;
  void permute();
  void rewind();

  std::shared_ptr<Shared> shared_;
};

/// Seed for a sample's own random numbers (augmentation), the same on any rank and in any batch.
std::uint64_t sample_seed(std::int64_t index, std::int64_t epoch, std::uint64_t seed = 0) noexcept;

/// The permutation itself; see DistributedSampler.
std::vector<std::int64_t> permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch);

/// Only the root's values count, except for `root` itself.
struct ScatterDatasetOptions {
  int root = 0;
  bool shuffle = false;                    ///< true: parts of a permutation of the samples
  std::optional<std::uint64_t> seed = {};  ///< seed of the permutation (of epoch 0); default: a new seed each time
  /// True: all ranks get equally many samples, some of which are on two ranks if the number does not divide. False:
  /// each sample is on one rank.
  bool force_equal_length = true;
};

/// Returns the indices of this rank's part of `n_total_samples` samples (the root's number counts), the same indices as
/// from Python's `scatter_dataset`. Collective, waits. Throws InvalidArgument on every rank if that number is negative.
std::vector<std::int64_t> scatter_index(std::int64_t n_total_samples, Communicator& comm,
                                        const ScatterDatasetOptions& options = {});

/// Returns this rank's part of the root's data, such as {inputs, labels}: the rank's rows of each tensor, on the CPU.
/// The root sends each rank only its part. Collective, waits; `tensors` are read on the root only. Throws
/// InvalidArgument on every rank unless the tensors are dense and have equally many rows (size(0)).
std::vector<at::Tensor> scatter_dataset(const std::vector<at::Tensor>& tensors, Communicator& comm,
                                        const ScatterDatasetOptions& options = {});

/// The samples `indices` of a libtorch data set, as a data set for make_data_loader and `map`.
template <class Dataset>
class SubDataset : public torch::data::datasets::BatchDataset<SubDataset<Dataset>, typename Dataset::BatchType> {
 public:
  SubDataset(Dataset dataset, std::vector<std::int64_t> indices)
      : dataset_(std::move(dataset)), indices_(std::move(indices)) {}

  typename Dataset::BatchType get_batch(c10::ArrayRef<std::size_t> request) override {
    std::vector<std::size_t> of_all;
    for (const std::size_t index : request) of_all.push_back(static_cast<std::size_t>(indices_.at(index)));
    return dataset_.get_batch(of_all);
  }
  decltype(std::declval<const Dataset&>().size()) size() const override { return indices_.size(); }
  const std::vector<std::int64_t>& indices() const noexcept { return indices_; }

 private:
  Dataset dataset_;
  std::vector<std::int64_t> indices_;
};

namespace detail {
/// `size` -1: the data set has no size.
std::vector<std::int64_t> scatter_index_of(std::int64_t size, Communicator& comm, const ScatterDatasetOptions& options);
}  // namespace detail

/// Returns this rank's part of a data set that every rank has opened; only indices are sent. Collective, waits. On
/// every rank, throws InvalidArgument if the root's data set has no size, Mismatch if the ranks' sizes differ.
template <class Dataset>
requires requires { typename Dataset::BatchType; }
SubDataset<Dataset> scatter_dataset(Dataset dataset, Communicator& comm, const ScatterDatasetOptions& options = {}) {
  const auto size = dataset.size();
  std::vector<std::int64_t> indices =
      detail::scatter_index_of(size.has_value() ? static_cast<std::int64_t>(*size) : -1, comm, options);
  return {std::move(dataset), std::move(indices)};
}

}  // namespace cohort::data
