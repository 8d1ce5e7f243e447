#include "train/gradients/same_model.h"

#include "base/parse.h"
#include "base/result.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace cohort::gradients {

namespace {

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

template <class T>
std::vector<T> all_gather(Ranks& ranks, std::vector<T> mine) {
  const std::size_t count = mine.size();
  mine.resize(count * static_cast<std::size_t>(ranks.size() + 1));
  ranks.run("all_gather", mine, [&](Communicator& comm, auto span) {
    return comm.all_gather(ConstBuffer(span.first(count)), span.subspan(count));
  });
  mine.erase(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(count));
  return mine;
}

}  // namespace

void require_same_on_all_ranks(Ranks& ranks, const std::vector<std::string>& lines, const char* who) {
  if (ranks.size() == 1) return;
  std::string text;
  for (const std::string& line : lines) text += line + "\n";

  const auto all = all_gather(ranks, std::vector<std::uint64_t>{fnv1a(text), text.size()});
  std::uint64_t longest = 0;
  bool same = true;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(ranks.size()); ++rank) {
    same = same && all[2 * rank] == all[0] && all[2 * rank + 1] == all[1];
    longest = std::max(longest, all[2 * rank + 1]);
  }
  if (same) return;

  std::vector<std::uint8_t> padded(longest);
  std::memcpy(padded.data(), text.data(), text.size());
  const auto texts = all_gather(ranks, std::move(padded));
  const auto lines_of = [&](std::size_t rank) {
    const auto* begin = reinterpret_cast<const char*>(texts.data()) + rank * longest;
    return split_lines(std::string(begin, all[2 * rank + 1]));
  };
  const std::vector<std::string> first = lines_of(0);
  for (std::size_t rank = 1; rank < static_cast<std::size_t>(ranks.size()); ++rank) {
    const std::vector<std::string> other = lines_of(rank);
    if (other == first) continue;
    const std::size_t common = std::min(first.size(), other.size());
    std::size_t at = 0;
    while (at < common && first[at] == other[at]) ++at;
    ErrorContext where = ranks.where(who);
    where.peer = static_cast<int>(rank);
    throw Error(
        ErrorCode::Mismatch,
        fmt::format("{}: the ranks' models differ -- rank 0 has {}, rank {} has {} -- build the same model with the "
                    "same options on all ranks",
                    who, at < first.size() ? first[at] : "nothing more", rank,
                    at < other.size() ? other[at] : "nothing more"),
        where);
  }
}

}  // namespace cohort::gradients
