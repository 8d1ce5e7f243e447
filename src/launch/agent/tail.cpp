#include "launch/agent/tail.h"

#include <algorithm>

namespace cohort::launch {
namespace {

constexpr std::string_view kFrame = "frame #";
constexpr std::string_view kTraceback = "Traceback (most recent call last):";
/// What Python writes between the traceback of a cause and the one of what it caused.
constexpr std::string_view kLinks[] = {"\nThe above exception was the direct cause of the following exception:\n\n",
                                       "\nDuring handling of the above exception, another exception occurred:\n\n"};

/// Where the last `count` lines begin.
std::size_t last_lines(std::string_view text, std::size_t count) {
  std::size_t begin = text.size();
  if (begin > 0 && text[begin - 1] == '\n') --begin;
  for (std::size_t seen = 0; begin > 0; --begin) {
    if (text[begin - 1] == '\n' && ++seen == count) break;
  }
  return begin;
}

std::size_t line_after(std::string_view text, std::size_t at) {
  const auto end = text.find('\n', at);
  return end == std::string_view::npos ? text.size() : end + 1;
}

/// The line after the exception's own, which is the first that is not indented.
std::size_t traceback_end(std::string_view text, std::size_t begin) {
  std::size_t line = line_after(text, begin);
  while (line < text.size() && text[line] == ' ') line = line_after(text, line);
  return line_after(text, line);
}

/// The last place of a line that is the header, before `before`.
std::size_t last_header(std::string_view text, std::size_t before) {
  for (std::size_t at = text.rfind(kTraceback, before); at != std::string_view::npos;
       at = text.rfind(kTraceback, at - 1)) {
    const std::size_t end = at + kTraceback.size();
    if ((at == 0 || text[at - 1] == '\n') && end < text.size() && text[end] == '\n') return at;
    if (at == 0) break;
  }
  return std::string_view::npos;
}

/// Where the last traceback begins, with those that it says it was caused by; npos if there is none.
std::size_t traceback_in(std::string_view text) {
  std::size_t begin = last_header(text, text.size());
  while (begin != std::string_view::npos && begin > 0) {
    const std::string_view before = text.substr(0, begin);
    const bool linked = before.ends_with(kLinks[0]) || before.ends_with(kLinks[1]);
    const std::size_t cause = linked ? last_header(text, begin - 1) : std::string_view::npos;
    if (cause == std::string_view::npos) break;
    begin = cause;
  }
  return begin;
}

}  // namespace

void Tail::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const std::size_t end = line_after(bytes, 0);
    bytes_.append(bytes.substr(0, end));
    bytes.remove_prefix(end);
    if (bytes_.back() == '\n') {
      if (std::string_view(bytes_).substr(line_).starts_with(kFrame)) bytes_.resize(line_);
      line_ = bytes_.size();
    }
    // Cut at twice the size, so that a flood of small writes does not move memory each time.
    if (bytes_.size() <= 2 * longest_) continue;
    const std::size_t cut = bytes_.size() - longest_;
    bytes_.erase(0, cut);
    line_ -= std::min(line_, cut);
  }
}

std::string Tail::text() const {
  std::string_view text(bytes_);
  if (text.size() > longest_) text.remove_prefix(text.size() - longest_);
  const std::size_t last = last_lines(text, lines_);
  const std::size_t traceback = traceback_in(text);
  if (traceback == std::string_view::npos || traceback >= last) return std::string(text.substr(last));
  if (last_lines(text, kTracebackLines) <= traceback) return std::string(text.substr(traceback));
  constexpr std::size_t kAfter = 10;
  const std::size_t end = traceback_end(text, last_header(text, text.size()));
  std::string_view whole = text.substr(traceback, end - traceback);
  std::string out;
  if (const std::size_t cut = last_lines(whole, kTracebackLines - kAfter); cut > 0) {
    out = "...\n";
    whole.remove_prefix(cut);
  }
  out += whole;
  std::string_view rest = text.substr(end);
  if (const std::size_t cut = last_lines(rest, kAfter); cut > 0) {
    out += "...\n";
    rest.remove_prefix(cut);
  }
  return out.append(rest);
}

}  // namespace cohort::launch
