#include "doctor/gpu_links.h"

#include "base/parse.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <sstream>

namespace cohort::doctor {
namespace {

/// Whatever prints in colour or underlined on a terminal.
std::string without_escapes(std::string_view text) {
  std::string plain;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] != '\033') {
      plain += text[at];
      continue;
    }
    while (at < text.size() && text[at] != 'm') ++at;
  }
  return plain;
}

/// "GPU3" -> 3.
std::optional<int> number_of_gpu(std::string_view word) {
  if (!word.starts_with("GPU")) return std::nullopt;
  const auto number = parse_integer<int>(word.substr(3));
  return number && *number >= 0 ? std::optional(*number) : std::nullopt;
}

/// The fastest first: NVLink, by one switch of PCIe, by several, by a host bridge, by a node's bridges, by processors.
std::size_t distance(std::string_view way) {
  constexpr std::array<std::string_view, 6> kWays = {"NV", "PIX", "PXB", "PHB", "NODE", "SYS"};
  const auto found =
      std::find_if(kWays.begin(), kWays.end(), [&](std::string_view each) { return way.starts_with(each); });
  return static_cast<std::size_t>(found - kWays.begin());
}

}  // namespace

std::vector<GpuPair> parse_gpu_pairs(std::string_view text) {
  std::vector<GpuPair> pairs;
  std::vector<int> columns;
  std::stringstream lines(without_escapes(text));
  for (std::string line; std::getline(lines, line);) {
    std::stringstream words(line);
    std::string word;
    std::vector<std::string> row;
    while (words >> word) row.push_back(word);
    if (row.empty()) continue;
    const auto own = number_of_gpu(row.front());
    if (!own) continue;
    if (columns.empty()) {  // the head: as many columns as names of GPUs that follow each other
      for (const std::string& name : row) {
        const auto number = number_of_gpu(name);
        if (!number) break;
        columns.push_back(*number);
      }
      continue;
    }
    if (row.size() <= columns.size()) continue;
    for (std::size_t column = 0; column < columns.size(); ++column) {
      if (*own < columns[column]) pairs.push_back({*own, columns[column], row[column + 1]});
    }
  }
  return pairs;
}

std::string describe_ways(const std::vector<GpuPair>& pairs) {
  if (pairs.empty()) return {};
  const auto [best, worst] = std::minmax_element(
      pairs.begin(), pairs.end(), [](const GpuPair& a, const GpuPair& b) { return distance(a.way) < distance(b.way); });
  if (distance(best->way) == distance(worst->way)) return fmt::format("{} between all", best->way);
  return fmt::format("{} at best, {} between {} and {}", best->way, worst->way, worst->first, worst->second);
}

std::string describe_strangers(const std::vector<GpuPair>& pairs) {
  const auto is_stranger = [](const GpuPair& pair) { return pair.way != "OK"; };
  const auto first = std::find_if(pairs.begin(), pairs.end(), is_stranger);
  if (first == pairs.end()) return {};
  const auto all = std::count_if(pairs.begin(), pairs.end(), is_stranger);
  return fmt::format("{} and {} ({}){}", first->first, first->second, first->way,
                     all > 1 ? fmt::format(", and {} more", all - 1) : std::string());
}

}  // namespace cohort::doctor
