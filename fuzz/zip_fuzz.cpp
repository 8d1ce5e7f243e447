// Archives: entries have to lie within the bytes, and a whole .pt must not crash.
#include "train/formats/pt.h"
#include "train/formats/weights.h"
#include "train/formats/zip.h"

#include <cstdlib>

using namespace cohort;
using namespace cohort::formats;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  static_cast<void>(parse_weights(bytes, "fuzz"));
  const auto archive = ZipReader::parse(bytes, "fuzz");
  if (!archive) return 0;
  std::uint64_t total = 0;
  for (const ZipEntry& entry : archive->entries()) {
    if (archive->find(entry.name) == nullptr) std::abort();
    const auto content = archive->read(entry);
    if (content) total += content->size();
  }
  if (total > size) std::abort();  // entries overlap
  return 0;
}
