// PowerSGD (Vogels et al. 2019, arXiv 1905.13727): a gradient that is a matrix M is sent as two thin matrices, P = M Q
// and Q = M' P with orthonormal P, and the approximation error is added to the next step's gradient. Replicas stay
// equal to the bit on mixed machines: orthogonalisation and P Q' have one order of operations and no processor-specific
// code, and the communicator's sums are the same everywhere. One thread at a time.
#pragma once

#include "train/step/method.h"
#include "train/step/ranks.h"

#include <cohort/gradients.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cohort::gradients {

class PowerSGD {
 public:
  /// Throws InvalidArgument for options out of range.
  explicit PowerSGD(const nn::PowerSGDOptions& options);

  /// Part of a bucket: a parameter's gradient as a matrix, row by row. State kept between steps is found by `name`; if
  /// that is empty, by `parameter`, which identifies the parameter.
  struct Matrix {
    const void* parameter = nullptr;
    std::int64_t offset = 0;  ///< offset in the bucket, in elements
    std::int64_t rows = 1, columns = 1;
    std::string name = {};
  };
  /// Starts the reduction of a bucket; called in the order of buckets. `finish` writes the average to the bucket. If
  /// `finish` is not called or fails, the bucket holds no gradient any more, and the kept state stays that of the step
  /// before. Holds `keep` until the reduction is over. Only float32 is compressed. Ranks with different options, steps
  /// done or Q get Mismatch. Throws InvalidArgument if a matrix has another shape than its parameter's restored state.
  void start(step::Ranks& ranks, const Buffer& bucket, std::vector<Matrix> gradients, std::shared_ptr<const void> keep);
  /// Waits until all buckets have their averages; called after the step's last bucket. Does nothing if called again. If
  /// an average is not finite, which is so on all ranks, no state is kept, as after `drop_residuals`. Throws
  /// InvalidArgument if state was restored for a parameter that has no gradient in this step.
  void finish(step::Ranks& ranks);

  /// Discards the buckets of a failed step; called before the first bucket of a step.
  void forget() {
    steps_.clear();
    q_ = 0;
  }
  /// Drops the kept state, so that nothing of a step that all ranks refused or skipped enters the next step.
  void drop_residuals() { kept_->drop(); }

  const nn::PowerSGDOptions& options() const noexcept { return options_; }
  /// Returns the number of elements before compression, and of elements sent, over all compressed steps.
  std::pair<std::int64_t, std::int64_t> compression_stats() const noexcept { return {before_, after_}; }

  /// State of this rank between steps, for a checkpoint. Its key: the parameter's name, or "#N" for the Nth without
  /// one.
  struct Kept {
    std::int64_t rows = 0, columns = 0;
    std::vector<float> error;  ///< error of the last step, with M's shape; empty: none
    std::vector<float> q;      ///< columns x rank, by column; empty: none
    void clear() {
      error.clear();
      q.clear();
    }
  };
  std::int64_t iteration() const noexcept { return iteration_; }
  const std::map<std::string, Kept>& kept() const noexcept { return kept_->values(); }
  /// To be called between two steps. Throws InvalidArgument, and changes nothing, if `kept()` cannot have returned it.
  void restore(std::int64_t iteration, std::map<std::string, Kept> kept);

 private:
  struct Compressed {
    Matrix matrix;
    std::string key;  // in kept_
    std::int64_t rank = 1;
    std::size_t p = 0, q = 0;  // offsets in Step::p and Step::q
  };
  struct Step {  // state of one bucket's reduction
    Buffer bucket;
    std::vector<Compressed> compressed;
    std::vector<Matrix> whole;
    std::shared_ptr<std::vector<float>> rest = {}, p = {}, q = {};
    std::unique_ptr<step::Pending> rest_work = {}, p_work = {}, q_work = {};
  };

  std::string key_of(const Matrix& matrix);
  void make_q(const Compressed& one, float* q);
  static bool is_finite(const Step& step);
  void average_and_keep(const Compressed& one, const Step& step, bool accepted);
  // Starts an average, with a tag made of the options, the steps done and `same`.
  std::unique_ptr<step::Pending> average(step::Ranks& ranks, const Buffer& values, std::shared_ptr<const void> keep,
                                         std::uint64_t same = 0);
  void finish_all(step::Ranks& ranks);

  nn::PowerSGDOptions options_;
  std::map<const void*, std::size_t> numbers_;  // numbers of parameters without a name, by first gradient
  std::shared_ptr<step::KeptByName<Kept>> kept_;
  step::Transaction transaction_;
  std::vector<Step> steps_;
  std::int64_t iteration_ = 0;
  std::uint64_t q_ = 0;  // digest of the Qs with which this step begins
  std::int64_t before_ = 0, after_ = 0;
};

/// Makes the columns of a matrix orthonormal, one after the other; a column that depends on earlier ones becomes zero.
/// Gives the same bits on all machines.
void orthogonalize(float* columns, std::int64_t rows, std::int64_t rank, double epsilon);

}  // namespace cohort::gradients
