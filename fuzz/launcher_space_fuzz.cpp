// Input from a launcher's key-value space: lines of PMI's protocol, and the offer that rank 0 left there.
#include "rendezvous/exchange.h"
#include "rendezvous/place.h"

#include <cstdint>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::rendezvous;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto reply = parse_pmi_line(text)) {
    if (!reply->contains("cmd")) std::abort();
  }
  if (const auto offer = decode_offer(text)) {
    const auto written = encode(*offer, size + 1024);
    if (!written) std::abort();
    const auto again = decode_offer(*written);
    if (!again || again->addresses != offer->addresses || !(again->secret == offer->secret)) std::abort();
  }
  return 0;
}
