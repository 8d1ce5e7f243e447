// The cost of tracing to a rank: an event by itself, and small collectives with and without it, in turns of 50 (within
// one process, so that both meet the same machine). `cohort run --trace -np 2 trace_step`; without --trace all turns
// are without. Rank 0 prints.
#include "telemetry/timeline.h"

#include <cohort/cohort.h>
#include <cohort/track.h>

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
namespace timeline = cohort::status::timeline;

constexpr int kTurns = 400;
constexpr int kOperations = 50;
constexpr int kEvents = 2000;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

double cpu_us() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

void switch_to(bool on) { timeline::detail::state.store(on ? timeline::detail::kOn : timeline::detail::kOff); }

}  // namespace

int main() {
  cohort::Communicator comm = cohort::init();
  const bool traced = timeline::on();
  std::vector<double> spans, events;
  for (int turn = 0; turn < kTurns; ++turn) {
    auto begun = Clock::now();
    for (int i = 0; i < kEvents; ++i) cohort::track::Span span("forward");
    spans.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begun).count() / kEvents);
    begun = Clock::now();
    const timeline::Event event{cohort::status::TimelineKind::Span, "all_reduce", begun, begun, 1, 0, 0, {}};
    for (int i = 0; i < kEvents; ++i) timeline::add(event);
    events.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begun).count() / kEvents);
  }
  std::vector<float> values(1024, 0);
  std::vector<double> wall[2], cpu[2];
  for (int turn = 0; turn < 2 * kTurns; ++turn) {
    const std::size_t with = turn % 2 == 0 && traced ? 1 : 0;
    if (traced) switch_to(with == 1);
    comm.barrier().wait();
    const auto begun = Clock::now();
    const double cpu_begun = cpu_us();
    for (int i = 0; i < kOperations; ++i) comm.all_reduce(std::span(values)).wait();
    wall[with].push_back(std::chrono::duration<double, std::micro>(Clock::now() - begun).count() / kOperations);
    cpu[with].push_back((cpu_us() - cpu_begun) / kOperations);
  }
  if (traced) switch_to(true);
  comm.barrier().wait();
  if (comm.rank() != 0) return 0;
  std::printf("%s: an event %.0f ns, a span with its two looks at the clock %.0f ns\n", traced ? "traced" : "untraced",
              median(events), median(spans));
  for (const std::size_t with : {std::size_t{0}, std::size_t{1}}) {
    if (wall[with].empty()) continue;
    std::printf("all_reduce of 4 KiB %s: %.3f us, CPU %.3f us\n", with == 1 ? "traced" : "not traced",
                median(wall[with]), median(cpu[with]));
  }
}
