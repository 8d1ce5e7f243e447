// Input over ssh before either side has authenticated: an agent's announcement among a shell's output, and an
// invitation. Accepted input encodes to the same text again.
#include "launch/start/invitation.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::launch;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto announcement = parse_announcement(text)) {
    const auto again = parse_announcement(to_line(*announcement));
    if (!again || again->protocol != announcement->protocol) std::abort();
  }
  if (const auto invitation = parse_invitation(text)) {
    const auto again = parse_invitation(to_text(*invitation));
    if (!again || !(again->secret == invitation->secret) || again->supervisor.size() != invitation->supervisor.size())
      std::abort();
  }
  return 0;
}
