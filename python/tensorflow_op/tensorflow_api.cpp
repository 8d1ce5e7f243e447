#include "tensorflow_api.h"

#include <dlfcn.h>

namespace cohort::tensorflow {

Api tf;

const char* find_api() noexcept {
#define COHORT_FIND(name, ...)                                                \
  if (void* const found = ::dlsym(RTLD_DEFAULT, "TF_" #name)) {               \
    tf.name = reinterpret_cast<decltype(tf.name)>(found);                     \
  } else {                                                                    \
    return "TF_" #name;                                                       \
  }
  COHORT_TENSORFLOW_FUNCTIONS(COHORT_FIND)
#undef COHORT_FIND
  return nullptr;
}

}  // namespace cohort::tensorflow
