#include "launch/output/display.h"

#include "base/parse.h"
#include "launch/output/announcer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <ctime>
#include <utility>

namespace cohort::launch {
namespace {

/// Interval at which a progress bar may print a line where it is not overwritten.
constexpr auto kProgressPause = std::chrono::seconds(10);
/// Limit on lines that wait for equal lines of other ranks.
constexpr std::size_t kMostHeld = 512;
constexpr std::size_t kMostHeldBytes = std::size_t{1} << 20;
constexpr std::string_view kReset = "\033[0m";
// Colours that are readable on dark and light backgrounds; red is for stderr.
constexpr std::array<std::string_view, 5> kRankColours = {"\033[36m", "\033[32m", "\033[35m", "\033[34m", "\033[33m"};

std::string time_of_day() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  ::localtime_r(&now.tv_sec, &parts);
  return fmt::format("{:02}:{:02}:{:02}.{:03}", parts.tm_hour, parts.tm_min, parts.tm_sec, now.tv_nsec / 1'000'000);
}

/// Returns at most `columns` characters, since a line that wraps cannot be overwritten. Escape sequences do not count.
std::string clipped(std::string_view text, int columns) {
  int seen = 0;
  bool escaped = false;
  std::size_t i = 0;
  while (i < text.size()) {
    if (text[i] == '\033') {
      const std::size_t length = escape_length(text.substr(i));
      if (length == 0) break;
      escaped = true;
      i += length;
      continue;
    }
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80 && ++seen > std::max(columns, 1)) break;
    ++i;
  }
  return std::string(text.substr(0, i)) + std::string(escaped ? kReset : std::string_view());
}

/// Appends a text; adjacent texts for one descriptor are joined.
void add(std::vector<Text>& out, Stream stream, std::string_view bytes) {
  const int fd = stream == Stream::Stderr ? 2 : 1;
  if (out.empty() || out.back().fd != fd) out.push_back({fd, {}});
  out.back().bytes += bytes;
}

}  // namespace

OutputView::OutputView(ViewOptions options) : options_(std::move(options)) { grow(options_.hosts); }

void OutputView::grow(std::vector<std::string> hosts) {
  options_.hosts = std::move(hosts);
  sources_.resize(options_.hosts.size() * 2);
  last_held_.resize(options_.hosts.size());
  // A caller that gives only hosts has only ranks.
  if (options_.roles.others() == 0) options_.roles.workers = static_cast<int>(options_.hosts.size());
  for (std::size_t i = 0; i < options_.hosts.size(); ++i)
    label_width_ = std::max(label_width_, label({static_cast<int>(i)}).size());
}

/// Returns "host:3" or "host:server 0"; for several processes "[0-3]" or "[servers 0-1]".
std::string OutputView::label(const std::vector<int>& ranks) const {
  const int first = ranks.front();
  if (ranks.size() == 1) {
    const std::string who = options_.roles.is_rank(first) ? std::to_string(first) : options_.roles.name_of(first);
    return fmt::format("{}:{}", options_.hosts[static_cast<std::size_t>(first)], who);
  }
  const bool only_ranks = options_.roles.is_rank(ranks.back());
  return fmt::format("[{}]", only_ranks ? to_ranges(ranks) : options_.roles.names_of(ranks));
}

std::string OutputView::now_text() const { return options_.style == PrefixStyle::Full ? time_of_day() : std::string(); }

std::string OutputView::prefix(const std::vector<int>& ranks, Stream stream, std::string_view mark,
                               std::string time) const {
  const int rank = ranks.front();
  const std::string who = label(ranks);
  const bool is_error = stream == Stream::Stderr;
  std::string kind;
  if (options_.style == PrefixStyle::Full) {
    time += " ";
    kind = is_error ? "err " : "out ";
  }
  if (!options_.colour[is_error]) return fmt::format("{}{:<{}} {}{} ", time, who, label_width_, kind, mark);
  const std::string_view colour = kRankColours[static_cast<std::size_t>(rank) % kRankColours.size()];
  return fmt::format("{}{}{:<{}}{} {}{}{}{} ", time, colour, who, label_width_, kReset, kind,
                     is_error ? "\033[31m" : "\033[2m", mark, kReset);
}

void OutputView::put_line(std::vector<Text>& out, const Held& line, bool continued) {
  if (options_.style == PrefixStyle::Json) {
    const int rank = line.ranks.front();
    const OutputLine event{options_.roles.number_of(rank),
                           options_.hosts[static_cast<std::size_t>(rank)],
                           line.stream,
                           line.text,
                           continued,
                           options_.roles.role_of(rank)};
    add(out, Stream::Stdout, output_event(event));
    return;
  }
  const bool terminal = options_.terminal[line.stream == Stream::Stderr];
  if (transient_shown_ && terminal) {
    add(out, line.stream, kEraseLine);
    transient_shown_ = false;
  }
  add(out, line.stream, prefix(line.ranks, line.stream, continued ? "+" : "|", line.time));
  add(out, line.stream, line.text);
  // A colour that a rank leaves on must not colour the lines of others.
  if (terminal && line.text.find('\033') != std::string::npos) add(out, line.stream, kReset);
  add(out, line.stream, "\n");
}

void OutputView::complete(std::vector<Text>& out, int rank, Stream stream, std::string text, Clock::time_point now,
                          bool whole) {
  Source& from = source(rank, stream);
  if (options_.collapse[stream == Stream::Stderr] && whole && !from.cut && sources_.size() > 2) {
    hold(rank, stream, std::move(text), now);
    put_due(out, now);
    return;
  }
  put_held_of(out, rank);
  put_line(out, {stream, std::move(text), {rank}, now, now_text()}, from.cut);
  from.cut = false;
}

void OutputView::hold(int rank, Stream stream, std::string text, Clock::time_point now) {
  std::uint64_t& last = last_held_[static_cast<std::size_t>(rank)];
  for (std::size_t i = last > shown_held_ ? static_cast<std::size_t>(last - shown_held_) : 0; i < held_.size(); ++i) {
    Held& line = held_[i];
    if (line.stream != stream || line.text != text) continue;
    line.ranks.insert(std::upper_bound(line.ranks.begin(), line.ranks.end(), rank), rank);
    last = shown_held_ + i + 1;
    return;
  }
  held_bytes_ += text.size();
  held_.push_back({stream, std::move(text), {rank}, now, now_text()});
  last = shown_held_ + held_.size();
}

void OutputView::put_first(std::vector<Text>& out) {
  put_line(out, held_.front(), false);
  held_bytes_ -= held_.front().text.size();
  held_.pop_front();
  ++shown_held_;
}

void OutputView::put_due(std::vector<Text>& out, Clock::time_point now) {
  const std::size_t speakers = options_.speakers != 0 ? options_.speakers : options_.hosts.size();
  while (!held_.empty()) {
    const Held& first = held_.front();
    const bool everyone = first.ranks.size() == speakers;
    if (!everyone && now - first.since < kCollapseWindow && held_.size() <= kMostHeld &&
        held_bytes_ <= kMostHeldBytes) {
      return;
    }
    put_first(out);
  }
}

void OutputView::put_held_of(std::vector<Text>& out, int rank) {
  while (!held_.empty() && last_held_[static_cast<std::size_t>(rank)] > shown_held_) put_first(out);
}

std::optional<OutputView::Clock::time_point> OutputView::next_release() const {
  if (held_.empty()) return std::nullopt;
  return held_.front().since + kCollapseWindow;
}

std::vector<Text> OutputView::release(Clock::time_point now) {
  std::vector<Text> out;
  put_due(out, now);
  return out;
}

void OutputView::transient(std::vector<Text>& out, int rank, Stream stream, std::string_view text) {
  put_held_of(out, rank);
  const int used = static_cast<int>(label_width_) + (options_.style == PrefixStyle::Full ? 20 : 3);
  add(out, stream, kEraseLine);
  add(out, stream, prefix({rank}, stream, source(rank, stream).cut ? "+" : "|", now_text()));
  add(out, stream, clipped(text, options_.columns() - used - 1));
  transient_shown_ = true;
}

std::vector<Text> OutputView::feed_plain(int rank, Stream stream, std::string_view bytes) {
  std::vector<Text> out;
  Source& from = source(rank, stream);
  // With a single rank, no lines can mix.
  if (sources_.size() <= 2) {
    add(out, stream, bytes);
    return out;
  }
  const auto end = bytes.find_last_of("\r\n");
  if (end != std::string_view::npos) {
    add(out, stream, from.rest);
    add(out, stream, bytes.substr(0, end + 1));
    from.rest.assign(bytes.substr(end + 1));
  } else {
    from.rest += bytes;
  }
  if (from.rest.size() >= kLongestLine) {
    const std::size_t cut = whole_text(from.rest);
    const std::size_t whole = cut == 0 ? from.rest.size() : cut;
    add(out, stream, std::string_view(from.rest).substr(0, whole));
    from.rest.erase(0, whole);
  }
  from.partial_shown = from.rest.empty();
  return out;
}

std::vector<Text> OutputView::feed(int rank, Stream stream, std::string_view bytes, Clock::time_point now) {
  if (options_.style == PrefixStyle::None) return feed_plain(rank, stream, bytes);
  const bool is_error = stream == Stream::Stderr;
  Source& from = source(rank, stream);
  std::vector<Text> out;
  for (Line& line : from.lines.feed(bytes)) {
    if (line.end == Line::End::Return) {
      if (line.text.empty()) continue;
      if (options_.terminal[is_error]) {
        transient(out, rank, stream, line.text);
      } else if (now - from.progress_shown >= kProgressPause && from.progress_shown != Clock::time_point{}) {
        complete(out, rank, stream, std::move(line.text), now, true);
        from.progress_shown = now;
        from.progress.clear();
      } else {
        if (from.progress_shown == Clock::time_point{}) from.progress_shown = now;
        from.progress = std::move(line.text);
      }
      continue;
    }
    // "100 %\r\n" is one line already; for "100 %\r" followed by an empty line, the bar's last state is kept, too.
    if (line.text.empty() && !from.progress.empty()) line.text = std::move(from.progress);
    from.progress.clear();
    const bool cut = line.end == Line::End::Cut;
    complete(out, rank, stream, std::move(line.text), now, !cut);
    from.cut = cut;
  }
  from.partial_shown = from.lines.partial().empty();
  return out;
}

std::vector<Text> OutputView::finish() {
  std::vector<Text> texts;
  while (!held_.empty()) put_first(texts);
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    const int rank = static_cast<int>(i / 2);
    const Stream stream = i % 2 == 0 ? Stream::Stdout : Stream::Stderr;
    if (options_.style == PrefixStyle::None) {
      add(texts, stream, std::exchange(sources_[i].rest, {}));
      continue;
    }
    std::string last = sources_[i].lines.take_partial();
    if (last.empty()) last = std::exchange(sources_[i].progress, {});
    if (last.empty()) continue;
    complete(texts, rank, stream, std::move(last), {}, false);
  }
  std::erase_if(texts, [](const Text& text) { return text.bytes.empty(); });
  if (transient_shown_) {
    add(texts, options_.terminal[1] ? Stream::Stderr : Stream::Stdout, "\n");  // keeps the bar's last state visible
    transient_shown_ = false;
  }
  return texts;
}

bool OutputView::has_partial() const {
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (options_.terminal[i % 2] && !sources_[i].partial_shown) return true;
  }
  return false;
}

std::vector<Text> OutputView::show_partial() {
  std::vector<Text> texts;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    Source& from = sources_[i];
    if (!options_.terminal[i % 2] || from.partial_shown) continue;
    const Stream stream = i % 2 == 0 ? Stream::Stdout : Stream::Stderr;
    const bool plain = options_.style == PrefixStyle::None;
    const std::string_view waiting = plain ? std::string_view(from.rest) : from.lines.partial();
    // The rest of an incomplete character or escape sequence comes with the next bytes.
    const std::string_view whole = waiting.substr(0, whole_text(waiting));
    from.partial_shown = true;
    if (whole.empty()) continue;
    if (plain) {
      add(texts, stream, whole);
      from.rest.erase(0, whole.size());
    } else {
      transient(texts, static_cast<int>(i / 2), stream, whole);
    }
  }
  return texts;
}

}  // namespace cohort::launch
