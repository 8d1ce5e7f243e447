// Which rank reads which sample. The sampler: one permutation per epoch for the whole world, cut into steps of a global
// batch, each step spread evenly over the ranks: every sample exactly once, whatever the number of ranks. Pure
// arithmetic: no communication. One thread at a time per sampler. And `scatter_dataset`, which gives each rank a part
// of a data set for good, also of one that only one rank has.
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
  Keep,  ///< they make a smaller step, spread over the ranks; some may get none (weight 0)
  Drop,  ///< they are left out in this epoch
  Pad,   ///< the step is filled up with the first samples of the epoch's permutation
};

struct DistributedSamplerOptions {
  std::int64_t batch_size = 1;  ///< samples per rank and step
  bool shuffle = true;
  std::uint64_t seed = 0;
  Remainder remainder = Remainder::Keep;
  /// A number for each rank, as "2,1": its part of every step of batch_size times the ranks' number. Or "measured": by
  /// the speed at which each computes, found out and changed as training goes on, once DistributedDataParallel has been
  /// given the sampler. "even": all have the same. Empty: as COHORT_SHARES says, where DistributedDataParallel has been
  /// given it, else even. What is uneven wants averages by samples, as DistributedDataParallel with a sampler takes
  /// them.
  std::string shares = {};
  int rank = 0;        ///< used where no Communicator is given
  int world_size = 1;  ///< likewise
};

/// All that is needed to go on, with any number of ranks and any batch size. Plain numbers, for checkpoints.
struct SamplerState {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
  std::int64_t cursor = 0;  ///< samples of this epoch that optimizer steps have used, over all ranks
  std::int64_t size = 0;    ///< of the data set
  friend bool operator==(const SamplerState&, const SamplerState&) = default;
};

namespace detail {
// libtorch's optional is c10's in 1.13 and std's in 2.x: ask the functions that we override.
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

/// With torch's DataLoader, or by itself:
///
///   while (auto batch = sampler.next_batch()) { ...; optimizer.step(); sampler.step(); }
///   sampler.next_epoch();
///
/// A handle: copies are the same sampler (the DataLoader keeps one, `step` is called on yours).
/// DistributedDataParallel weights what each rank has, if it is given the sampler: then call `step` after each batch,
/// also where several are accumulated. All ranks see the same number of steps. In the last one of an epoch a rank may
/// get fewer samples, or none: an empty batch, of weight 0. With measured shares `step` is collective.
///
/// The permutation is the same for every world size, platform and version of Cohort and torch: a Fisher-Yates shuffle
/// (for i = size-1 .. 1 swap element i with element draw(i+1)) on std::mt19937_64 seeded with
/// splitmix64(splitmix64(seed) + epoch); draw(n) is the high word of x * n (Lemire 2019, arXiv 1805.10941, with its
/// rejection, so that it is unbiased).
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  using OptionalBatch = detail::ResultOf<decltype(&torch::data::samplers::Sampler<>::next)>;
  using OptionalSize = detail::ArgumentOf<decltype(&torch::data::samplers::Sampler<>::reset)>;

  /// `size` samples, numbered from 0. Throws InvalidArgument for negative sizes, batch sizes below 1, a rank outside
  /// the world, shares that are not one for each rank.
  DistributedSampler(std::int64_t size, const DistributedSamplerOptions& options = {});
  DistributedSampler(std::int64_t size, const Communicator& comm, DistributedSamplerOptions options = {});

  /// This rank's samples of the next step, possibly none; nullopt at the end of the epoch. Draws ahead of `step`: what
  /// has been drawn and not been stepped over is drawn again after `reset` or a restored state.
  std::optional<std::vector<std::int64_t>> next_batch();
  /// The oldest step drawn has been used by the optimizer: the cursor moves on. With `steps`, so many of them, which
  /// one step of the optimizer was of (accumulation): they have to be of equally many samples where
  /// DistributedDataParallel has the sampler, which else asks for a `step` after each. Throws InvalidArgument for more
  /// than were drawn, and below 1.
  void step(std::int64_t steps = 1);

  /// Samples over all ranks of the oldest step drawn and not stepped over (0 if there is none): the global batch.
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
  /// Goes on from there. Throws InvalidArgument if it is of a data set of another size.
  void load_state(const SamplerState& state);
  /// The rest of the epoch is for ranks of another world, in steps of `global_batch` samples over all of them: each has
  /// its share, which need not be the same. 0: batch_size for each rank. What has been drawn and not been stepped over
  /// is drawn again. Throws InvalidArgument for a rank outside the world.
  void set_world(int rank, int world_size, std::int64_t global_batch = 0);

  // For torch's DataLoader. Its batch size stands in for the options'; give both the same. It calls `reset` when an
  // epoch begins: that goes on at the cursor, and if the epoch was used up (or drawn to its end without any `step`)
  // begins the next one. The data set's get_batch has to accept an empty list: a rank may get no sample in the last
  // step.
  void reset(OptionalSize new_size = {}) override;
  OptionalBatch next(std::size_t batch_size) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  friend class nn::DataParallelCore;
  struct Shared;
  /// By DistributedDataParallel: it weights what each rank has.
  void bind(std::shared_ptr<step::Ranks> ranks) const;
  /// By its synchronising forwards: the ranks exchange their speeds, collectively, where shares are measured.
  void begin_step() const;
  std::int64_t full_step() const noexcept;
  std::int64_t samples_of_batch(std::optional<std::int64_t> trained_at) const;
  std::optional<std::vector<std::int64_t>> draw(std::int64_t batch_size);
  std::int64_t steps_from(std::int64_t cursor) const noexcept;
  void permute();
  void rewind();

  std::shared_ptr<Shared> shared_;
};

/// The permutation itself; see DistributedSampler.
std::vector<std::int64_t> permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch);

/// All but `root` is looked at on the root only.
struct ScatterDatasetOptions {
  int root = 0;
  bool shuffle = false;                    ///< parts of a permutation instead of the samples as they lie
  std::optional<std::uint64_t> seed = {};  ///< of the permutation (of epoch 0); default: another one each time
  /// All ranks get equally many samples, so that some are on two ranks if it does not divide; otherwise each is on one.
  bool force_equal_length = true;
};

/// This rank's part of so many samples, which the root's number counts for: their indices, the same as Python's
/// `scatter_dataset` takes. Collective, waits. Throws InvalidArgument on every rank if that number is negative.
std::vector<std::int64_t> scatter_index(std::int64_t n_total_samples, Communicator& comm,
                                        const ScatterDatasetOptions& options = {});

/// This rank's part of the root's data, such as {inputs, labels}: these rows of each tensor, on the CPU. Each rank is
/// sent its part alone. Collective, waits; `tensors` are looked at on the root only. Throws InvalidArgument on every
/// rank unless they are dense, with equally many rows (size(0)).
std::vector<at::Tensor> scatter_dataset(const std::vector<at::Tensor>& tensors, Communicator& comm,
                                        const ScatterDatasetOptions& options = {});

/// The samples `indices` of a data set of libtorch's; itself one, for make_data_loader and `map`.
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
/// -1: without a size.
std::vector<std::int64_t> scatter_index_of(std::int64_t size, Communicator& comm, const ScatterDatasetOptions& options);
}  // namespace detail

/// This rank's part of a data set that every rank has opened; nothing but the order is sent. Collective, waits. Throws
/// on every rank: InvalidArgument if the root's has no size, Mismatch if the ranks' have different ones.
template <class Dataset>
requires requires { typename Dataset::BatchType; }
SubDataset<Dataset> scatter_dataset(Dataset dataset, Communicator& comm, const ScatterDatasetOptions& options = {}) {
  const auto size = dataset.size();
  std::vector<std::int64_t> indices =
      detail::scatter_index_of(size.has_value() ? static_cast<std::int64_t>(*size) : -1, comm, options);
  return {std::move(dataset), std::move(indices)};
}

}  // namespace cohort::data
