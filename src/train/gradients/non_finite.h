// The first gradient that is not finite: where it is, how a rank looks for it, and how all ranks learn of it. One
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

/// The first that this rank has found.
struct LocalNonFinite {
  std::size_t bucket = 0;
  int parameter = 0;  ///< its number, the same on all ranks
  NonFiniteElement element;
};

/// The first element that is not finite in the order of the dimensions, of a gradient that lies as the parameter says.
std::optional<NonFiniteElement> first_in(const void* gradient, const Parameter& parameter,
                                         const FiniteOptions& options);

/// Collective; waits. That of the lowest bucket, and there of the lowest rank; empty if no rank has one. Ranks that
/// have joined need not know of it.
std::optional<NonFiniteGradient> first_of_all_ranks(step::Ranks& ranks, std::span<const Parameter> parameters,
                                                    const std::optional<LocalNonFinite>& mine, std::int64_t step);

/// Text of the error on all ranks.
std::string text_of(const NonFiniteGradient& gradient, std::span<const std::int64_t> sizes);

/// How a reducer looks for them. What is found is told by a flag: no rank needs another message as long as there is
/// nothing to tell.
class FiniteSearch {
 public:
  /// `unread`: by parameter, where the reduction reads its gradient, if not at its place.
  FiniteSearch(std::span<const Parameter> parameters, const std::vector<Bucket>& buckets,
               const std::vector<const void*>& unread, const nn::DistributedDataParallelOptions& options,
               Autograd& autograd)
      : parameters_(parameters), buckets_(buckets), unread_(unread), options_(options), autograd_(autograd) {}

  bool raises() const noexcept { return options_.non_finite == nn::NonFinite::Raise; }
  /// On one host a large gradient that is reduced out of where autograd made it is not looked at before, which would be
  /// to read it once more: whoever makes a part of the average looks at that, and the gradient is there afterwards.
  void set_looks_at_averages(bool looks) noexcept { looks_at_averages_ = raises() && looks; }
  bool looks_at_averages() const noexcept { return looks_at_averages_; }

  /// A pass begins, or is forgotten.
  void clear() noexcept { found_.reset(); }
  bool found() const noexcept { return found_.has_value(); }
  /// Right before the bucket's reduction, which reads the same memory next.
  void look(std::size_t bucket, const step::Ranks& ranks);
  /// Some average is not finite: at what was not looked at.
  void look_again(const step::Ranks& ranks);
  /// Collective: all ranks know from the flags, or from the averages, that there may be something to tell. Throws
  /// NonFiniteError on all; an average of finite gradients that is not finite is none.
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
  std::optional<LocalNonFinite> found_;  // the first of this rank, in this step
};

}  // namespace cohort::gradients
