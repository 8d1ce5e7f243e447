#include "tensorflow_api.h"

#include <dlfcn.h>

namespace cohort::tensorflow {

Api tf;

namespace {

/// Newer versions show their functions to the whole process, older ones to whom links them.
void* find(const char* name) noexcept {
  if (void* const found = ::dlsym(RTLD_DEFAULT, name)) return found;
  // Of a process that has it: never closed, as TensorFlow itself never is.
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

}  // namespace cohort::tensorflow
