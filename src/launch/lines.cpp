#include "launch/lines.h"

#include <utility>

namespace cohort::launch {
namespace {

/// A cut must not fall into a UTF-8 character: the length of `text` up to the beginning of an incomplete last one.
std::size_t whole_characters(std::string_view text) {
  std::size_t end = text.size();
  for (std::size_t back = 1; back <= 4 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xC0) == 0x80) continue;
    const std::size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
    if (length > back) end = text.size() - back;
    break;
  }
  return end == 0 ? text.size() : end;
}

}  // namespace

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
    while (partial_.size() + piece.size() > kLongestLine) {
      const std::size_t room = kLongestLine - partial_.size();
      partial_.append(piece.substr(0, room));
      piece.remove_prefix(room);
      const std::size_t whole = whole_characters(partial_);
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
