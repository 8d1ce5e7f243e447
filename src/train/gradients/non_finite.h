// Finds the first gradient that is not finite, and its position, on each rank, and then on all ranks together. One
// thread per rank.
#pragma once

#include "train/gradients/autograd.h"
#include "train/gradients/buckets.h"
#include "train/step/ranks.h"

#include <cohort/finite.h>
#include <cohort/gradients.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace cohort::gradients {

/// The first non-finite gradient that this rank has found.
struct LocalNonFinite {
  std::size_t bucket = 0;
  int parameter = 0;  ///< the parameter's number, the same on all ranks
  NonFiniteElement element;
};

/// Returns the first element, in row-major order, that is not finite. The gradient has the parameter's strides.
std::optional<NonFiniteElement> first_in(const void* gradient, const Parameter& parameter,
                                         const FiniteOptions& options);

/// Collective; waits. Returns the finding in the lowest bucket, and of several ranks' that of the lowest rank; empty if
/// no rank has found one. Ranks that have joined take part automatically.
std::optional<NonFiniteGradient> first_of_all_ranks(step::Ranks& ranks, std::span<const Parameter> parameters,
                                                    const std::optional<LocalNonFinite>& mine, std::int64_t step);

/// Text of the error on all ranks.
std::string text_of(const NonFiniteGradient& gradient, std::span<const std::int64_t> sizes);

/// A reducer's search for non-finite gradients. A finding is reported by a flag in the step's message, so that no
/// further message is needed as long as nothing is found.
class FiniteSearch {
 public:
  /// `unread`: by parameter, the address at which the reduction reads its gradient; null: its place in the bucket.
  FiniteSearch(std::span<const Parameter> parameters, const std::vector<Bucket>& buckets,
               const std::vector<const void*>& unread, const nn::DistributedDataParallelOptions& options,
               Autograd& autograd)
      : parameters_(parameters), buckets_(buckets), unread_(unread), options_(options), autograd_(autograd) {}

  bool raises() const noexcept { return options_.non_finite == nn::NonFinite::Raise; }
  /// On one host, a large gradient that is reduced from where autograd made it is not checked first, to save a read:
  /// each rank checks the part of the average that it computes, and the gradient still exists afterwards.
  void set_looks_at_averages(bool looks) noexcept { looks_at_averages_ = raises() && looks; }
  bool looks_at_averages() const noexcept { return looks_at_averages_; }

  /// Forgets the finding, when a backward begins or is abandoned.
  void clear() noexcept { found_.reset(); }
  bool found() const noexcept { return found_.has_value(); }
  /// Searches a bucket; called right before its reduction, which reads the same memory next.
  void look(std::size_t bucket, const step::Ranks& ranks);
  /// Searches the gradients that `look` left out, because an average is not finite.
  void look_again(const step::Ranks& ranks);
  /// Collective; called when flags or averages, which are the same on all ranks, show that a gradient may be
  /// non-finite. Throws NonFiniteError on all ranks, unless only an average is not finite.
  void raise(step::Ranks& ranks, nn::ReducerStats& stats, std::int64_t step);

 private:
  FiniteOptions finite_options(const step::Ranks& ranks) const;
  void look_on_gpu(std::size_t bucket);
  void note(std::size_t bucket, std::size_t parameter, NonFiniteElement element);
  void note(std::size_t bucket, std::size_t parameter, const void* gradient, const FiniteOptions& options);

  std::span<const Parameter> parameters_;
  const std::vector<Bucket>& buckets_;
  const std::vector<const void*>& unread_;
  const nn::DistributedDataParallelOptions& options_;
  Autograd& autograd_;
  bool looks_at_averages_ = false;
  std::optional<LocalNonFinite> found_;  // the first finding of this rank in this step
};

}  // namespace cohort::gradients
