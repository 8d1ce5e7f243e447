#include "train/formats/idx.h"

#include <cstdlib>

using namespace cohort;
using namespace cohort::formats;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const auto array = parse_idx(std::as_bytes(std::span(data, size)), "fuzz", {.max_bytes = 1 << 20});
  if (array && static_cast<std::size_t>(array->elements()) * size_of(array->dtype) != array->data.size()) std::abort();
  return 0;
}
