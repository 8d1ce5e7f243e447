#include "comm/gpu/fake/kernels.h"

#include "comm/gpu/fold_kernels.cu"

#include <string_view>

namespace cohort::comm::cuda {

const PretendedKernel* fake_kernel(const char* name) {
#define FOLD(name, codec, ...) {"cohort_" #name, cohort_##name, sizeof(codec::Part), true},
#define LOOK(name, ...) {"cohort_" #name, cohort_##name, sizeof(__VA_ARGS__::Part), false},
  static constexpr PretendedKernel kAll[] = {COHORT_FOLD_KERNELS(FOLD) COHORT_FINITE_KERNELS(LOOK)};
#undef FOLD
#undef LOOK
  for (const PretendedKernel& kernel : kAll) {
    if (std::string_view(kernel.name) == name) return &kernel;
  }
  return nullptr;
}

}  // namespace cohort::comm::cuda
