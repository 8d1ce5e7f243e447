#include "launch/tail.h"

namespace cohort::launch {

void Tail::append(std::string_view bytes) {
  if (bytes.size() >= longest_) {
    bytes_.assign(bytes.substr(bytes.size() - longest_));
    return;
  }
  bytes_.append(bytes);
  // Cut at twice the size, so that a flood of small writes does not move memory each time.
  if (bytes_.size() > 2 * longest_) bytes_.erase(0, bytes_.size() - longest_);
}

std::string Tail::text() const {
  std::string_view text(bytes_);
  if (text.size() > longest_) text.remove_prefix(text.size() - longest_);
  std::size_t begin = text.size();
  if (begin > 0 && text[begin - 1] == '\n') --begin;
  for (std::size_t seen = 0; begin > 0; --begin) {
    if (text[begin - 1] == '\n' && ++seen == lines_) break;
  }
  return std::string(text.substr(begin));
}

}  // namespace cohort::launch
