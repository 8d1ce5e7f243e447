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
  if (const auto world = decode_agreed_world(bytes)) {
    if (encode(*world) != bytes || world->hosts.empty()) std::abort();
    const AgreedPlace last = world->place_of(static_cast<int>(world->hosts.size()) - 1);
    if (last.local_rank >= last.local_size || last.cross_rank >= last.cross_size) std::abort();
  }
  (void)decode_failure(bytes);  // an error's text ends at its first NUL, so it need not be the same again
  return 0;
}
