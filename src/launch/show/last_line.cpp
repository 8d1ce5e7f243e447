#include "launch/show/last_line.h"

#include "launch/show/lines.h"

#include <algorithm>

namespace cohort::launch {
namespace {

/// More cannot be seen of the last line, with its colours.
constexpr std::size_t kLooksAt = 2048;

std::string plain(std::string_view line) {
  std::string out;
  for (std::size_t i = 0; i < line.size() && out.size() < LastLine::kLongest;) {
    if (line[i] == '\033') {
      i += std::max<std::size_t>(escape_length(line.substr(i)), 1);
      continue;
    }
    const auto byte = static_cast<unsigned char>(line[i++]);
    if (byte >= 0x20 && byte != 0x7F) out += static_cast<char>(byte);
    if (byte == '\t') out += ' ';
  }
  out.resize(whole_text(out));
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

}  // namespace

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
    if (std::string line = plain(partial); !line.empty()) text_ = std::move(line);
    if (over) partial.clear();
    bytes.remove_prefix(std::min(end + 1, bytes.size()));
  }
}

}  // namespace cohort::launch
