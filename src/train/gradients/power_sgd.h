// PowerSGD (Vogels et al. 2019, arXiv 1905.13727): a gradient that is a matrix M travels as two thin ones, P = M Q and
// Q = M' P with orthonormal P, and what that loses is added to the next step's gradient. What decides over replicas,
// orthogonalisation and P Q', has one order of operations and no code for particular processors, so replicas are equal
// to the bit on mixed machines; sums are the communicator's, which are. One thread at a time.
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
  /// Throws InvalidArgument for values that mean nothing.
  explicit PowerSGD(const nn::PowerSGDOptions& options);

  /// Part of a bucket: a parameter's gradient as a matrix, row by row. What is kept between steps goes by `name`, or
  /// where that is empty by `parameter`, its identity.
  struct Matrix {
    const void* parameter = nullptr;
    std::int64_t offset = 0;  ///< in the bucket, in elements
    std::int64_t rows = 1, columns = 1;
    std::string name = {};
  };
  /// A bucket of this step, in the order of buckets. It gets the average; if `finish` does not come or fails, it
  /// holds no gradient any more, and what is kept is that of the step before. Starts, and keeps `keep` until that is
  /// over. Only float32 is compressed. Ranks that differ in options, steps done or Q get Mismatch. Throws
  /// InvalidArgument where a matrix has another shape than what was restored of its parameter.
  void start(step::Ranks& ranks, const Buffer& bucket, std::vector<Matrix> gradients, std::shared_ptr<const void> keep);
  /// After the step's last bucket: all of them have their averages then. Waits. Nothing if that has been done. Where an
  /// average is not finite, nothing is kept, as after `drop_residuals`: all ranks see the same averages. Throws
  /// InvalidArgument for what was restored of parameters that have no gradient in this step.
  void finish(step::Ranks& ranks);

  /// At the first bucket of a step: those of one that has failed do not come back.
  void forget() {
    steps_.clear();
    q_ = 0;
  }
  /// The step before was refused or skipped, on all ranks: nothing is kept, so nothing of it comes with the next one.
  void drop_residuals() { kept_->drop(); }

  const nn::PowerSGDOptions& options() const noexcept { return options_; }
  /// Elements that were to be sent, and that were, in all compressed steps.
  std::pair<std::int64_t, std::int64_t> compression_stats() const noexcept { return {before_, after_}; }

  /// State of this rank between steps, for a checkpoint. By the parameter's name, or "#N" for the Nth without.
  struct Kept {
    std::int64_t rows = 0, columns = 0;
    std::vector<float> error;  ///< that of the last step, as M; empty: none
    std::vector<float> q;      ///< columns x rank, by column; empty: none
    void clear() {
      error.clear();
      q.clear();
    }
  };
  std::int64_t iteration() const noexcept { return iteration_; }
  const std::map<std::string, Kept>& kept() const noexcept { return kept_->values(); }
  /// Between two steps. Throws InvalidArgument, and changes nothing, for what `kept()` cannot have given.
  void restore(std::int64_t iteration, std::map<std::string, Kept> kept);

 private:
  struct Compressed {
    Matrix matrix;
    std::string key;  // in kept_
    std::int64_t rank = 1;
    std::size_t p = 0, q = 0;  // where they begin
  };
  struct Step {  // of a bucket
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
  // With a tag of options, steps done and `same`.
  std::unique_ptr<step::Pending> average(step::Ranks& ranks, const Buffer& values, std::shared_ptr<const void> keep,
                                         std::uint64_t same = 0);
  void finish_all(step::Ranks& ranks);

  nn::PowerSGDOptions options_;
  std::map<const void*, std::size_t> numbers_;  // of parameters without a name, as they came first
  std::shared_ptr<step::KeptByName<Kept>> kept_;
  step::Transaction transaction_;
  std::vector<Step> steps_;
  std::int64_t iteration_ = 0;
  std::uint64_t q_ = 0;  // a digest of the Qs that this step begins with
  std::int64_t before_ = 0, after_ = 0;
};

/// The columns of a matrix, one after the other, become orthonormal (or zero, where they depend on those before). The
/// same bits on all machines.
void orthogonalize(float* columns, std::int64_t rows, std::int64_t rank, double epsilon);

}  // namespace cohort::gradients
