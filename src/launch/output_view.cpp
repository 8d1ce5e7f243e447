#include "launch/output_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <ctime>
#include <utility>

namespace cohort::launch {
namespace {

/// Where a progress bar is not overwritten, it may speak up this often.
constexpr auto kProgressPause = std::chrono::seconds(10);
constexpr std::string_view kEraseLine = "\r\033[K";
constexpr std::string_view kReset = "\033[0m";
// Colours that read well on dark and light grounds; red is for stderr.
constexpr std::array<std::string_view, 5> kRankColours = {"\033[36m", "\033[32m", "\033[35m", "\033[34m", "\033[33m"};

std::string time_of_day() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  ::localtime_r(&now.tv_sec, &parts);
  return fmt::format("{:02}:{:02}:{:02}.{:03}", parts.tm_hour, parts.tm_min, parts.tm_sec, now.tv_nsec / 1'000'000);
}

/// At most `columns` characters, since a line that wraps cannot be overwritten. Text with escapes is left alone.
std::string_view clipped(std::string_view text, int columns) {
  if (text.find('\033') != std::string_view::npos) return text;
  int seen = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80 && ++seen > std::max(columns, 1)) return text.substr(0, i);
  }
  return text;
}

}  // namespace

OutputView::OutputView(ViewOptions options) : options_(std::move(options)), sources_(options_.hosts.size() * 2) {
  for (std::size_t rank = 0; rank < options_.hosts.size(); ++rank) {
    label_width_ = std::max(label_width_, options_.hosts[rank].size() + 1 + std::to_string(rank).size());
  }
}

std::string OutputView::prefix(int rank, Stream stream, bool continued) const {
  const std::string label = fmt::format("{}:{}", options_.hosts[static_cast<std::size_t>(rank)], rank);
  const char* const mark = continued ? "+" : "|";
  const bool is_error = stream == Stream::Stderr;
  std::string time;
  std::string kind;
  if (options_.style == PrefixStyle::Full) {
    time = time_of_day() + " ";
    kind = is_error ? "err " : "out ";
  }
  if (!options_.colour[is_error]) return fmt::format("{}{:<{}} {}{} ", time, label, label_width_, kind, mark);
  const std::string_view colour = kRankColours[static_cast<std::size_t>(rank) % kRankColours.size()];
  return fmt::format("{}{}{:<{}}{} {}{}{}{} ", time, colour, label, label_width_, kReset, kind,
                     is_error ? "\033[31m" : "\033[2m", mark, kReset);
}

void OutputView::complete(std::string& out, int rank, Stream stream, std::string_view text) {
  Source& from = source(rank, stream);
  if (transient_shown_ && options_.terminal[stream == Stream::Stderr]) {
    out += kEraseLine;
    transient_shown_ = false;
  }
  out += prefix(rank, stream, from.cut);
  out += text;
  out += '\n';
  from.cut = false;
}

void OutputView::transient(std::string& out, int rank, Stream stream, std::string_view text) {
  const int used = static_cast<int>(label_width_) + (options_.style == PrefixStyle::Full ? 20 : 3);
  out += kEraseLine;
  out += prefix(rank, stream, source(rank, stream).cut);
  out += clipped(text, options_.columns() - used - 1);
  transient_shown_ = true;
}

std::vector<Text> OutputView::feed(int rank, Stream stream, std::string_view bytes, Clock::time_point now) {
  const bool is_error = stream == Stream::Stderr;
  const int fd = is_error ? 2 : 1;
  if (options_.style == PrefixStyle::None) return {{fd, std::string(bytes)}};
  Source& from = source(rank, stream);
  std::string out;
  for (Line& line : from.lines.feed(bytes)) {
    if (line.end == Line::End::Return) {
      if (line.text.empty()) continue;
      if (options_.terminal[is_error]) {
        transient(out, rank, stream, line.text);
      } else if (now - from.progress_shown >= kProgressPause && from.progress_shown != Clock::time_point{}) {
        complete(out, rank, stream, line.text);
        from.progress_shown = now;
        from.progress.clear();
      } else {
        if (from.progress_shown == Clock::time_point{}) from.progress_shown = now;
        from.progress = std::move(line.text);
      }
      continue;
    }
    // "100 %\r\n" came as one line; "100 %\r" and then an empty line means the bar's last state too.
    if (line.text.empty() && !from.progress.empty()) line.text = std::move(from.progress);
    from.progress.clear();
    complete(out, rank, stream, line.text);
    from.cut = line.end == Line::End::Cut;
  }
  from.partial_shown = from.lines.partial().empty();
  if (out.empty()) return {};
  return {{fd, std::move(out)}};
}

std::vector<Text> OutputView::finish() {
  std::vector<Text> texts;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    const int rank = static_cast<int>(i / 2);
    const Stream stream = i % 2 == 0 ? Stream::Stdout : Stream::Stderr;
    std::string last = sources_[i].lines.take_partial();
    if (last.empty()) last = std::exchange(sources_[i].progress, {});
    if (last.empty()) continue;
    std::string out;
    complete(out, rank, stream, last);
    texts.push_back({stream == Stream::Stderr ? 2 : 1, std::move(out)});
  }
  if (transient_shown_) {
    texts.push_back({options_.terminal[1] ? 2 : 1, "\n"});  // a progress bar's last state stays readable
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
    from.partial_shown = true;
    std::string out;
    const Stream stream = i % 2 == 0 ? Stream::Stdout : Stream::Stderr;
    transient(out, static_cast<int>(i / 2), stream, from.lines.partial());
    texts.push_back({stream == Stream::Stderr ? 2 : 1, std::move(out)});
  }
  return texts;
}

}  // namespace cohort::launch
