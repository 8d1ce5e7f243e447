// One run of a kernel: the operations that it requests by name, on the memory of its inputs and outputs. It returns at
// once, so TensorFlow's threads never wait for other ranks. One kernel's runs follow each other, since they use the
// same names.
#pragma once

#include "horovod/bindings/named_calls.h"
#include "horovod/tensorflow_op/tensorflow_api.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace cohort::tensorflow {

/// The attributes of a node.
struct Asked {
  std::uint64_t engine = 0;
  python::NamedCall call;  // without name and arrays
  std::vector<std::string> names;

  /// Returns true if results are as long as the inputs. They lie in the inputs' memory if TensorFlow gives it up.
  bool keeps_shape() const noexcept {
    return call.kind == python::NamedKind::AllReduce || call.kind == python::NamedKind::Broadcast;
  }
};

class Execution;

/// A node of a graph. It outlives its runs.
class Kernel {
 public:
  explicit Kernel(Asked asked);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  const Asked& asked() const noexcept { return asked_; }

  void run(TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done);
  /// Called when a run is over; returns the next run, if any. The ended run must not use the kernel after that.
  std::unique_ptr<Execution> next();

 private:
  void start(std::unique_ptr<Execution> one);

  const Asked asked_;
  std::mutex mutex_;
  bool running_ = false;
  std::deque<std::unique_ptr<Execution>> waiting_;
};

/// Uses these functions of `_core` from now on. Returns null, or a text that says why they cannot be used.
const char* use(const python::NamedCalls* calls) noexcept;

}  // namespace cohort::tensorflow
