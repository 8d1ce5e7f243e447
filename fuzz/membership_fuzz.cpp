// Membership of an elastic job, as its store has it.
#include "rendezvous/membership.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::rendezvous;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto membership = decode_membership(bytes);
  if (!membership) return 0;
  if (encode(*membership) != bytes) std::abort();
  for (std::size_t rank = 0; rank < membership->members.size() && rank < 64; ++rank) {
    const auto place = place_of(*membership, membership->members[rank].worker);
    if (!place || place->rank != static_cast<int>(rank) || place->local_rank >= place->local_size ||
        place->cross_rank >= place->cross_size)
      std::abort();
  }
  return 0;
}
