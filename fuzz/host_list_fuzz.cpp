// Lists of hosts in every spelling. A list that parses is bounded, has no empty names, and parses to the same when
// written again.
#include "base/parse.h"
#include "rendezvous/host_list.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>

namespace {

using namespace cohort::rendezvous;

// Longer lists are not read again: they take milliseconds and say nothing that short ones do not.
constexpr std::size_t kReadAgain = 256;

// Most inputs with more hosts are left out, for the same reason.
constexpr std::uint64_t kManyHosts = 1024;
constexpr std::size_t kReadOneOf = 64;

/// About how many hosts the ranges make, whether they stand within brackets or not: [1-20][0-99] is 2,000.
std::uint64_t hosts_of_ranges(std::string_view text) {
  std::uint64_t product = 1;
  for (std::size_t dash = text.find('-'); dash != text.npos; dash = text.find('-', dash + 1)) {
    std::size_t begin = dash, end = dash + 1;
    const auto digit = [&](std::size_t i) { return text[i] >= '0' && text[i] <= '9'; };
    while (begin > 0 && digit(begin - 1)) --begin;
    while (end < text.size() && digit(end)) ++end;
    const auto low = cohort::parse_integer<std::uint64_t>(text.substr(begin, dash - begin));
    const auto high = cohort::parse_integer<std::uint64_t>(text.substr(dash + 1, end - dash - 1));
    if (low && high && *high > *low) product *= std::min(*high - *low + 1, kManyHosts);
    if (product > kManyHosts) break;
  }
  return product;
}

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
  if (hosts_of_ranges(text) > kManyHosts && std::hash<std::string_view>{}(text) % kReadOneOf != 0) return 0;
  check(parse_host_slots(text));
  check(parse_host_file(text));
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
