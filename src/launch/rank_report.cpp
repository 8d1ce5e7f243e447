#include "launch/rank_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <string_view>
#include <utility>

namespace cohort::launch {
namespace {

/// Returns the text up to the first zero, with unprintable characters replaced by '?'.
std::string printable(std::string_view letters) {
  std::string text(letters.substr(0, letters.find('\0')));
  for (char& letter : text) letter = std::isprint(static_cast<unsigned char>(letter)) != 0 ? letter : '?';
  return text;
}
template <std::size_t Bytes>
std::string printable(const char (&letters)[Bytes]) {
  return printable(std::string_view(letters, Bytes));
}

std::string kind_name(const status::StatusLayout& page, std::uint64_t what) {
  const auto kind = static_cast<std::size_t>(what & 0xFF);
  if (kind >= status::StatusLayout::kKinds) return "operation";
  const std::string name = printable(page.kinds[kind]);
  return name.empty() ? "operation" : name;
}

std::string describe(const status::StatusLayout& page, const status::LaneStatus& lane) {
  const std::uint64_t what = lane.what.load(std::memory_order_relaxed);
  const std::int64_t count = lane.count.load(std::memory_order_relaxed);
  const std::string name = kind_name(page, what);
  const auto type = static_cast<std::size_t>(what >> 8 & 0xFF);
  const auto op = static_cast<std::size_t>(what >> 16 & 0xFF);
  if (name == "barrier" || name == "join" || type >= kDTypeCount || op >= kReduceOpCount) return name + "()";
  const bool reduces = name.find("reduce") != std::string::npos;
  return fmt::format("{}({}[{}]{}{})", name, to_string(static_cast<DType>(type)), count, reduces ? ", " : "",
                     reduces ? to_string(static_cast<ReduceOp>(op)) : "");
}

template <std::size_t Words>
std::string read_text(const std::array<std::atomic<std::uint64_t>, Words>& from) {
  std::array<char, Words * sizeof(std::uint64_t)> letters{};
  for (std::size_t i = 0; i < Words; ++i) {
    const std::uint64_t word = from[i].load();
    std::memcpy(letters.data() + i * sizeof word, &word, sizeof word);
  }
  return printable(std::string_view(letters.data(), letters.size()));
}

NamedReport read_names(const status::NameStatus& names) {
  NamedReport report;
  report.ended = names.ended.load();
  report.waiting = names.waiting.load() != 0;
  if (report.waiting) report.name = read_text(names.name);
  return report;
}

TimesReport read_times(const status::StatusLayout& page) {
  TimesReport report;
  // A program without steps is measured as a whole.
  const bool steps = page.last.step.load() > page.warm.step.load();
  static const status::TimesStatus kNothing{};
  const status::TimesStatus& from = steps ? page.warm : kNothing;
  const status::TimesStatus& to = steps ? page.last : page.times;
  const auto grown = [&](auto field) {
    const auto before = (from.*field).load();
    const auto after = (to.*field).load();
    decltype(after + before) difference{};  // a rank may have written anything
    return after > before && !__builtin_sub_overflow(after, before, &difference) ? difference : decltype(difference){};
  };
  if (steps) {
    report.steps = grown(&status::TimesStatus::step);
    report.steps_ns = static_cast<std::uint64_t>(grown(&status::TimesStatus::at_ns));
  }
  report.operations = grown(&status::TimesStatus::operations);
  report.bytes = grown(&status::TimesStatus::bytes);
  report.busy_ns = grown(&status::TimesStatus::busy_ns);
  report.waited_ns = grown(&status::TimesStatus::waited_ns);
  report.wire_ns = grown(&status::TimesStatus::wire_ns);
  report.wire_bytes = grown(&status::TimesStatus::wire_bytes);
  report.exposed_ns = grown(&status::TimesStatus::exposed_ns);
  return report;
}

}  // namespace

RankReport read_status(const status::StatusLayout& page) {
  RankReport report;
  report.pid = page.pid.load();
  report.has_page = report.pid != 0;
  report.forming = page.forming.load();
  report.worlds = page.worlds.load();
  report.formed_epoch = std::max<std::int64_t>(page.formed_epoch.load(), -1);
  report.has_state = page.has_state.load() != 0;
  report.step = page.step.load();
  report.samples = page.samples.load();
  report.exposed_ns = page.times.exposed_ns.load();
  if (page.not_finite.state.load(std::memory_order_acquire) == status::NotFiniteStatus::Written) {
    report.not_finite = printable(page.not_finite.what);
    report.not_finite_step = page.not_finite.step;
  }
  report.tells_stacks = (page.abilities.load() & status::StatusLayout::kTellsStacks) != 0;
  report.saves_when_asked = (page.abilities.load() & status::StatusLayout::kSavesWhenAsked) != 0;
  report.preempted_by = page.preempted_by.load();
  const bool left_all = std::all_of(std::begin(page.groups), std::end(page.groups), [](const auto& status) {
    return status.id.load() == 0 || status.background.load() != 0;
  });
  const std::string call = page.call.depth.load() != 0 ? read_text(page.call.name) : std::string();
  for (const status::GroupStatus& status : page.groups) {
    if (status.background.load() != 0) continue;
    GroupReport group;
    group.id = status.id.load();
    // Keeps the last operation of a rank that has left its last world in order to end.
    if (group.id == 0 && !(left_all && status.collectives.begun.load() != 0)) continue;
    group.rank = status.rank.load();
    group.size = status.size.load();
    group.begun = status.collectives.begun.load(std::memory_order_acquire);
    group.ended = status.collectives.ended.load();
    group.waiting = group.id != 0 && status.collectives.waiting.load() != 0 && group.begun != group.ended;
    group.waited_ns = status.collectives.waited_ns.load();
    group.longest_ns = status.collectives.longest_ns.load();
    group.longest_number = status.collectives.longest_number.load();
    if (group.begun != 0) group.operation = describe(page, status.collectives);
    if (!call.empty() && group.begun != group.ended) group.operation += " of " + call;
    if (group.id != 0 && status.messages.waiting.load() != 0) {
      group.message = describe(page, status.messages);
      group.peer = status.messages.peer.load();
      group.message_number = status.messages.begun.load();
    }
    report.groups.push_back(std::move(group));
  }
  report.named = read_names(page.names);
  report.times = read_times(page);
  report.losses = {page.losses.segments.load(), page.losses.timeouts.load(), page.losses.timeouts_ms.load(),
                   read_text(page.losses.host)};
  return report;
}

bool waits(const RankReport& report) {
  return report.named.waiting || std::ranges::any_of(report.groups, [](const GroupReport& group) {
           return group.waiting || !group.message.empty();
         });
}

bool has_left(const RankReport& report) {
  return !report.groups.empty() &&
         std::ranges::all_of(report.groups, [](const GroupReport& group) { return group.id == 0; });
}

CauseReport read_cause(const status::StatusLayout& page) {
  CauseReport report;
  const status::CauseStatus& cause = page.cause;
  const std::uint32_t state = cause.state.load(std::memory_order_acquire);
  const bool silent = page.words_ready.load(std::memory_order_acquire) == 0;
  if (state != status::CauseStatus::OfProcess && !(state == status::CauseStatus::OfWorld && silent)) return report;
  if (cause.code < 0 || cause.code > static_cast<std::int32_t>(ErrorCode::Internal)) return report;
  report.code = cause.code;
  report.rank = cause.rank;
  report.peer = cause.peer;
  report.sequence = cause.sequence;
  report.host = printable(cause.host);
  report.operation = printable(cause.operation);
  return report;
}

std::string last_words(const status::StatusLayout& page) {
  if (page.words_ready.load(std::memory_order_acquire) == 0) return {};
  return {page.words, std::min<std::size_t>(page.words_length, status::StatusLayout::kWordsBytes)};
}

std::string doing(const RankReport& report) {
  if (report.forming < 0) return "waiting to be a member of the job";
  if (report.forming > 0) return fmt::format("forming a world of {}, and waiting for its other ranks", report.forming);
  // (A process that works only with parameter servers forms no world.)
  if (!report.has_page) return "in no world: it has formed none yet (init, init_process_group)";
  if (report.groups.empty()) {
    return report.worlds > 0 ? "in no world of several ranks: it has left those that it had formed"
                             : "in no world of several ranks: it has formed none";
  }
  if (report.named.waiting) {
    return fmt::format("waiting for '{}', by name, after {} others", report.named.name, report.named.ended);
  }
  for (const GroupReport& group : report.groups) {
    if (!group.message.empty()) {
      const std::string whom = group.peer < 0 ? "any rank" : fmt::format("rank {}", group.peer);
      return fmt::format("waiting in {} for {}{}", group.message, whom,
                         report.groups.size() > 1 ? fmt::format(" of a group of {}", group.size) : "");
    }
    if (group.waiting) {
      return fmt::format("waiting in {}, operation {}{}", group.operation, group.begun,
                         report.groups.size() > 1 ? fmt::format(" of a group of {}", group.size) : "");
    }
  }
  // Among several groups, the most used one is the most informative.
  const GroupReport& group =
      *std::ranges::max_element(report.groups, [](const auto& a, const auto& b) { return a.begun < b.begun; });
  if (group.begun == 0) return "before its first collective";
  if (group.id == 0 && group.begun != group.ended) {
    return fmt::format("left the world; its last operation, {}, number {}, failed", group.operation, group.begun);
  }
  if (group.id == 0)
    return fmt::format("left the world; its last operation was {}, number {}", group.operation, group.ended);
  if (group.begun != group.ended) return fmt::format("in {}, operation {}", group.operation, group.begun);
  return fmt::format("outside collectives after {}, operation {}", group.operation, group.ended);
}

std::string at_step(const RankReport& report) {
  return report.step > 0 ? fmt::format(", step {}", report.step) : std::string();
}

std::vector<std::string> folded(const std::vector<std::string>& by_process, const Roles& roles, int without) {
  std::vector<std::pair<std::string_view, std::vector<int>>> lines;
  for (std::size_t i = 0; i < by_process.size(); ++i) {
    const int process = static_cast<int>(i);
    if (process == without) continue;
    const auto same = std::ranges::find_if(lines, [&](const auto& line) { return line.first == by_process[i]; });
    if (same == lines.end()) {
      lines.emplace_back(by_process[i], std::vector<int>{process});
    } else {
      same->second.push_back(process);
    }
  }
  std::vector<std::string> out;
  for (const auto& [text, processes] : lines) out.push_back(fmt::format("{}: {}", roles.names_of(processes), text));
  return out;
}

}  // namespace cohort::launch
