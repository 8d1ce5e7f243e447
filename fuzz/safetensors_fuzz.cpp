// What is accepted has to be the same after being written and read again.
#include "train/formats/safetensors.h"

#include <algorithm>
#include <cstdlib>

using namespace cohort;
using namespace cohort::formats;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const auto file = parse_safetensors(std::as_bytes(std::span(data, size)), "fuzz");
  if (!file) return 0;
  std::vector<std::byte> written;
  const Sink sink = [&](std::span<const std::byte> bytes) -> Result<void> {
    written.insert(written.end(), bytes.begin(), bytes.end());
    return {};
  };
  if (!write_safetensors(sink, file->tensors, file->metadata)) std::abort();
  const auto back = parse_safetensors(written, "fuzz");
  if (!back || back->tensors.size() != file->tensors.size() || back->metadata != file->metadata) std::abort();
  for (const NamedTensor& entry : file->tensors) {
    const TensorView* const view = back->find(entry.name);
    if (view == nullptr || view->type != entry.tensor.type || view->shape != entry.tensor.shape ||
        !std::equal(view->bytes.begin(), view->bytes.end(), entry.tensor.bytes.begin(), entry.tensor.bytes.end())) {
      std::abort();
    }
  }
  return 0;
}
