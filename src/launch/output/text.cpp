#include "launch/output/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>

namespace cohort::launch {
namespace {

/// Longest escape sequence that is waited for; longer ones (links, titles) do not hold text back.
constexpr std::size_t kLongestEscape = 4096;

/// Returns the length of `text` without an incomplete UTF-8 character at its end.
std::size_t whole_characters(std::string_view text) {
  for (std::size_t back = 1; back <= 4 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xC0) == 0x80) continue;
    const std::size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
    return length > back ? text.size() - back : text.size();
  }
  return text.size();
}

}  // namespace

std::size_t escape_length(std::string_view text) {
  const auto byte = [&text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (text.size() < 2) return 0;
  if (text[1] == '[') {  // CSI: parameters, then one byte that ends it
    for (std::size_t i = 2; i < text.size(); ++i) {
      if (byte(i) >= 0x40 && byte(i) <= 0x7E) return i + 1;
      if (byte(i) < 0x20 || byte(i) > 0x3F) return i;  // not a sequence: a terminal drops it
    }
    return 0;
  }
  if (text[1] == ']' || text[1] == 'P' || text[1] == '_' || text[1] == '^') {  // a string that ends with BEL or ST
    for (std::size_t i = 2; i < text.size(); ++i) {
      if (text[i] == '\a') return i + 1;
      if (text[i] == '\\' && text[i - 1] == '\033') return i + 1;
    }
    return 0;
  }
  for (std::size_t i = 1; i < text.size(); ++i) {
    if (byte(i) < 0x20 || byte(i) > 0x2F) return i + 1;
  }
  return 0;
}

std::size_t whole_text(std::string_view text) {
  std::size_t end = whole_characters(text);
  const std::size_t from = end > kLongestEscape ? end - kLongestEscape : 0;
  for (std::size_t at = text.find('\033', from); at < end; at = text.find('\033', at)) {
    const std::size_t length = escape_length(text.substr(at, end - at));
    if (length == 0) return at;
    at += length;
  }
  return end;
}

std::vector<Line> LineSplitter::feed(std::string_view bytes) {
  std::vector<Line> lines;
  while (!bytes.empty()) {
    if (after_return_) {
      after_return_ = false;
      if (bytes.front() == '\n') {
        bytes.remove_prefix(1);
        lines.push_back({std::exchange(partial_, {}), Line::End::Newline});
        continue;
      }
      lines.push_back({std::exchange(partial_, {}), Line::End::Return});
    }
    const auto end = bytes.find_first_of("\r\n");
    std::string_view piece = bytes.substr(0, end);
    while (partial_.size() + piece.size() > longest_) {
      const std::size_t room = longest_ - partial_.size();
      partial_.append(piece.substr(0, room));
      piece.remove_prefix(room);
      const std::size_t cut = whole_text(partial_);
      const std::size_t whole = cut == 0 ? partial_.size() : cut;
      std::string rest = partial_.substr(whole);
      partial_.resize(whole);
      lines.push_back({std::exchange(partial_, std::move(rest)), Line::End::Cut});
    }
    partial_.append(piece);
    if (end == std::string_view::npos) break;
    // Only the next byte tells whether a return stands alone.
    if (bytes[end] == '\r')
      after_return_ = true;
    else
      lines.push_back({std::exchange(partial_, {}), Line::End::Newline});
    bytes.remove_prefix(end + 1);
  }
  return lines;
}

std::string LineSplitter::take_partial() {
  after_return_ = false;
  return std::exchange(partial_, {});
}

namespace {

/// Bytes of the last line that can be seen, with its colours.
constexpr std::size_t kLooksAt = 2048;

}  // namespace

std::string plain(std::string_view line, std::size_t longest) {
  std::string out;
  for (std::size_t i = 0; i < line.size() && out.size() < longest;) {
    if (line[i] == '\033') {
      i += std::max<std::size_t>(escape_length(line.substr(i)), 1);
      continue;
    }
    const auto byte = static_cast<unsigned char>(line[i++]);
    if (byte == 0xC2 && i < line.size() && (static_cast<unsigned char>(line[i]) & 0xE0) == 0x80) {
      ++i;  // U+0080 to U+009F, control characters for terminals, too
      continue;
    }
    if (byte >= 0x20 && byte != 0x7F) out += static_cast<char>(byte);
    if (byte == '\t') out += ' ';
  }
  out.resize(whole_text(out));
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

void LastLine::append(Stream stream, std::string_view bytes) {
  std::string& partial = partial_[stream == Stream::Stderr];
  if (bytes.size() > kLooksAt) {
    bytes.remove_prefix(bytes.size() - kLooksAt);
    const auto end = bytes.find_first_of("\r\n");
    if (end != std::string_view::npos) bytes.remove_prefix(end);
    partial.clear();
  }
  while (!bytes.empty()) {
    const auto end = std::min(bytes.find_first_of("\r\n"), bytes.size());
    partial.append(bytes.substr(0, end), 0, kLooksAt - std::min(partial.size(), kLooksAt));
    const bool over = end < bytes.size();
    if (std::string line = plain(partial, kLongest); !line.empty()) text_ = std::move(line);
    if (over) partial.clear();
    bytes.remove_prefix(std::min(end + 1, bytes.size()));
  }
}

namespace {

constexpr double kSilence = 6;

}  // namespace

std::string duration_text(double seconds) {
  const auto all = static_cast<std::int64_t>(std::clamp(seconds, 0.0, 1e12));
  if (all >= 86400) return fmt::format("{} d {} h", all / 86400, all / 3600 % 24);
  if (all >= 3600) return fmt::format("{}:{:02}:{:02}", all / 3600, all / 60 % 60, all % 60);
  return fmt::format("{}:{:02}", all / 60, all % 60);
}

std::string bytes_text(double bytes) {
  const char* unit = "BKMGTP";
  while (bytes >= 999.5 && unit[1] != '\0') {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f}{}", bytes, bytes < 9.95 && *unit != 'B' ? 1 : 0, *unit);
}

std::string number_text(double value) {
  const double size = std::fabs(value);
  if (!(size < 1e15)) return fmt::format("{:.3g}", value);
  if (size >= 999.5e6) return fmt::format("{:.3g}G", value / 1e9);
  if (size >= 999.5e3) return fmt::format("{:.3g}M", value / 1e6);
  if (size >= 9999.5) return fmt::format("{:.3g}k", value / 1e3);
  if (size >= 99.95) return fmt::format("{:.0f}", value);
  return fmt::format("{:.3g}", value);
}

std::string percent_text(double share) { return share < 0.005 ? "-" : fmt::format("{:.0f}%", std::round(share * 100)); }

double samples_per_second(const LiveRun& run) {
  double sum = 0;
  for (const LiveRank& rank : run.ranks) sum += rank.figures.samples_per_second;
  return sum;
}

int late_rank(const LiveRun& run) {
  const auto most = std::ranges::max_element(
      run.ranks, [](const LiveRank& a, const LiveRank& b) { return a.figures.waited_for < b.figures.waited_for; });
  if (most == run.ranks.end() || most->figures.waited_for < 0.1) return -1;
  return run.first_rank + static_cast<int>(most - run.ranks.begin());
}

std::string state_text(const LiveRun& run, double now) {
  std::string text = run.state;
  if (run.state == "ended" && run.exit_status) text = fmt::format("ended with status {}", *run.exit_status);
  const double until = run.state == "ended" ? run.time : now;
  if (run.start > 0) text += " " + duration_text(until - run.start);
  return text;
}

std::string others_text(const LiveRun& run) {
  std::map<std::string, int> states;  // number of servers in each state
  std::uint64_t memory = 0;
  std::int64_t restarts = 0;
  std::string evaluator;
  for (const LiveOther& other : run.others) {
    if (other.name.starts_with("server")) {
      ++states[other.state];
      restarts += std::max(other.restarts, 0);
      memory += std::min<std::uint64_t>(other.memory, std::uint64_t{1} << 48);
    } else {
      evaluator = fmt::format("{}: {}", other.name, other.state);
    }
  }
  std::string text;
  for (const auto& [state, count] : states)
    text += fmt::format("{} {} {}", text.empty() ? "servers:" : ",", count, state);
  if (restarts > 0) text += fmt::format(", {} started again", restarts);
  if (memory > 0) text += ", " + bytes_text(static_cast<double>(memory));
  if (!evaluator.empty()) text += (text.empty() ? "" : "; ") + evaluator;
  return text;
}

bool is_silent(const LiveRun& run, double now) { return run.state != "ended" && now - run.time > kSilence; }

namespace {

/// Returns "step 1200  412 samples/s".
std::string steps_text(const LiveRun& run) {
  std::int64_t step = 0;
  double speed = 0;
  for (const LiveRank& rank : run.ranks) {
    step = std::max(step, rank.figures.step);
    speed = std::max(speed, rank.figures.steps_per_second);
  }
  std::string text = step > 0 ? fmt::format("step {}", step) : std::string();
  if (const double samples = samples_per_second(run); samples > 0) {
    text += "  " + number_text(samples) + " samples/s";
  } else if (speed > 0) {
    text += "  " + number_text(speed) + " steps/s";
  }
  return text;
}

}  // namespace

std::string summary(const LiveRun& run, double now, std::string_view progress) {
  std::string text = state_text(run, now);
  const std::string steps = progress.empty() ? steps_text(run) : std::string(progress);
  if (!steps.empty()) text += "  " + steps;
  if (const int late = late_rank(run); late >= 0) {
    const LiveRank& rank = run.ranks[static_cast<std::size_t>(late - run.first_rank)];
    text += fmt::format("  late: rank {} ({})", late, percent_text(rank.figures.waited_for));
  }
  if (is_silent(run, now)) text += fmt::format("  no news for {}", duration_text(now - run.time));
  return text;
}

}  // namespace cohort::launch
