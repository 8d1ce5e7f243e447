// One run of a kernel: the operations that it asks for by name, on the memory of its inputs and outputs. It returns at
// once; TensorFlow's threads never wait for other ranks. One kernel's runs follow each other, since they use the same
// names.
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
  python::NamedCall call;  // but for its name and arrays
  std::vector<std::string> names;

  /// True if results are as long as the inputs: they lie in the inputs' memory if TensorFlow gives it up.
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
  /// The next run, if there is one, now that one is over. Nothing here is touched by the one that is over afterwards.
  std::unique_ptr<Execution> next();

 private:
  void start(std::unique_ptr<Execution> one);

  const Asked asked_;
  std::mutex mutex_;
  bool running_ = false;
  std::deque<std::unique_ptr<Execution>> waiting_;
};

/// The functions of `_core`, from now on. The text of why not; null if they will do.
const char* use(const python::NamedCalls* calls) noexcept;

}  // namespace cohort::tensorflow
