#include "horovod/tensorflow_op/tensorflow_api.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>

namespace cohort::tensorflow {

Api tf;

namespace {

/// Newer TensorFlow shows its functions to the whole process, older TensorFlow only to libraries linked with it.
void* find(const char* name) noexcept {
  if (void* const found = ::dlsym(RTLD_DEFAULT, name)) return found;
  // Opens only a library that the process has loaded (RTLD_NOLOAD), and never closes it, as TensorFlow never is.
  static void* const framework = ::dlopen("libtensorflow_framework.so.2", RTLD_LAZY | RTLD_NOLOAD);
  return framework != nullptr ? ::dlsym(framework, name) : nullptr;
}

}  // namespace

const char* find_api() noexcept {
#define COHORT_FIND(name, Result, parameters)             \
  if (void* const found = find("TF_" #name)) {            \
    tf.name = reinterpret_cast<decltype(tf.name)>(found); \
  } else {                                                \
    return "TF_" #name;                                   \
  }
  COHORT_TENSORFLOW_FUNCTIONS(COHORT_FIND)
#undef COHORT_FIND
  return nullptr;
}

namespace {

using Function = std::function<void()>;

/// libstdc++'s std::function: two words of the functor, and two functions of one library, its manager and its invoker.
struct Layout {
  void* functor[2];
  void* manager;
  void* invoker;
};

bool is_libstdcxx(const void* function) noexcept {
  static_assert(sizeof(Function) == sizeof(Layout), "this library has to be built with libstdc++");
  Layout seen;
  std::memcpy(&seen, function, sizeof seen);
  Dl_info manager{};
  Dl_info invoker{};
  return seen.manager != nullptr && seen.invoker != nullptr && ::dladdr(seen.manager, &manager) != 0 &&
         ::dladdr(seen.invoker, &invoker) != 0 && manager.dli_fbase == invoker.dli_fbase;
}

/// TensorFlow comes from one build, so what holds for the first function holds for all.
bool can_copy(const void* function) noexcept {
  enum : int { kUnknown, kYes, kNo };
  static std::atomic<int> known{kUnknown};
  int answer = known.load(std::memory_order_relaxed);
  if (answer == kUnknown) {
    answer = is_libstdcxx(function) ? kYes : kNo;
    known.store(answer, std::memory_order_relaxed);
  }
  return answer == kYes;
}

}  // namespace

DoneCallback::DoneCallback(const TF_AsyncOpKernelDoneCallback* lent) {
  if (can_copy(lent)) held_ = *reinterpret_cast<const Function*>(lent);
}

void DoneCallback::run() { tf.RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&held_)); }

}  // namespace cohort::tensorflow
