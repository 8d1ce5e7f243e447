// Traces, as `cohort trace` reads them: a host's, whose times are placed on the common clock whatever it says of its
// own, and other programs' in Chrome's JSON.
#include "observe/trace/merge.h"
#include "observe/trace/trace_set.h"

#include <cohort/error.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::track;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  HostClock clock;
  for (TraceReader reader(text); reader.next();) {
    if (reader.line().size() > size) std::abort();
    if (reader.event()) clock.take(*reader.event());
  }
  clock.settle();
  for (TraceReader reader(text); reader.next();) {
    if (!reader.event()) continue;
    const std::int64_t there = clock.base_ns() + reader.event()->begun_ns;
    (void)clock.common_ns(there);
    (void)clock.realtime_of(there);
    (void)clock.host_ns_of(there);
  }
  try {
    for (const auto& [row, slices] : parse_chrome_trace(text, "trace.json").rows) {
      for (const ChromeSlice& slice : slices) {
        if (slice.ended_ns < slice.begun_ns) std::abort();
      }
    }
  } catch (const cohort::Error&) {
  }
  return 0;
}
