// The function that an asynchronous kernel calls when it is done. TensorFlow lends it for the time of the call that
// starts the kernel: what is called later has to be a copy. It is a std::function behind an opaque pointer, so a copy
// can be made where TensorFlow was built with libstdc++, as this library is.
#pragma once

#include "tensorflow_api.h"

#include <functional>

namespace cohort::tensorflow {

class DoneCallback {
 public:
  /// Nothing, if it is not known how to copy what is lent.
  explicit DoneCallback(const TF_AsyncOpKernelDoneCallback* lent);
  explicit operator bool() const noexcept { return static_cast<bool>(held_); }
  void run();

 private:
  std::function<void()> held_;
};

}  // namespace cohort::tensorflow
