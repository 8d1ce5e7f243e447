// Reports of ranks, as agents send them, and the launcher's judgement over them: any numbers, in any order, at any
// time.
#include "launch/health/health.h"
#include "launch/messages.h"
#include "launch/output/live_run.h"

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

namespace {

using namespace cohort::launch;

// Ranks 0 and 1 and the evaluator are on one host, rank 2 and a server on another.
constexpr int kRanks = 3;
const Roles kRoles{kRanks, 1, true};
const std::vector<int> kHostA{0, 1, 4}, kHostB{2, 3};

GroupReport a_group(FuzzedDataProvider& input) {
  GroupReport group;
  group.id = input.ConsumeIntegralInRange<std::uint64_t>(0, 3);
  group.rank = input.ConsumeBool() ? input.ConsumeIntegralInRange<std::int32_t>(-1, kRanks)
                                   : input.ConsumeIntegral<std::int32_t>();
  group.size = input.ConsumeBool() ? input.ConsumeIntegralInRange<std::int32_t>(-1, kRanks)
                                   : input.ConsumeIntegral<std::int32_t>();
  group.begun =
      input.ConsumeBool() ? input.ConsumeIntegralInRange<std::uint64_t>(0, 3) : input.ConsumeIntegral<std::uint64_t>();
  group.ended = input.ConsumeIntegralInRange<std::uint64_t>(0, 3);
  group.operation = input.ConsumeRandomLengthString(24);
  group.waiting = input.ConsumeBool();
  group.waited_ns = input.ConsumeIntegral<std::uint64_t>();
  group.longest_ns = input.ConsumeIntegral<std::uint64_t>();
  group.longest_number = input.ConsumeIntegral<std::uint64_t>();
  group.message = input.ConsumeRandomLengthString(8);
  group.peer = input.ConsumeIntegralInRange<std::int32_t>(-2, kRanks + 1);
  group.message_number = input.ConsumeIntegral<std::uint64_t>();
  return group;
}

RankReport a_report(FuzzedDataProvider& input) {
  RankReport report;
  report.rank = input.ConsumeIntegralInRange<std::int32_t>(0, kRoles.all() - 1);
  report.pid = input.ConsumeIntegral<std::int32_t>();
  report.has_page = input.ConsumeBool();
  report.state = input.ConsumeBool() ? static_cast<std::uint8_t>('T') : input.ConsumeIntegral<std::uint8_t>();
  report.cpu_ms = input.ConsumeIntegral<std::uint64_t>();
  report.memory = input.ConsumeIntegral<std::uint64_t>();
  report.step = input.ConsumeIntegral<std::int64_t>();
  report.samples = input.ConsumeIntegral<std::int64_t>();
  report.exposed_ns = input.ConsumeIntegral<std::uint64_t>();
  report.not_finite = input.ConsumeRandomLengthString(8);
  for (int left = input.ConsumeIntegralInRange(0, 3); left > 0; --left) report.groups.push_back(a_group(input));
  report.named.waiting = input.ConsumeBool();
  report.named.name = input.ConsumeRandomLengthString(8);
  report.named.ended = input.ConsumeIntegral<std::uint64_t>();
  report.times.steps = input.ConsumeIntegral<std::int64_t>();
  report.times.waited_ns = input.ConsumeIntegral<std::uint64_t>();
  return report;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider input(data, size);
  HealthLimits limits;
  limits.stall = std::chrono::seconds(input.ConsumeIntegralInRange(0, 200));
  Health health({"a", "a", "b", "b", "a"}, kRoles, limits);
  Figures figures(kRanks);
  StepWatch steps({});
  Health::Clock::time_point now{};
  for (int turns = 0; input.remaining_bytes() > 0 && turns < 200; ++turns) {
    switch (input.ConsumeIntegralInRange(0, 4)) {
      case 0: health.ended(input.ConsumeIntegralInRange(0, kRoles.all() - 1), now); break;
      case 2: health.host_ended(input.ConsumeBool() ? kHostA : kHostB); break;
      case 1: {
        now += std::chrono::milliseconds(input.ConsumeIntegralInRange(0, 100'000));
        const auto findings = health.judge(now);
        for (const Warning& warning : steps.judge(now)) {
          if (warning.text.empty() || warning_line(warning, 0).empty()) std::abort();
        }
        if (findings.end && findings.end->empty()) std::abort();
        break;
      }
      default: {
        // Encodes and decodes it, as for sending.
        const auto message = decode(encode(Reports{{a_report(input)}}));
        if (!message) break;
        RankReport report = std::get<Reports>(*message).ranks.at(0);
        (void)doing(report);
        (void)at_step(report);
        const bool at_a = report.rank < 2 || report.rank == 4;
        health.heard_of_host(at_a ? kHostA : kHostB, now);
        if (kRoles.is_rank(report.rank)) {
          figures.report(report, now);
          steps.report(report, now);
        }
        health.report(std::move(report), now);
        for (const RankFigures& rank : figures.look(now)) {
          const bool numbers = rank.steps_per_second >= 0 && rank.samples_per_second >= 0 && rank.waited >= 0 &&
                               rank.waited <= 1 && rank.exposed >= 0 && rank.exposed <= 1 && rank.waited_for >= 0 &&
                               rank.waited_for <= 1;
          if (!numbers) std::abort();
        }
      }
    }
  }
  LiveRun run;
  for (RankFigures& rank : figures.look(now)) run.ranks.push_back({std::move(rank), {}});
  const auto read = parse_live_run(to_json(run));
  if (!read || read->ranks.size() != run.ranks.size()) std::abort();
  (void)folded(health.doing_now(), kRoles, 0);
  (void)health.somebody_leaves();
  (void)health.waiting_times();
  return 0;
}
