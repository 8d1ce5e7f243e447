// Run records, as `cohort plot` and `cohort export` read them: whatever the lines hold, each is an event or counted,
// and a picture and a page of metrics come out.
#include "observe/export/prometheus.h"
#include "observe/plot/curves.h"
#include "telemetry/record.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::track;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const RecordLines record = parse_record(text);
  const auto lines = static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
  if (record.events.size() + record.damaged > lines) std::abort();
  if (record.torn != (!text.empty() && text.back() != '\n')) std::abort();
  for (const auto& event : record.events) (void)event.integer("step");
  PrometheusFile prometheus("unwritten.prom", PrometheusFormat::OpenMetrics);
  for (const auto& event : record.events) prometheus.take({event});
  if (!prometheus.text(PrometheusFormat::OpenMetrics).ends_with("# EOF\n")) std::abort();
  if (record.events.empty()) return 0;  // such pictures are all the same
  const std::string picture = render_svg(figure_of(series_of(record)));
  if (!picture.starts_with("<svg") || !picture.ends_with("</svg>\n")) std::abort();
  // Text of the record must not become markup.
  if (picture.find("<script") != std::string::npos) std::abort();
  return 0;
}
