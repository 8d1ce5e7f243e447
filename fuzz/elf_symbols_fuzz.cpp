#include "telemetry/last_words.h"

#include <cstdlib>
#include <cstring>

using namespace cohort::status;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  if (size < 8) return 0;
  std::uint64_t address = 0;
  std::memcpy(&address, data, sizeof address);
  const auto file = std::as_bytes(std::span(data + 8, size - 8));
  const FunctionSymbol found = find_function(file, address);
  if (found.offset > address) std::abort();
  // All of the name lies in the file.
  for (const char header : found.name) {
    if (header == '\0') std::abort();
  }
  return 0;
}
