// Lists of hosts in every spelling. What parses is bounded, has no empty names, and says the same when written again.
#include "cluster/host_list.h"

#include <cstdint>
#include <cstdlib>

namespace {

using namespace cohort::cluster;

// Longer lists are not read again: they take milliseconds and say nothing that short ones do not.
constexpr std::size_t kReadAgain = 256;

void expect(bool condition) {
  if (!condition) std::abort();
}

void check(const cohort::Result<std::vector<HostSlots>>& hosts) {
  if (!hosts) return;
  expect(!hosts->empty() && hosts->size() <= kMostHosts);
  for (const HostSlots& host : *hosts) {
    expect(!host.host.empty() && (!host.slots || (*host.slots >= 1 && *host.slots <= kMostSlots)));
  }
  if (hosts->size() > kReadAgain) return;
  std::string text;
  for (const HostSlots& host : *hosts) text += (text.empty() ? "" : ",") + to_string(host);
  const auto again = parse_host_slots(text);
  expect(again && again->size() == hosts->size());
  for (std::size_t i = 0; i < again->size(); ++i) {
    expect((*again)[i].host == (*hosts)[i].host && (*again)[i].slots == (*hosts)[i].slots);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  check(parse_host_slots(text));
  check(parse_host_file(text));
  check(parse_host_pairs(text));
  if (const auto hosts = parse_slurm_hosts(text)) {
    expect(!hosts->empty() && hosts->size() <= kMostHosts);
    if (hosts->size() <= kReadAgain) {
      std::string joined;
      for (const std::string& host : *hosts) joined += host + " ";
      const auto again = parse_slurm_hosts(joined);
      expect(again && *again == *hosts);
    }
  }
  if (const auto counts = parse_slurm_counts(text)) {
    expect(!counts->empty() && counts->size() <= kMostHosts);
    for (const int count : *counts) expect(count >= 1);
  }
  return 0;
}
