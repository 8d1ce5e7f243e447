// Bytes from the other end of a control connection: decoding does no harm, and what it accepts is what encode makes.
#include "launch/messages.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto message = cohort::launch::decode(bytes);
  if (message && cohort::launch::encode(*message) != bytes) std::abort();
  return 0;
}
