#include "launch/show/lines.h"

#include <utility>

namespace cohort::launch {
namespace {

/// Longer ones (links, titles) are no reason to hold text back.
constexpr std::size_t kLongestEscape = 4096;

/// The length of `text` up to the beginning of an incomplete last UTF-8 character.
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
      if (byte(i) < 0x20 || byte(i) > 0x3F) return i;  // none: a terminal drops it
    }
    return 0;
  }
  if (text[1] == ']' || text[1] == 'P' || text[1] == '_' || text[1] == '^') {  // a string, up to BEL or ST
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
    // Whether a return stands alone is known only with the next byte.
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

}  // namespace cohort::launch
