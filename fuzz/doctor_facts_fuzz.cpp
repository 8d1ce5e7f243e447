// Facts that another host reports to `cohort doctor` must be refused, or accepted and fit for the checks. Likewise
// output of nvidia-smi about the links between GPUs.
#include "observe/doctor/check.h"
#include "observe/doctor/examination.h"
#include "observe/doctor/facts.h"
#include "observe/doctor/probe.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

using namespace cohort::doctor;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  (void)parse_probes(text);
  (void)parse_speed(text);
  const auto pairs = parse_gpu_pairs(text);
  if (describe_ways(pairs).empty() != pairs.empty()) __builtin_trap();
  for (const GpuPair& pair : pairs) {
    if (pair.first < 0 || pair.first >= pair.second || pair.way.empty()) __builtin_trap();
  }
  describe_strangers(pairs);
  const auto facts = parse_host_facts(text);
  if (!facts) return 0;  // without facts all judgements are the same
  if (!parse_host_facts(to_json(*facts))) __builtin_trap();
  Checkup checkup;
  checkup.hosts.resize(2);
  checkup.hosts[0].name = "a";
  checkup.hosts[1].name = "b";
  checkup.hosts[0].facts = *facts;
  checkup.hosts[1].facts = *facts;
  checkup.probes.push_back({0, {1, "10.0.0.1", std::string(kReached), {}, {}, 1}});
  for (const NetworkFacts& network : facts->networks)
    checkup.probes.push_back({0, {1, network.address, std::string(kLargeLost), {}, {}, 1}});
  const auto findings = judge(checkup);
  to_table(checkup, findings, Colour::No);
  to_json_report(checkup, findings);
  return 0;
}
