// Slurm's host lists and counts.
#include "base/parse.h"
#include "cluster/host_list.h"
#include "cluster/host_text.h"

#include <cstdint>

namespace cohort::cluster {
namespace {

// A range with the width of its numbers, as [08-11].
struct Range {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  int width = 1;
};

// A name: texts with ranges between them; texts.size() == groups.size() + 1.
struct Pattern {
  std::vector<std::string_view> texts;
  std::vector<std::vector<Range>> groups;
  std::vector<std::size_t> sizes;  // of the groups, in numbers
  std::size_t hosts = 1;
};

constexpr bool is_separator(char c) noexcept { return c == ',' || c == ' ' || c == '\t' || c == '\n'; }
constexpr bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

class HostListParser {
 public:
  explicit HostListParser(std::string_view text)
      : text_{text, "host list", "write it as Slurm does: node[01-04,7],other"} {}

  Result<std::vector<std::string>> parse() {
    while (at_ < text().size()) {
      if (is_separator(text()[at_])) {
        ++at_;
        continue;
      }
      const std::size_t begin = at_;
      auto pattern = parse_pattern();
      if (!pattern) return tl::unexpected(pattern.error());
      if (auto added = expand(*pattern, begin); !added) return tl::unexpected(added.error());
    }
    if (hosts_.empty()) return bad(0, "there is no host");
    return std::move(hosts_);
  }

 private:
  std::string_view text() const { return text_.text; }
  tl::unexpected<Error> bad(std::size_t offset, std::string_view why) const { return text_error(text_, offset, why); }

  Result<Pattern> parse_pattern() {
    Pattern pattern;
    std::size_t begin = at_;
    for (; at_ < text().size() && !is_separator(text()[at_]); ++at_) {
      const char c = text()[at_];
      if (c == '[') {
        pattern.texts.push_back(text().substr(begin, at_ - begin));
        if (pattern.groups.size() == 16) return bad(at_, "more than 16 brackets in one name");
        if (auto parsed = parse_group(pattern); !parsed) return tl::unexpected(parsed.error());
        begin = at_ + 1;  // at_ is at the ']'
      } else if (c == ']') {
        return bad(at_, "a ']' without its '['");
      } else if (c == '{') {
        return bad(at_, "a function, which only Slurm's controller can resolve (scontrol show hostnames does),");
      } else if (!is_host_character(c)) {
        return bad(at_, "a character that no host name has");
      }
    }
    pattern.texts.push_back(text().substr(begin, at_ - begin));
    return pattern;
  }

  // From the '[' to its ']'.
  Result<void> parse_group(Pattern& pattern) {
    std::vector<Range> ranges;
    std::size_t size = 0;
    do {
      ++at_;  // '[' or ','
      const std::size_t begin = at_;
      const auto range = parse_range();
      if (!range) return tl::unexpected(range.error());
      if (range->high - range->low >= kMostHosts) return bad(begin, "a range of more than 65536 hosts");
      ranges.push_back(*range);
      size += static_cast<std::size_t>(range->high - range->low + 1);
      if (size > kMostHosts) return bad(begin, "more than 65536 hosts");
    } while (at_ < text().size() && text()[at_] == ',');
    if (at_ >= text().size()) return bad(at_, "a '[' without its ']'");
    if (text()[at_] == '[') return bad(at_, "a '[' within brackets");
    if (text()[at_] != ']') return bad(at_, "something other than a number within brackets");
    pattern.hosts *= size;
    if (pattern.hosts > kMostHosts) return bad(at_, "more than 65536 hosts");
    pattern.groups.push_back(std::move(ranges));
    pattern.sizes.push_back(size);
    return {};
  }

  Result<Range> parse_range() {
    std::string_view low_text = digits();
    const auto low = number(low_text);
    if (!low) return tl::unexpected(low.error());
    Range range{*low, *low, static_cast<int>(low_text.size())};
    if (at_ < text().size() && text()[at_] == '-') {
      const std::size_t begin = ++at_;
      const auto high = number(digits());
      if (!high) return tl::unexpected(high.error());
      if (*high < *low) return bad(begin, "a range that ends below its beginning");
      range.high = *high;
    }
    return range;
  }

  std::string_view digits() {
    const std::size_t begin = at_;
    while (at_ < text().size() && is_digit(text()[at_])) ++at_;
    return text().substr(begin, at_ - begin);
  }

  Result<std::uint64_t> number(std::string_view digits) const {
    const std::size_t begin = at_ - digits.size();
    if (digits.empty()) return bad(begin, "a number is missing");
    if (digits.size() > 18) return bad(begin, "a number of more than 18 digits");
    return *parse_integer<std::uint64_t>(digits);
  }

  // The last bracket's number changes fastest, then the first one's, the second one's and so on: Slurm's own order.
  Result<void> expand(const Pattern& pattern, std::size_t begin) {
    if (hosts_.size() + pattern.hosts > kMostHosts) return bad(begin, "more than 65536 hosts");
    const std::size_t groups = pattern.groups.size();
    std::vector<std::string> numbers(groups);
    for (std::size_t i = 0; i < pattern.hosts; ++i) {
      std::size_t rest = i;
      for (std::size_t step = 0; step < groups; ++step) {
        const std::size_t group = step == 0 ? groups - 1 : step - 1;
        numbers[group] = nth(pattern.groups[group], rest % pattern.sizes[group]);
        rest /= pattern.sizes[group];
      }
      std::string name;
      for (std::size_t group = 0; group < groups; ++group) {
        name += pattern.texts[group];
        name += numbers[group];
      }
      name += pattern.texts[groups];
      if (const std::string_view fault = fault_of_host(name); !fault.empty()) return bad(begin, fault);
      hosts_.push_back(std::move(name));
    }
    return {};
  }

  static std::string nth(const std::vector<Range>& ranges, std::size_t index) {
    for (const Range& range : ranges) {
      const auto size = static_cast<std::size_t>(range.high - range.low + 1);
      if (index < size) return fmt::format("{:0{}}", range.low + index, range.width);
      index -= size;
    }
    return {};
  }

  NamedText text_;
  std::size_t at_ = 0;
  std::vector<std::string> hosts_;
};

}  // namespace

Result<std::vector<std::string>> parse_slurm_hosts(std::string_view text) { return HostListParser(text).parse(); }

Result<std::vector<int>> parse_slurm_counts(std::string_view text) {
  const NamedText named{text, "counts", "write them as Slurm does: 3,1(x3)"};
  std::vector<int> counts;
  std::size_t at = 0;
  const auto number = [&](std::string_view stop) -> Result<int> {
    const std::size_t begin = at;
    while (at < text.size() && is_digit(text[at])) ++at;
    const auto value = parse_integer<int>(text.substr(begin, at - begin));
    if (!value || *value < 1 || *value > 1000000) return text_error(named, begin, "no number from 1 to 1000000");
    if (at < text.size() && stop.find(text[at]) == std::string_view::npos)
      return text_error(named, at, "an unexpected character");
    return *value;
  };
  while (true) {
    const std::size_t begin = at;
    const auto count = number(",(");
    if (!count) return tl::unexpected(count.error());
    std::size_t times = 1;
    if (at < text.size() && text[at] == '(') {
      if (text.substr(at, 2) != "(x") return text_error(named, at, "a '(' without its 'x'");
      at += 2;
      const auto repeated = number(")");
      if (!repeated) return tl::unexpected(repeated.error());
      if (at >= text.size()) return text_error(named, at, "a '(' without its ')'");
      ++at;
      times = static_cast<std::size_t>(*repeated);
    }
    if (counts.size() + times > kMostHosts) return text_error(named, begin, "more than 65536 hosts");
    counts.insert(counts.end(), times, *count);
    if (at == text.size()) return counts;
    if (text[at] != ',') return text_error(named, at, "an unexpected character");
    ++at;
  }
}

}  // namespace cohort::cluster
