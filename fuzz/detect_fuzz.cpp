// Environments: "NAME=VALUE" lines. Whatever they hold, a rank is within its world, or the error says why not.
#include "rendezvous/detect.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::rendezvous;
  std::string_view text(reinterpret_cast<const char*>(data), size);
  Environment environment;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const std::size_t equals = line.find('=');
    if (equals != std::string_view::npos) environment[std::string(line.substr(0, equals))] = line.substr(equals + 1);
  }
  const auto detected = detect(environment);
  if (!detected) return 0;
  if (detected->rank < 0 || detected->rank >= detected->size) std::abort();
  if (detected->local_rank && detected->local_size && *detected->local_rank >= *detected->local_size) std::abort();
  if (detected->size > 1 && detected->meeting == Meeting::None) std::abort();
  if (detected->meeting == Meeting::Address && (detected->address.host.empty() || detected->address.port == 0))
    std::abort();
  return 0;
}
