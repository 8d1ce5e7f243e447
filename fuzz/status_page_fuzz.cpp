// A rank's status page with anything in it, since a program that goes astray may write there: the agent reads what it
// finds, and what it makes of it can be sent.
#include "launch/health/verdict.h"
#include "launch/messages.h"
#include "launch/rank_report.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort;
  using Layout = status::StatusLayout;
  if (size < 2) return 0;
  // Offsets at which the bytes are written: the page is large, and most of it is words.
  constexpr std::size_t kPlaces[] = {0,
                                     offsetof(Layout, words_ready),
                                     offsetof(Layout, words),
                                     offsetof(Layout, kinds),
                                     offsetof(Layout, groups),
                                     offsetof(Layout, names),
                                     offsetof(Layout, times)};
  const auto page = std::make_unique<Layout>();
  std::size_t at = kPlaces[data[0] % std::size(kPlaces)];
  // The second byte says how often they are repeated. Pages full of words take long and say nothing new.
  for (int times = data[1] % 16 + 1; times > 0 && at < sizeof(Layout); --times) {
    const std::size_t count = std::min(size - 2, sizeof(Layout) - at);
    if (count == 0) break;
    std::memcpy(reinterpret_cast<char*>(page.get()) + at, data + 2, count);
    at += count;
  }
  const launch::RankReport report = launch::read_status(*page);
  if (report.groups.size() > Layout::kGroups) std::abort();
  (void)launch::doing(report);
  (void)launch::at_step(report);
  (void)launch::has_left(report);
  const std::string words = launch::last_words(*page);
  if (words.size() > 4 * Layout::kWordsBytes) std::abort();
  (void)launch::demangled(words.substr(0, 1024));
  launch::Exited exited;
  exited.cause = launch::read_cause(*page);
  if (!launch::decode(launch::encode(exited))) std::abort();
  if (!launch::decode(launch::encode(launch::Reports{{report}}))) std::abort();
  return 0;
}
