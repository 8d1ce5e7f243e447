#include "observe/trace/report.h"

#include "base/json.h"
#include "base/result.h"
#include "observe/trace/trace_set.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <utility>

namespace cohort::track {
namespace {

using status::TraceTrack;

constexpr std::size_t kMostOperations = 10;

struct Span {
  std::int64_t begin, end;
};

std::vector<Span> united(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<Span> out;
  for (const Span& span : spans) {
    if (!out.empty() && span.begin <= out.back().end) {
      out.back().end = std::max(out.back().end, span.end);
    } else {
      out.push_back(span);
    }
  }
  return out;
}

double seconds_in(const std::vector<Span>& spans, const Span& window) {
  double seconds = 0;
  for (const Span& span : spans)
    seconds += static_cast<double>(
                   std::max<std::int64_t>(std::min(span.end, window.end) - std::max(span.begin, window.begin), 0)) *
               1e-9;
  return seconds;
}

std::vector<Span> common(const std::vector<Span>& a, const std::vector<Span>& b) {
  std::vector<Span> out;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const Span both{std::max(a[i].begin, b[j].begin), std::min(a[i].end, b[j].end)};
    if (both.begin < both.end) out.push_back(both);
    a[i].end < b[j].end ? ++i : ++j;
  }
  return out;
}

struct RankEvents {
  std::vector<Span> operations, waits, steps;
  Span all{std::numeric_limits<std::int64_t>::max(), 0};
};

/// Finds the last rank to start a collective, which is the one that waited least. Needs no common clock.
struct Arrivals {
  std::int64_t least_ns = std::numeric_limits<std::int64_t>::max();
  std::int64_t second_ns = std::numeric_limits<std::int64_t>::max();
  std::uint32_t last = 0;
  std::uint32_t ranks = 0;
};

class Reporter {
 public:
  explicit Reporter(const TraceSet& set) : set_(set) {}

  TraceReport run() {
    for (const HostPiece& piece : set_.pieces) {
      for (const auto& [rank, process] : piece.processes) figures_[rank].host = piece.host;
      each_slice(set_, piece, [&](const Slice& slice) { take(slice); });
      report_.hosts.push_back(
          {piece.host, piece.clock.measured(), piece.clock.offset_ns(), piece.clock.uncertainty_ns()});
    }
    for (const auto& [flow, arrivals] : arrivals_) {
      if (arrivals.ranks < 2 || arrivals.second_ns == arrivals.least_ns) continue;
      RankFigures& late = figures_[arrivals.last];
      ++late.last;
      late.made_wait_seconds += static_cast<double>(arrivals.second_ns - arrivals.least_ns) * 1e-9;
    }
    for (auto& [rank, figures] : figures_) {
      figures.rank = rank;
      add_up(figures, events_[rank]);
      report_.ranks.push_back(std::move(figures));
    }
    for (auto& [key, one] : operations_) report_.operations.push_back(std::move(one));
    std::sort(report_.operations.begin(), report_.operations.end(),
              [](const OperationFigures& a, const OperationFigures& b) { return a.seconds > b.seconds; });
    report_.remarks = remarks_on(set_);
    return std::move(report_);
  }

 private:
  void take(const Slice& slice) {
    RankFigures& figures = figures_[slice.track.rank];
    RankEvents& events = events_[slice.track.rank];
    figures.lost += slice.event.lost;
    const Span span{slice.begun_ns, slice.ended_ns};
    events.all = {std::min(events.all.begin, span.begin), std::max(events.all.end, span.end)};
    switch (slice.track.kind) {
      case TraceTrack::Steps:
        if (span.end > span.begin) events.steps.push_back(span);
        break;
      case TraceTrack::Thread:
        if (slice.event.name == "wait") events.waits.push_back(span);
        break;
      case TraceTrack::Operations: take_operation(slice, figures, events); break;
      default: break;
    }
  }

  void take_operation(const Slice& slice, RankFigures& figures, RankEvents& events) {
    const TraceEvent& event = slice.event;
    events.operations.push_back({slice.begun_ns, slice.ended_ns});
    const auto waited_ns = static_cast<std::int64_t>(std::min<std::uint64_t>(event.waited_ns, INT64_MAX / 2));
    const double waited = static_cast<double>(waited_ns) * 1e-9;
    const double lasted = static_cast<double>(slice.ended_ns - slice.begun_ns) * 1e-9;
    figures.waited_seconds += waited;
    figures.bytes += event.bytes;
    figures.wire_bytes += event.wire_bytes;
    figures.wire_seconds += static_cast<double>(event.wire_us) * 1e-6;
    OperationFigures& one = operations_[{std::string(event.name), event.bytes}];
    one.name = event.name;
    one.bytes = event.bytes;
    ++one.count;
    one.seconds += lasted;
    one.waited_seconds += waited;
    if (event.flow == 0) return;
    Arrivals& arrivals = arrivals_[event.flow];
    ++arrivals.ranks;
    if (waited_ns < arrivals.least_ns) {
      arrivals.second_ns = std::exchange(arrivals.least_ns, waited_ns);
      arrivals.last = slice.track.rank;
    } else {
      arrivals.second_ns = std::min(arrivals.second_ns, waited_ns);
    }
  }

  static void add_up(RankFigures& figures, RankEvents& events) {
    Span window = events.all;
    if (!events.steps.empty()) window = {events.steps.front().begin, events.steps.back().end};
    const std::vector<Span> operations = united(std::move(events.operations));
    const std::vector<Span> waits = united(std::move(events.waits));
    figures.steps = static_cast<std::int64_t>(events.steps.size());
    figures.step_seconds = seconds_in(events.steps, window);
    figures.seconds = static_cast<double>(std::max<std::int64_t>(window.end - window.begin, 0)) * 1e-9;
    if (events.all.end < events.all.begin) figures.seconds = 0;
    figures.communication_seconds = seconds_in(operations, window);
    figures.exposed_seconds = seconds_in(waits, window);
    figures.hidden_seconds = figures.communication_seconds - seconds_in(common(operations, waits), window);
  }

  const TraceSet& set_;
  TraceReport report_;
  std::map<std::uint32_t, RankFigures> figures_;
  std::map<std::uint32_t, RankEvents> events_;
  std::unordered_map<std::uint64_t, Arrivals> arrivals_;
  std::map<std::pair<std::string, std::uint64_t>, OperationFigures> operations_;
};

double share(double part, double whole) { return whole > 0 ? part / whole : 0; }

std::string bytes_text(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string time_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  return seconds < 1 ? fmt::format("{:.2f} ms", seconds * 1e3) : fmt::format("{:.2f} s", seconds);
}

std::string percent(double part, double whole) {
  return whole > 0 ? fmt::format("{:.1f} %", 100 * share(part, whole)) : "-";
}

}  // namespace

TraceReport make_report(const TraceSet& set) { return Reporter(set).run(); }

std::string to_text(const TraceReport& report) {
  std::string out = fmt::format("{:>5}  {:<16} {:>6} {:>10} {:>9} {:>9} {:>10} {:>9} {:>10}\n", "rank", "host", "steps",
                                "ms a step", "exposed", "hidden", "waited", "late", "by");
  for (const RankFigures& rank : report.ranks) {
    const std::string step =
        rank.steps == 0 ? "-" : fmt::format("{:.2f}", 1e3 * rank.step_seconds / static_cast<double>(rank.steps));
    out += fmt::format("{:>5}  {:<16} {:>6} {:>10} {:>9} {:>9} {:>10} {:>9} {:>10}\n", rank.rank, rank.host, rank.steps,
                       step, percent(rank.exposed_seconds, rank.seconds),
                       percent(rank.hidden_seconds, rank.communication_seconds), time_text(rank.waited_seconds),
                       rank.last, time_text(rank.made_wait_seconds));
  }
  out +=
      "  exposed: of the time, in which the program only waited for communication; hidden: of the communication,\n"
      "  what was not waited for; waited: operations, for other ranks; late: operations that it was last to come to,\n"
      "  by: and how much later than the one before it, all together\n";

  out += fmt::format("\n{:>10} {:>12} {:>9} {:>11} {:>11} {:>9}  {}\n", "total", "each takes", "of that", "bytes each",
                     "GB/s", "count", "operation");
  for (std::size_t i = 0; i < std::min(report.operations.size(), kMostOperations); ++i) {
    const OperationFigures& one = report.operations[i];
    const double each = one.seconds / static_cast<double>(one.count);
    const double moving = one.seconds - one.waited_seconds;
    out += fmt::format("{:>10} {:>12} {:>9} {:>11} {:>11} {:>9}  {}\n", time_text(one.seconds), time_text(each),
                       percent(one.waited_seconds, one.seconds), bytes_text(static_cast<double>(one.bytes)),
                       moving > 0 ? fmt::format("{:.2f}", static_cast<double>(one.bytes) *
                                                              static_cast<double>(one.count) / moving * 1e-9)
                                  : "-",
                       one.count, one.name);
  }
  out += "  of that: waiting for other ranks; GB/s: once all had come\n";

  if (report.hosts.size() > 1) {
    out += fmt::format("\n{:<16} {:>14} {:>10} {:>14}  {}\n", "host", "sent to others", "GB/s", "clock is ahead",
                       "give or take");
    for (const HostFigures& host : report.hosts) {
      double seconds = 0, bytes = 0;
      for (const RankFigures& rank : report.ranks) {
        if (rank.host != host.host) continue;
        seconds += rank.wire_seconds;
        bytes += static_cast<double>(rank.wire_bytes);
      }
      out += fmt::format(
          "{:<16} {:>14} {:>10} {:>14}  {}\n", host.host, bytes_text(bytes),
          seconds > 0 ? fmt::format("{:.2f}", bytes / seconds * 1e-9) : "-",
          host.measured ? fmt::format("{:.1f} us", static_cast<double>(host.offset_ns) * 1e-3) : "not known",
          host.measured ? fmt::format("{:.1f} us", static_cast<double>(host.uncertainty_ns) * 1e-3) : "-");
    }
  }
  for (const RankFigures& rank : report.ranks) {
    if (rank.lost > 0)
      out += fmt::format("\nrank {}: {} events are missing: they came faster than they were taken away\n", rank.rank,
                         rank.lost);
  }
  for (const std::string& remark : report.remarks) out += fmt::format("\n{}\n", remark);
  return out;
}

std::string to_json(const TraceReport& report) {
  const auto none = nlohmann::ordered_json::array();
  nlohmann::ordered_json out{{"ranks", none}, {"operations", none}, {"hosts", none}, {"remarks", report.remarks}};
  for (const RankFigures& rank : report.ranks) {
    out["ranks"].push_back({{"rank", rank.rank},
                            {"host", rank.host},
                            {"steps", rank.steps},
                            {"step_seconds", rank.step_seconds},
                            {"seconds", rank.seconds},
                            {"communication_seconds", rank.communication_seconds},
                            {"exposed_seconds", rank.exposed_seconds},
                            {"hidden_seconds", rank.hidden_seconds},
                            {"waited_seconds", rank.waited_seconds},
                            {"last", rank.last},
                            {"made_wait_seconds", rank.made_wait_seconds},
                            {"bytes", rank.bytes},
                            {"wire_bytes", rank.wire_bytes},
                            {"wire_seconds", rank.wire_seconds},
                            {"events_lost", rank.lost}});
  }
  for (const OperationFigures& one : report.operations) {
    out["operations"].push_back({{"name", one.name},
                                 {"bytes", one.bytes},
                                 {"count", one.count},
                                 {"seconds", one.seconds},
                                 {"waited_seconds", one.waited_seconds}});
  }
  for (const HostFigures& host : report.hosts) {
    out["hosts"].push_back({{"host", host.host},
                            {"clock_measured", host.measured},
                            {"offset_ns", host.offset_ns},
                            {"uncertainty_ns", host.uncertainty_ns}});
  }
  return json_text(out, 2) + "\n";
}

}  // namespace cohort::track
