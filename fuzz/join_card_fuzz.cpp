// What ranks show each other when they meet.
#include "meet/card.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::meet;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (const auto card = decode_card(bytes)) {
    if (encode(*card) != bytes || card->rank >= card->size) std::abort();
    (void)describe(*card);
  }
  if (const auto verdict = decode_verdict(bytes)) {  // an error is no value: its text is checked by decoding alone
    if (encode_verdict(*verdict) != bytes) std::abort();
  }
  return 0;
}
