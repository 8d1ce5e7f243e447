// A configuration file: reading does no harm, and what is read has keys, lines and values.
#include "launch/plan/program.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto entries = cohort::launch::parse_config(text, "f");
  if (!entries) return 0;
  for (const auto& entry : *entries) {
    if (entry.line < 1 || (!entry.is_list && entry.values.size() != 1)) std::abort();
  }
  return 0;
}
