#include "observe/watch/screen.h"

#include "base/parse.h"
#include "observe/plot/curves.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

namespace cohort::watch {
namespace {

using launch::RankFigures;

constexpr std::array<std::string_view, 6> kSorts = {"rank", "late", "exposed", "speed", "memory", "state"};

/// Least width of a terminal for which the table has a column for the CPU.
constexpr int kWithCpu = 90;

/// A line with coloured parts; colours do not count for its width.
class Text {
 public:
  Text(int columns, const Look& look) : columns_(columns), look_(look) {}

  Text& add(std::string_view text, std::string_view colour = {}) {
    const std::string part = fitted(text, columns_ - width_, look_.unicode);
    if (part.empty()) return *this;
    width_ += width_of(part);
    if (look_.colour && !colour.empty())
      out_ += fmt::format("\033[{}m{}\033[0m", colour, part);
    else
      out_ += part;
    return *this;
  }
  Text& pad_to(int column) {
    if (column > width_) add(std::string(static_cast<std::size_t>(column - width_), ' '));
    return *this;
  }
  int width() const noexcept { return width_; }
  std::string take() { return std::move(out_); }

  static int width_of(std::string_view text) {
    return static_cast<int>(
        std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
  }

 private:
  int columns_;
  const Look& look_;
  int width_ = 0;
  std::string out_;
};

std::string rate(double value) { return value > 0 ? number_text(value) : "-"; }

std::string_view colour_of(std::string_view state) {
  if (state.find("failed") != std::string_view::npos) return "31;1";
  if (state.find("stopped") != std::string_view::npos) return "33;1";
  if (state == "running") return "32";
  if (state == "waiting") return "36";
  return {};
}

std::string progress_text(const View& view) {
  const Progress& progress = view.progress;
  std::int64_t step = progress.step;
  for (const LiveRank& rank : view.run.ranks) step = std::max(step, rank.figures.step);
  std::string text = fmt::format("step {}", step);
  if (progress.steps) text += fmt::format("/{:.0f}", *progress.steps);
  if (progress.epochs && (progress.epoch > 0 || view.run.state != "ended")) {  // a run may log no epochs
    text += fmt::format("  epoch {:.4g}/{:.0f}", progress.epoch, *progress.epochs);
  } else if (progress.epoch > 0) {
    text += fmt::format("  epoch {:.4g}", progress.epoch);
  }
  if (progress.seconds_left && view.run.state != "ended")
    text += "  " + duration_text(*progress.seconds_left) + " left";
  if (const double samples = samples_per_second(view.run); samples > 0) {
    text += "  " + number_text(samples) + " samples/s";
  } else if (!view.run.ranks.empty() && view.run.ranks.front().figures.steps_per_second > 0) {
    text += "  " + number_text(view.run.ranks.front().figures.steps_per_second) + " steps/s";
  }
  return text;
}

std::string loss_text(const View& view) {
  if (!view.progress.loss) return {};
  return fmt::format("  {} {:.4g}", view.progress.loss_name.empty() ? "loss" : view.progress.loss_name,
                     *view.progress.loss);
}

std::vector<std::string> header(const View& view, const Look& look) {
  std::vector<std::string> lines;
  const LiveRun& run = view.run;
  Text first(look.columns, look);
  first.add(run.job.empty() ? view.place : run.job, "1").add("  ");
  first.add(launch::state_text(run, look.now), run.exit_status.value_or(0) != 0 ? "31;1" : colour_of(run.state));
  first.add(fmt::format("  {} rank{} on {} host{}", run.ranks.size(), run.ranks.size() == 1 ? "" : "s",
                        run.hosts.size(), run.hosts.size() == 1 ? "" : "s"));
  if (run.restarts > 0) first.add(fmt::format("  restart {}", run.restarts), "33");
  if (run.members)
    first.add(fmt::format("  epoch {}, {} of {} workers", run.members->epoch, run.members->size, run.ranks.size()), "");
  if (look.frozen) first.add("  frozen", "7");
  lines.push_back(first.take());
  Text second(look.columns, look);
  second.add(progress_text(view)).add(loss_text(view), "1");
  if (look.unicode) {  // other characters do not distinguish bars well enough
    std::vector<double> losses;
    for (const Curve::Point& point : view.progress.losses.points()) losses.push_back(point.value);
    const int width = std::clamp(look.columns - second.width(), 0, 40);
    second.add("  ").add(track::sparkline(losses, static_cast<std::size_t>(width), true), "36");
  }
  lines.push_back(second.take());
  if (run.members && run.members->epoch > 0)
    lines.push_back(Text(look.columns, look)
                        .add(fmt::format("last change {} ago: {}", duration_text(look.now - run.members->since),
                                         run.members->cause))
                        .take());
  if (const std::string others = launch::others_text(run); !others.empty())
    lines.push_back(Text(look.columns, look).add(others).take());
  Text third(look.columns, look);
  if (!look.trouble.empty()) {
    third.add(look.trouble, "31;1");
  } else if (launch::is_silent(run, look.now)) {
    third.add(fmt::format("no news from the launcher for {}: it was killed, or its host is gone",
                          duration_text(look.now - run.time)),
              "31;1");
  } else if (!run.reason.empty()) {
    third.add(run.reason, "31");
  } else if (!run.notices.empty()) {
    third.add(run.notices.back().text, "33");
  }
  lines.push_back(third.take());
  return lines;
}

/// Returns the rows to show, one for each rank or for each host.
LiveRun rows_of(const View& view, const Look& look) {
  if (look.host) return of_host(view.run, *look.host);
  return look.shown == Rows::Hosts ? by_host(view.run) : view.run;
}

double key_of(const RankFigures& figures, Sort sort) {
  switch (sort) {
    case Sort::Late: return figures.waited_for;
    case Sort::Exposed: return figures.exposed;
    case Sort::Speed: return -figures.samples_per_second - 1e-6 * figures.steps_per_second;  // the slowest first
    case Sort::Memory: return static_cast<double>(figures.memory);
    case Sort::State:  // troubled ones first
      return figures.state.find("failed") != std::string::npos          ? 3
             : figures.state.find("stopped") != std::string::npos       ? 2
             : figures.state == "running" || figures.state == "waiting" ? 0
                                                                        : 1;
    case Sort::Rank: break;
  }
  return 0;
}

std::vector<std::size_t> sorted(const LiveRun& rows, Sort sort) {
  std::vector<std::size_t> order(rows.ranks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (sort == Sort::Rank) return order;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return key_of(rows.ranks[a].figures, sort) > key_of(rows.ranks[b].figures, sort);
  });
  return order;
}

/// Widths of all columns except the last, which takes the rest.
struct Widths {
  int name = 5;
  int state = 8;
};

std::string name_of(const View& view, const LiveRun& rows, const Look& look, std::size_t row) {
  if (look.shown == Rows::Hosts && !look.host) return row < view.run.hosts.size() ? view.run.hosts[row].name : "";
  const int rank = rows.first_rank + static_cast<int>(row);
  return look.columns >= 100 && view.run.hosts.size() > 1 ? fmt::format("{}:{}", host_of(view.run, rank), rank)
                                                          : std::to_string(rank);
}

std::string table_head(const Look& look, const Widths& widths) {
  Text text(look.columns, look);
  const bool hosts = look.shown == Rows::Hosts && !look.host;
  text.add(fmt::format("{:<{}} {:<{}} {:>8} {:>6} {:>9} {:>7} {:>5} {:>5} {:>6} {}", hosts ? "host" : "rank",
                       widths.name, "state", widths.state, "step", "step/s", "samples/s", "exposed", "waits", "late",
                       "memory", look.columns >= kWithCpu ? "  cpu last line" : "last line"),
           "4");
  return text.take();
}

std::string table_row(const std::string& name, const LiveRank& rank, const Look& look, const Widths& widths,
                      bool selected) {
  const RankFigures& f = rank.figures;
  Text text(look.columns, look);
  text.add(fmt::format("{:<{}} ", fitted(name, widths.name, look.unicode), widths.name), selected ? "7" : "");
  text.add(fmt::format("{:<{}} ", fitted(f.state, widths.state, look.unicode), widths.state), colour_of(f.state));
  text.add(fmt::format("{:>8} {:>6} {:>9} ", f.step, rate(f.steps_per_second), rate(f.samples_per_second)));
  text.add(fmt::format("{:>7} ", launch::percent_text(f.exposed)), f.exposed >= 0.5 ? "33" : "");
  text.add(fmt::format("{:>5} ", launch::percent_text(f.waited)));
  text.add(fmt::format("{:>5} ", launch::percent_text(f.waited_for)), f.waited_for >= 0.1 ? "31;1" : "");
  text.add(fmt::format("{:>6} ", f.memory > 0 ? bytes_text(static_cast<double>(f.memory)) : "-"));
  if (look.columns >= kWithCpu) text.add(fmt::format("{:>5} ", launch::percent_text(f.cpu)));
  const bool over = f.state == "failed" || f.state == "ended";
  text.add(over && rank.line.empty() ? f.doing : rank.line);
  std::string line = text.take();
  while (line.ends_with(' ')) line.pop_back();
  return line;
}

std::string key_line(const Look& look) {
  Text text(look.columns, look);
  if (look.log != nullptr) return text.add("q quit  esc back  e stdout/stderr  f freeze", "2").take();
  return text
      .add(fmt::format("q quit  s sort: {}  h {}  f freeze  up/down, enter: {}",
                       kSorts[static_cast<std::size_t>(look.sort)], look.shown == Rows::Hosts ? "ranks" : "hosts",
                       look.shown == Rows::Hosts && !look.host ? "its ranks" : "its log"),
           "2")
      .take();
}

}  // namespace

Sort next(Sort sort) noexcept { return static_cast<Sort>((static_cast<std::size_t>(sort) + 1) % kSorts.size()); }

std::string fitted(std::string_view text, int columns, bool unicode) {
  std::string out;
  int width = 0;
  for (; !text.empty() && width < columns; ++width) {
    const std::size_t length = character_length(text);
    const auto byte = static_cast<unsigned char>(text[0]);
    // (The control characters U+0080 to U+009F are C2 80 to C2 9F.)
    const bool control =
        byte < 0x20 || byte == 0x7F || (length == 2 && byte == 0xC2 && static_cast<unsigned char>(text[1]) < 0xA0);
    if (control || length == 0 || (length > 1 && !unicode))
      out += control ? ' ' : '?';
    else
      out += text.substr(0, length);
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return out;
}

std::vector<std::size_t> order_of(const View& view, const Look& look) {
  std::vector<std::size_t> order = sorted(rows_of(view, look), look.sort);
  if (look.host && *look.host < view.run.hosts.size()) {
    const auto first = static_cast<std::size_t>(std::max(0, view.run.hosts[*look.host].first_rank));
    for (std::size_t& each : order) each += first;
  }
  return order;
}

std::vector<std::string> draw(const View& view, const Look& look) {
  std::vector<std::string> lines = header(view, look);
  const int fixed = static_cast<int>(lines.size()) + 1 + (look.keys ? 1 : 0);
  const auto room = look.rows > 0 ? static_cast<std::size_t>(std::max(1, look.rows - fixed)) : std::string::npos;
  if (look.log != nullptr) {
    lines.push_back(Text(look.columns, look).add(look.log->why.empty() ? look.log->path : look.log->why, "4").take());
    const auto& all = look.log->lines;
    const std::size_t first = all.size() > room ? all.size() - room : 0;
    for (std::size_t i = first; i < all.size(); ++i) lines.push_back(fitted(all[i], look.columns, look.unicode));
  } else {
    const LiveRun rows = rows_of(view, look);
    const std::vector<std::size_t> order = sorted(rows, look.sort);
    Widths widths;
    // (Looks at the names of thousands of rows only if they can be long.)
    if (look.shown == Rows::Hosts || look.columns >= 100) {
      for (const auto& host : view.run.hosts)
        widths.name = std::max(widths.name, Text::width_of(host.name) + (look.shown == Rows::Hosts ? 0 : 6));
      widths.name = std::min(widths.name, look.columns / 4);
    }
    if (look.shown == Rows::Hosts && !look.host && look.columns >= 100) widths.state = 20;
    lines.push_back(table_head(look, widths));
    const std::size_t selected = order.empty() ? 0 : std::min(look.selected, order.size() - 1);
    const std::size_t first = selected >= room ? selected - room + 1 : 0;
    for (std::size_t i = first; i < order.size() && i - first < room; ++i) {
      lines.push_back(table_row(name_of(view, rows, look, order[i]), rows.ranks[order[i]], look, widths,
                                look.keys && i == selected));
    }
  }
  if (look.keys) {
    while (look.rows > 0 && lines.size() + 1 < static_cast<std::size_t>(look.rows)) lines.emplace_back();
    lines.push_back(key_line(look));
  }
  if (look.rows > 0 && lines.size() > static_cast<std::size_t>(look.rows))
    lines.resize(static_cast<std::size_t>(look.rows));
  return lines;
}

std::string line_of(const View& view, double now) {
  return launch::summary(view.run, now, progress_text(view) + loss_text(view));
}

}  // namespace cohort::watch
