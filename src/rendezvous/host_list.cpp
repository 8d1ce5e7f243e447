#include "rendezvous/host_list.h"

#include "base/parse.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

namespace cohort::rendezvous {
namespace {

/// Returns the error "WHAT 'text': WHY at character N -- ADVICE". Of a long text, shows the part around the position.
tl::unexpected<Error> text_error(const NamedText& text, std::size_t offset, std::string_view why) {
  constexpr std::size_t kShown = 30;
  const std::size_t begin = text.text.size() <= 3 * kShown || offset < kShown ? 0 : offset - kShown;
  const std::size_t end =
      text.text.size() <= 3 * kShown ? text.text.size() : std::min(text.text.size(), begin + 2 * kShown);
  std::string shown = begin > 0 ? "..." : "";
  // The texts are untrusted, and the message must stay one line of printable characters.
  for (const char c : text.text.substr(begin, end - begin)) {
    const auto byte = static_cast<unsigned char>(c);
    shown += byte < ' ' || byte == 0x7f ? '?' : c;
  }
  if (end < text.text.size()) shown += "...";
  return fail(ErrorCode::InvalidArgument, "{} '{}': {} at character {} -- {}", text.what, shown, why, offset + 1,
              text.advice);
}

/// True for letters, digits, '.', '-' and '_'.
bool is_host_character(char c) noexcept {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '_';
}

}  // namespace

std::string_view fault_of_host(std::string_view host) {
  if (host.empty()) return "there is no host name";
  if (host.size() > 255) return "a host name longer than 255 bytes";
  if (host.find(':') != std::string_view::npos) {
    const std::size_t percent = host.find('%');
    const std::string address(host.substr(0, percent));
    in6_addr ignored{};
    // inet_pton reads only up to the first NUL.
    if (address.find('\0') != std::string::npos || ::inet_pton(AF_INET6, address.c_str(), &ignored) != 1)
      return "an address that is no IPv6 address";
    if (percent == std::string_view::npos) return {};
    const std::string_view scope = host.substr(percent + 1);
    const bool good = !scope.empty() && std::all_of(scope.begin(), scope.end(), is_host_character);
    return good ? std::string_view() : "an IPv6 address with a scope that is no interface's name";
  }
  if (host.front() == '-') return "a host name that begins with '-'";
  if (!std::all_of(host.begin(), host.end(), is_host_character)) return "a character that no host name has";
  return {};
}

namespace {

// Hosts with slots: lists and host files.

constexpr std::string_view kBlank = " \t\r";

// Collects hosts in the order of their first mention, and adds up each host's slots.
class Hosts {
 public:
  /// Adds a host. Returns what is wrong, or an empty text.
  std::string_view add(HostSlots host) {
    if (++mentions_ > kMostMentions) return "more than a million mentions of hosts";
    const auto [entry, is_new] = index_.emplace(host.host, hosts_.size());
    if (is_new) {
      if (hosts_.size() == kMostHosts) return "more than 65536 hosts";
      hosts_.push_back(std::move(host));
      return {};
    }
    HostSlots& known = hosts_[entry->second];
    const int slots = known.slots.value_or(1) + host.slots.value_or(1);
    if (slots > kMostSlots) return "more than 65536 slots on one host";
    known.slots = slots;
    if (known.max_slots && host.max_slots && *known.max_slots != *host.max_slots)
      return "another max_slots than this host had before,";
    if (!known.max_slots) known.max_slots = host.max_slots;
    return {};
  }
  const std::vector<HostSlots>& all() const { return hosts_; }

 private:
  static constexpr std::size_t kMostMentions = std::size_t{1} << 20;
  std::vector<HostSlots> hosts_;
  std::map<std::string, std::size_t, std::less<>> index_;
  std::size_t mentions_ = 0;
};

std::optional<int> slots_of(std::string_view text) {
  const auto value = parse_integer<int>(text);
  return value && *value >= 1 && *value <= kMostSlots ? value : std::nullopt;
}

// An entry: "h", "h:4", "[fe80::1]:4" or "n[01-16]:8". A name with ranges stands for several hosts.
struct Entry {
  std::vector<std::string> hosts;
  std::optional<int> slots;
};
Result<Entry> parse_entry(const NamedText& named, std::size_t begin, std::size_t end) {
  const std::string_view entry = named.text.substr(begin, end - begin);
  Entry result;
  std::string_view host = entry;
  std::string_view rest;
  if (const std::size_t at = entry.find('@'); at != std::string_view::npos) {
    return text_error(named, begin + at,
                      "a user's name before the host's, which ssh takes from its own configuration (`Host NAME` and "
                      "`User NAME` in ~/.ssh/config, or --ssh \"ssh -l NAME\"),");
  }
  const std::size_t close = entry.find(']');
  const bool v6 = entry.starts_with('[') && entry.substr(0, close).find(':') != std::string_view::npos;
  if (v6) {
    if (close == std::string_view::npos) return text_error(named, begin, "a '[' without its ']'");
    host = entry.substr(1, close - 1);
    rest = entry.substr(close + 1);
    if (!rest.empty() && rest.front() != ':') return text_error(named, begin + close + 1, "no ':' behind the ']'");
  } else if (const std::size_t colon = entry.find(':'); colon != std::string_view::npos) {
    host = entry.substr(0, colon);
    rest = entry.substr(colon);
    if (rest.find(':', 1) != std::string_view::npos)
      return text_error(named, begin, "more than one ':' (an IPv6 address has to stand in brackets: [fe80::1]:4)");
  }
  if (!rest.empty()) {
    result.slots = slots_of(rest.substr(1));
    if (!result.slots) return text_error(named, end - rest.size() + 1, "slots that are no number from 1 to 65536");
  }
  if (v6 || host.find('[') == std::string_view::npos) {
    if (const std::string_view fault = fault_of_host(host); !fault.empty()) {
      const auto wrong = std::find_if_not(host.begin(), host.end(), is_host_character);
      const auto place = v6 || wrong == host.end() ? 0 : static_cast<std::size_t>(wrong - host.begin());
      return text_error(named, begin + place, fault);
    }
    result.hosts.emplace_back(host);
    return result;
  }
  auto hosts = parse_slurm_hosts(host);
  if (!hosts) return tl::unexpected(hosts.error());
  result.hosts = *std::move(hosts);
  return result;
}

// Returns the end of the entry that begins at `at`: the first comma outside of brackets, or the end of the text.
std::size_t entry_end(std::string_view text, std::size_t at) {
  bool within = false;
  for (; at < text.size(); ++at) {
    if (text[at] == '[') within = true;
    if (text[at] == ']') within = false;
    if (text[at] == ',' && !within) break;
  }
  return at;
}

// Parses one line of a host file, without its comment.
class LineParser {
 public:
  explicit LineParser(const NamedText& line) : line_(line) {}

  Result<void> parse_into(Hosts& hosts) {
    skip_blanks();
    const std::size_t begin = at_;
    auto entry = parse_entry(line_, begin, skip_word(kBlank));
    if (!entry) return tl::unexpected(entry.error());
    HostSlots host{{}, entry->slots, {}};
    for (skip_blanks(); at_ < text().size(); skip_blanks()) {
      if (auto parsed = parse_setting(host); !parsed) return parsed;
    }
    if (host.slots && host.max_slots && *host.max_slots < *host.slots)
      return text_error(line_, begin, "max_slots below slots");
    for (std::string& name : entry->hosts) {
      host.host = std::move(name);
      if (const std::string_view fault = hosts.add(host); !fault.empty()) return text_error(line_, begin, fault);
    }
    return {};
  }

 private:
  std::string_view text() const { return line_.text; }
  void skip_blanks() {
    while (at_ < text().size() && kBlank.find(text()[at_]) != std::string_view::npos) ++at_;
  }
  std::size_t skip_word(std::string_view stop) {
    while (at_ < text().size() && stop.find(text()[at_]) == std::string_view::npos) ++at_;
    return at_;
  }

  // Parses "slots=4". Open MPI accepts blanks around the '='.
  Result<void> parse_setting(HostSlots& host) {
    const std::size_t begin = at_;
    const std::string_view key = text().substr(begin, skip_word(" \t\r=") - begin);
    const bool is_slots = key == "slots";
    if (!is_slots && key != "max_slots" && key != "max-slots")
      return text_error(line_, begin, fmt::format("'{}', which is neither slots= nor max_slots=,", key.substr(0, 40)));
    skip_blanks();
    if (at_ >= text().size() || text()[at_] != '=') return text_error(line_, at_, "no '='");
    ++at_;
    skip_blanks();
    const std::size_t value_at = at_;
    const auto value = slots_of(text().substr(value_at, skip_word(kBlank) - value_at));
    if (!value) return text_error(line_, value_at, "slots that are no number from 1 to 65536");
    std::optional<int>& target = is_slots ? host.slots : host.max_slots;
    if (target) return text_error(line_, begin, fmt::format("{} for the second time in this line", key));
    target = value;
    return {};
  }

  NamedText line_;
  std::size_t at_ = 0;
};

}  // namespace

std::string to_string(const HostSlots& host) {
  const bool v6 = host.host.find(':') != std::string::npos;
  const std::string name = v6 ? "[" + host.host + "]" : host.host;
  return host.slots ? fmt::format("{}:{}", name, *host.slots) : name;
}

Result<std::vector<HostSlots>> parse_host_slots(std::string_view text) {
  const NamedText named{text, "hosts", "write HOST:SLOTS,... as in a:4,b:4 or [fe80::1]:4"};
  Hosts hosts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = entry_end(text, begin);
    auto entry = parse_entry(named, begin, end);
    if (!entry) return tl::unexpected(entry.error());
    for (std::string& name : entry->hosts) {
      const std::string_view fault = hosts.add({std::move(name), entry->slots, {}});
      if (!fault.empty()) return text_error(named, begin, fault);
    }
    if (end == text.size()) return hosts.all();
    begin = end + 1;
  }
}

Result<std::vector<HostSlots>> parse_host_file(std::string_view text) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);  // a byte order mark
  Hosts hosts;
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t newline = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, newline - begin);
    begin = newline + 1;
    ++number;
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(kBlank) == std::string_view::npos) continue;
    const std::string what = fmt::format("host file, line {}", number);
    LineParser parser({line, what, "write HOST, HOST:SLOTS or HOST slots=SLOTS"});
    if (auto parsed = parser.parse_into(hosts); !parsed) return tl::unexpected(parsed.error());
  }
  if (hosts.all().empty()) {
    return fail(ErrorCode::InvalidArgument,
                "host file: there is no host in its {} lines -- write HOST, HOST:SLOTS or HOST slots=SLOTS, a line for "
                "each host",
                number);
  }
  return hosts.all();
}

namespace {

// Slurm's host lists and counts.

// A range, with the width of its numbers: [08-11].
struct Range {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  int width = 1;
};

// A name: groups of ranges between texts; texts.size() == groups.size() + 1.
struct Pattern {
  std::vector<std::string_view> texts;
  std::vector<std::vector<Range>> groups;
  std::vector<std::size_t> sizes;  // number of values of each group
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

  // Parses from the '[' to its ']'.
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

  // Uses Slurm's own order: the last bracket's number changes fastest, then the first's, the second's and so on.
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

}  // namespace cohort::rendezvous
