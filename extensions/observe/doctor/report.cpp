#include "observe/doctor/examination.h"

#include "base/json.h"
#include "launch/version.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>

namespace cohort::doctor {
namespace {

constexpr std::size_t kWidth = 80;
constexpr std::size_t kLevelWidth = 8;
constexpr std::size_t kTitleWidth = 17;
constexpr std::size_t kIndent = kLevelWidth + kTitleWidth;
/// If sound rows have different texts for more hosts than this, they are merged into one.
constexpr std::size_t kMostLines = 4;
/// The same limit for rows that are not sound.
constexpr std::size_t kMostTroubles = 8;
constexpr std::size_t kMostWays = 28;
constexpr std::size_t kMostNames = 12;

struct Line {
  const Finding* finding = nullptr;
  std::vector<std::string> where;
  bool example = false;  ///< true: the line stands for others with different texts
};

std::string place_of(const Finding& finding, const std::string& host) {
  return finding.to.empty() ? host : host + " -> " + finding.to;
}

std::vector<Line> folded(const std::vector<Finding>& findings) {
  std::vector<Line> lines;
  for (const Finding& finding : findings) {
    std::vector<std::string> where;
    for (const std::string& host : finding.hosts) where.push_back(place_of(finding, host));
    const auto same = std::find_if(lines.begin(), lines.end(), [&finding](const Line& line) {
      return line.finding->row == finding.row && line.finding->level == finding.level &&
             line.finding->found == finding.found && line.finding->hosts.empty() == finding.hosts.empty();
    });
    if (same == lines.end())
      lines.push_back({&finding, std::move(where), false});
    else
      same->where.insert(same->where.end(), where.begin(), where.end());
  }
  // One example is enough for many similar lines.
  std::vector<Line> out;
  for (Line& line : lines) {
    const auto alike = [&line](const Line& other) {
      return other.finding->level == line.finding->level && other.finding->to.empty() == line.finding->to.empty() &&
             other.finding->row == line.finding->row && !other.finding->hosts.empty() && !line.finding->hosts.empty();
    };
    const auto count = static_cast<std::size_t>(std::count_if(lines.begin(), lines.end(), alike));
    const auto first = std::find_if(out.begin(), out.end(), alike);
    const std::size_t most = line.finding->level != Level::Ok ? kMostTroubles
                             : line.finding->to.empty()       ? kMostLines
                                                              : kMostWays;
    if (count > most && first != out.end()) {
      first->where.insert(first->where.end(), line.where.begin(), line.where.end());
      first->example = true;
    } else {
      out.push_back(std::move(line));
    }
  }
  return out;
}

std::string where_text(const Line& line, std::size_t hosts) {
  const auto& where = line.where;
  if (where.empty() || hosts == 1) return {};
  if (line.example) {
    const std::string what = fmt::format("{} {}", where.size(), line.finding->to.empty() ? "hosts" : "ways");
    if (line.finding->level == Level::Ok) return fmt::format("{}, such as {}: ", what, where.front());
    const std::size_t named = std::min(where.size(), kMostNames);
    const std::vector<std::string> names(where.begin(), where.begin() + static_cast<std::ptrdiff_t>(named));
    return fmt::format("{} ({}{}), such as {}: ", what, fmt::join(names, ", "), named < where.size() ? ", ..." : "",
                       where.front());
  }
  if (where.size() == hosts && hosts > 1 && line.finding->to.empty()) return fmt::format("all {}: ", hosts);
  if (where.size() > 4) return fmt::format("{}, {} and {} more: ", where[0], where[1], where.size() - 2);
  return fmt::format("{}: ", fmt::join(where, ", "));
}

/// `text` from column kIndent on, in lines of at most kWidth; longer words stay whole, so that they can be copied.
std::string wrapped(const std::string& text, std::size_t indent) {
  std::string out;
  std::size_t column = kIndent;
  std::size_t begin = 0;
  bool first = true;
  while (begin < text.size()) {
    std::size_t end = text.find_first_of(" \n", begin);
    if (end == std::string::npos) end = text.size();
    const std::string word = text.substr(begin, end - begin);
    if (!first && column + 1 + word.size() > kWidth) {
      out += "\n" + std::string(indent, ' ');
      column = indent;
    } else if (!first) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
    first = false;
    begin = end + 1;
  }
  return out;
}

std::string_view colour_of(Level level) {
  switch (level) {
    case Level::Ok: return "\033[32m";
    case Level::Warning: return "\033[33m";
    case Level::Failed: return "\033[31m";
  }
  return "";
}

std::string heading(const Checkup& checkup) {
  const auto& hosts = checkup.hosts;
  if (hosts.size() == 1)
    return fmt::format("cohort doctor: {}{}", hosts.front().name, hosts.front().here ? " (this host)" : "");
  std::string names;
  for (std::size_t i = 0; i < std::min<std::size_t>(hosts.size(), 4); ++i)
    names += fmt::format("{}{}", i == 0 ? "" : ", ", hosts[i].name);
  if (hosts.size() > 4) names += ", ...";
  return fmt::format(
      "cohort doctor: {} hosts ({}), {}", hosts.size(), names,
      checkup.starter_local ? "all of them this one" : fmt::format("by {}", launch::start_method_name(checkup.method)));
}

std::size_t count(const std::vector<Finding>& findings, Level level) {
  return static_cast<std::size_t>(
      std::count_if(findings.begin(), findings.end(), [level](const Finding& f) { return f.level == level; }));
}

}  // namespace

std::string to_table(const Checkup& checkup, const std::vector<Finding>& findings, Colour colour) {
  std::string out = heading(checkup) + "\n\n";
  std::size_t failed = 0, warnings = 0;  // numbers of rows, as they are shown
  for (const Line& line : folded(findings)) {
    const Finding& finding = *line.finding;
    failed += finding.level == Level::Failed ? 1 : 0;
    warnings += finding.level == Level::Warning ? 1 : 0;
    std::string level = fmt::format("{:<{}}", level_name(finding.level), kLevelWidth);
    if (colour == Colour::Yes) level = fmt::format("{}{}\033[0m", colour_of(finding.level), level);
    const std::string indent(kIndent, ' ');
    out += fmt::format("{}{:<{}}{}\n", level, row(finding.row).title, kTitleWidth,
                       wrapped(where_text(line, checkup.hosts.size()) + finding.found, kIndent + 2));
    if (finding.level == Level::Ok) continue;
    const std::string effect = finding.effect.empty() ? std::string(row(finding.row).effect) : finding.effect;
    out += fmt::format("{}{}\n", indent, wrapped("effect: " + effect, kIndent + 8));
    if (!finding.fix.empty()) out += fmt::format("{}{}\n", indent, wrapped("fix: " + finding.fix, kIndent + 5));
  }
  const auto number = [](std::size_t n) { return fmt::format("{} warning{}", n, n == 1 ? "" : "s"); };
  if (failed > 0)
    out += fmt::format("\n{} failed, {}: a job {} would not work.\n", failed, number(warnings),
                       checkup.hosts.size() > 1 ? "on these hosts" : "here");
  else if (warnings > 0)
    out += fmt::format("\nNothing failed; {}.\n", number(warnings));
  else
    out += "\nAll in order.\n";
  return out;
}

std::string to_json_report(const Checkup& checkup, const std::vector<Finding>& findings) {
  using nlohmann::json;
  json hosts = json::array(), checks = json::array(), ways = json::array(), speeds = json::array();
  const auto name = [&checkup](int host) { return checkup.hosts[static_cast<std::size_t>(host)].name; };
  for (const HostState& host : checkup.hosts) {
    json one = {{"name", host.name}, {"here", host.here}, {"slots", host.slots}, {"examined", host.facts.has_value()}};
    if (host.clock_offset) one["clock_offset"] = *host.clock_offset;
    if (host.facts) {
      one["facts"] = json::parse(to_json(*host.facts));
      one["facts"].erase("port");
    }
    hosts.push_back(std::move(one));
  }
  for (const Finding& finding : findings) {
    json one = {{"row", finding.row},
                {"title", row(finding.row).title},
                {"level", level_name(finding.level)},
                {"hosts", finding.hosts},
                {"found", finding.found}};
    if (!finding.to.empty()) one["to"] = finding.to;
    if (finding.level != Level::Ok) {
      one["effect"] = finding.effect.empty() ? std::string(row(finding.row).effect) : finding.effect;
      one["mend"] = finding.fix;
    }
    checks.push_back(std::move(one));
  }
  for (const auto& probe : checkup.probes) {
    json one = {{"from", name(probe.from)},
                {"to", name(probe.facts.peer)},
                {"address", probe.facts.address},
                {"result", probe.facts.result}};
    if (!probe.facts.detail.empty()) one["detail"] = probe.facts.detail;
    if (probe.facts.result == kReached) one["milliseconds"] = probe.facts.milliseconds;
    ways.push_back(std::move(one));
  }
  for (const SpeedFacts& speed : checkup.speeds) {
    json one = {{"from", name(speed.from)}, {"to", name(speed.to)}, {"address", speed.address}};
    if (speed.error.empty())
      one.update({{"bytes_per_second_there", speed.there}, {"bytes_per_second_back", speed.back}});
    else
      one["error"] = speed.error;
    speeds.push_back(std::move(one));
  }
  const std::size_t failed = count(findings, Level::Failed);
  const json report = {{"version", launch::kVersion},
                       {"ok", failed == 0},
                       {"failed", failed},
                       {"warnings", count(findings, Level::Warning)},
                       {"hosts", hosts},
                       {"checks", checks},
                       {"ways", ways},
                       {"speeds", speeds}};
  return json_text(report, 1) + "\n";
}

}  // namespace cohort::doctor
