// Any input of a stranger to a listener, in pieces as the first byte tells: never a message, never established.
#include "net/tls.h"

#include <array>
#include <cstdint>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::net;
  if (size < 2) return 0;
  std::array<std::uint8_t, Secret::kBytes> bytes{};
  bytes.fill(7);
  const auto session = TlsSession::make(data[0] % 2 == 0, Secret::from_bytes(bytes), "store");
  if (!session) std::abort();
  std::string_view rest(reinterpret_cast<const char*>(data + 1), size - 1);
  const std::size_t piece = 1 + data[0] / 2U;
  while (!rest.empty()) {
    const std::string_view part = rest.substr(0, piece);
    rest.remove_prefix(part.size());
    if (!(*session)->feed(part)) return 0;
    const auto done = (*session)->handshake();
    if (!done) return 0;
    if (*done) std::abort();  // nobody proves a secret by chance
    (void)(*session)->take_output();
  }
  return 0;
}
