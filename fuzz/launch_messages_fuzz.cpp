// Bytes from the other end of a control connection: decoding does no harm, and what it accepts is what encode makes. A
// numbered message is taken once, if its number is the next.
#include "launch/messages.h"
#include "launch/numbered_messages.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto message = cohort::launch::decode(bytes);
  if (message && cohort::launch::encode(*message) != bytes) std::abort();
  if (const auto* const relayed = message ? std::get_if<cohort::launch::Relayed>(&*message) : nullptr) {
    cohort::launch::NumberedMessages numbers(relayed->number.host);
    numbers.add("x");
    const auto first = numbers.take(*relayed);
    const auto second = numbers.take(*relayed);
    if (first && *first && (relayed->number.number != 1 || !second || *second)) std::abort();
  }
  return 0;
}
