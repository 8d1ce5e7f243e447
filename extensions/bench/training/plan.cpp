#include "base/json.h"
#include "base/result.h"
#include "bench/training/training.h"
#include "comm/kernels/codecs.h"

#include <cohort/init.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace cohort::app::training {
namespace {

using Clock = std::chrono::steady_clock;
using launch::Change;

constexpr std::size_t kMeasured = 1 << 18;  // floats, few enough to lie in a core's cache
constexpr std::size_t kSmall = 16 << 10;    // floats, too many to travel with the ranks' agreement

}  // namespace

std::string plan_text(const launch::StepCosts& costs, const launch::PlanFacts& facts) {
  const Shares& now = costs.step;
  const double step = std::max(now.step(), 1e-12);
  std::string out = fmt::format(
      "a step takes {}: {} computing, {} waiting for slower ranks, {} reducing on the host, {} waiting "
      "for the wire\n",
      seconds_text(step), seconds_text(now.compute), seconds_text(now.waiting), seconds_text(now.local),
      seconds_text(now.wire));
  if (costs.busy_wire > 0) {
    out += fmt::format("a host sends {} in {:.0f} operations, {}/s; {} of that is hidden behind computing\n",
                       bytes_text(costs.wire_bytes), costs.operations, bytes_text(costs.wire_bytes / costs.busy_wire),
                       seconds_text(std::max(0.0, costs.busy_wire - now.wire)));
  }
  out += fmt::format("\n{:<58} {:>9} {:>9} {:>9}\n", "with", "step", "wire", "saves");
  const std::vector<Change> changes = launch::changes_of(costs, facts);
  for (const Change& change : changes) {
    out += fmt::format("{:<58} {:>9} {:>9} {:>7.0f} %\n", change.what, seconds_text(change.step),
                       seconds_text(change.wire), 100 * (1 - change.step / step));
  }
  const auto any = [&](Change::Kind kind) {
    return std::ranges::any_of(changes, [kind](const Change& one) { return one.kind == kind; });
  };
  if (costs.hosts > 1 && !any(Change::Kind::Format))
    out +=
        "fewer bytes: not known, since what is sent are no sums of float32 over all ranks, or it is 4 bits already\n";
  if (costs.hosts > 1 && facts.latency <= 0)
    out +=
        "larger buckets: not known without the latency of an operation, which `cohort bench plan -- COMMAND` "
        "measures\n";
  if (any(Change::Kind::FewerRanks))
    out += "a rank on each host: if it computes as fast with all cores as its ranks do together\n";
  if (costs.hosts < 2) out += "all ranks are on one host: of a wire nothing is known (-H a,b)\n";
  const std::string advice = launch::advice_of(costs, facts);
  return out + "\n" + (advice.empty() ? "no change is worth while: " + launch::no_advice_of(costs) : advice) + ".\n";
}

std::vector<launch::FormatCosts> measured_formats() {
  std::vector<float> values(kMeasured);
  for (std::size_t i = 0; i < kMeasured; ++i) values[i] = static_cast<float>(i % 509) - 254;
  std::vector<launch::FormatCosts> formats = launch::usual_formats();
  for (launch::FormatCosts& format : formats) {
    std::vector<std::byte> encoded(comm::encoded_bytes(format.format, kMeasured));
    const auto fastest = [](const auto& work) {
      double least = 1;
      for (int i = 0; i < 8; ++i) {
        const auto begun = Clock::now();
        work();
        least = std::min(least, std::chrono::duration<double>(Clock::now() - begun).count());
      }
      return least * 1e9 / (kMeasured * sizeof(float));
    };
    format.ratio = static_cast<double>(encoded.size()) / (kMeasured * sizeof(float));
    format.encode_ns = fastest([&] { comm::encode(format.format, values.data(), encoded.data(), kMeasured); });
    format.decode_ns = fastest([&] { comm::decode(format.format, encoded.data(), values.data(), kMeasured); });
  }
  return formats;
}

void tell_latency(Communicator& world) {
  std::vector<float> sum(kSmall);
  std::vector<double> times;
  for (int i = 0; i < 40; ++i) {
    world.barrier().wait();
    const auto begun = Clock::now();
    world.all_reduce(std::span(sum)).wait();
    times.push_back(std::chrono::duration<double>(Clock::now() - begun).count());
  }
  std::nth_element(times.begin(), times.begin() + 20, times.end());
  if (world.rank() == 0) std::printf("{\"seconds\":%.9f}\n", times[20]);
}

double latency_of(JobRequest request, const launch::StepCosts& costs) {
  if (costs.hosts < 2 || costs.busy_wire <= 0) return 0;
  double seconds = 0;
  request.program = {"/proc/self/exe", "bench", "trainee", "--latency"};
  request.on_output = [&seconds](const std::string& line) {
    const nlohmann::json said = parse_json_or_discard(line);
    if (said.is_object()) seconds = number_in(said, "seconds").value_or(0);
  };
  run_job(request);
  const double bytes = kSmall * sizeof(float) * 2.0 * (costs.hosts - 1) / costs.hosts;
  return std::max(1e-6, seconds - bytes * costs.busy_wire / costs.wire_bytes);
}

}  // namespace cohort::app::training
