// live.json, as programs that show a run read it: any bytes are refused or read, and what was read is written and read
// back as the same.
#include "launch/output/live_run.h"

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::launch;
  const auto run = parse_live_run(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!run) return 0;
  const std::string text = to_json(*run);
  const auto again = parse_live_run(text);
  if (!again || again->ranks.size() != run->ranks.size() || to_json(*again) != text) std::abort();
  return 0;
}
