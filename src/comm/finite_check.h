// What somebody wants to know of the result of an operation, beside the result itself. Shared by the request, on which
// a backend that has seen all results while they were made notes what it has seen, and by the Work. One thread notes,
// before the operation is done; any thread may ask after that.
#pragma once

#include "comm/kernels/finite.h"

#include <cohort/buffer.h>

#include <atomic>
#include <memory>
#include <utility>

namespace cohort::comm {

class FiniteCheck {
 public:
  explicit FiniteCheck(ConstBuffer result) noexcept : result_(result) {}

  /// The result is here, too, as long as `keep` lives. Before the operation is done.
  void read_instead(ConstBuffer result, std::shared_ptr<void> keep) noexcept {
    result_ = result;
    keep_ = std::move(keep);
  }
  /// By the backend, of the results of all ranks together. Where none does, the result is read once more.
  void note(bool finite) noexcept { seen_.store(finite ? Seen::Finite : Seen::NonFinite, std::memory_order_relaxed); }
  /// Of a finished operation, whose result is still as it was.
  bool finite() const {
    const Seen seen = seen_.load(std::memory_order_relaxed);
    if (seen == Seen::Nothing) return !has_non_finite(result_.data, result_.count, result_.dtype);
    return seen == Seen::Finite;
  }

 private:
  enum class Seen : unsigned char { Nothing, Finite, NonFinite };
  ConstBuffer result_;
  std::shared_ptr<void> keep_;
  std::atomic<Seen> seen_{Seen::Nothing};
};

}  // namespace cohort::comm
