// Messages that ranks exchange when they form a world.
#include "rendezvous/meeting.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::rendezvous;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (const auto info = decode_member_info(bytes)) {
    if (encode(*info) != bytes || info->rank >= info->size) std::abort();
    (void)describe(*info);
  }
  if (const auto decision = decode_decision(bytes)) {  // an error is no value: its text is checked by decoding alone
    if (encode_decision(*decision) != bytes) std::abort();
  }
  return 0;
}
