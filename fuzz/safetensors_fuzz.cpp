// Accepted files have to be the same after being written and read again. As the part of a checkpoint with shards, a
// file is refused, or each of its tensors can be put together out of it.
#include "train/formats/safetensors.h"
#include "train/formats/shards.h"

#include <algorithm>
#include <cstdlib>

using namespace cohort;
using namespace cohort::formats;

namespace {

void check_shards(std::span<const std::byte> bytes) {
  constexpr const char* kName = "rank-00000.safetensors";
  StoredCheckpoint stored{"fuzz", {}};
  stored.manifest.version = kManifestVersion;
  stored.manifest.files[kName].bytes = bytes.size();
  const auto all =
      tensors_of(stored, {{kName, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size())}});
  if (!all) return;
  for (const auto& [name, tensor] : all->tensors) {
    std::vector<std::byte> whole(*byte_count(tensor.type, tensor.sizes()));
    std::vector<Copy> copies;
    add_copies(tensor, whole_shard(tensor.sizes()), kName, whole.data(), copies);
    std::size_t filled = 0;
    for (const Copy& copy : copies) {
      if (copy.offset > bytes.size() || copy.bytes > bytes.size() - copy.offset || copy.to < whole.data() ||
          copy.bytes > whole.size() - static_cast<std::size_t>(copy.to - whole.data())) {
        std::abort();
      }
      filled += copy.bytes;
    }
    if (filled != whole.size()) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const auto file = parse_safetensors(std::as_bytes(std::span(data, size)), "fuzz");
  if (!file) return 0;
  check_shards(std::as_bytes(std::span(data, size)));
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
