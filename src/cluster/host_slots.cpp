// Hosts with slots: lists, host files, pairs.
#include "base/parse.h"
#include "cluster/host_list.h"
#include "cluster/host_text.h"

#include <algorithm>
#include <map>

namespace cohort::cluster {
namespace {

constexpr std::string_view kBlank = " \t\r";

// Hosts in the order of their first mention, the slots of one added up.
class Hosts {
 public:
  /// What is wrong, or nothing.
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

// "h", "h:4", "[fe80::1]:4", "n[01-16]:8". A name with ranges is several hosts.
struct Entry {
  std::vector<std::string> hosts;
  std::optional<int> slots;
};
Result<Entry> parse_entry(const NamedText& named, std::size_t begin, std::size_t end) {
  const std::string_view entry = named.text.substr(begin, end - begin);
  Entry result;
  std::string_view host = entry;
  std::string_view rest;
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
    if (const std::string_view fault = fault_of_host(host); !fault.empty()) return text_error(named, begin, fault);
    result.hosts.emplace_back(host);
    return result;
  }
  auto hosts = parse_slurm_hosts(host);
  if (!hosts) return tl::unexpected(hosts.error());
  result.hosts = *std::move(hosts);
  return result;
}

// The end of the entry that begins here: a comma outside of brackets, or the end of the text.
std::size_t entry_end(std::string_view text, std::size_t at) {
  bool within = false;
  for (; at < text.size(); ++at) {
    if (text[at] == '[') within = true;
    if (text[at] == ']') within = false;
    if (text[at] == ',' && !within) break;
  }
  return at;
}

// One line of a host file, without its comment.
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

  // "slots=4"; Open MPI takes blanks around the '='.
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

}  // namespace cohort::cluster
