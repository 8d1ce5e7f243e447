#include "telemetry/trace_writer.h"

#include "base/json.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <iterator>

namespace cohort::status {
namespace {

/// Most lanes of one kind for overlapping events of a rank; more would be unreadable.
constexpr std::uint16_t kMostLanes = 16;
constexpr std::uint16_t kMostThreads = 40;

std::uint64_t order_of(TraceTrack kind) {
  switch (kind) {
    case TraceTrack::Process:
    case TraceTrack::Steps: return 0;
    case TraceTrack::Thread: return 1;
    case TraceTrack::Buckets: return 2;
    case TraceTrack::Operations: return 3;
    case TraceTrack::Named: return 4;
    case TraceTrack::Checkpoints: return 5;
  }
  return 6;
}

std::int64_t since(std::int64_t base_ns, std::int64_t at_ns) {
  return at_ns > base_ns
             ? static_cast<std::int64_t>(static_cast<std::uint64_t>(at_ns) - static_cast<std::uint64_t>(base_ns))
             : 0;
}

/// Nanoseconds as microseconds, exactly.
std::string microseconds(std::int64_t ns) {
  const std::int64_t positive = std::max<std::int64_t>(ns, 0);
  return fmt::format("{}.{:03}", positive / 1000, positive % 1000);
}

std::string quoted(std::string_view text) { return json_text(nlohmann::json(std::string(text))); }

/// Returns the flow of a collective, the same on all ranks; 0 if unknown.
std::uint64_t flow_of(std::uint32_t group, std::uint64_t sequence) noexcept {
  if (group == 0 || sequence == 0) return 0;
  std::uint64_t mixed = (std::uint64_t{group} << 32) + sequence * 0x9e3779b97f4a7c15ULL;
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ULL;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebULL;
  return mixed ^ mixed >> 31;
}

/// Collects `"name":value` of arguments that have a value.
struct Arguments {
  std::string& text;
  void operator()(const char* name, std::uint64_t value) const {
    if (value != 0) add(name, value);
  }
  void operator()(const char* name, const std::optional<std::int64_t>& value) const {
    if (value) add(name, *value);
  }
  template <class Value>
  void add(const char* name, Value value) const {
    fmt::format_to(std::back_inserter(text), "{}\"{}\":{}", text.empty() ? "" : ",", name, value);
  }
};

void append_metadata(std::string& trace, const char* what, std::uint64_t pid, std::uint64_t tid,
                     const std::string& arguments) {
  fmt::format_to(std::back_inserter(trace), ",\n{{\"ph\":\"M\",\"name\":\"{}\",\"pid\":{},\"tid\":{},\"args\":{{{}}}}}",
                 what, pid, tid, arguments);
}

}  // namespace

std::string_view category_of(TraceTrack kind) noexcept {
  switch (kind) {
    case TraceTrack::Steps: return "step";
    case TraceTrack::Buckets: return "bucket";
    case TraceTrack::Checkpoints: return "checkpoint";
    case TraceTrack::Operations: return "communication";
    case TraceTrack::Named: return "named";
    default: return "program";
  }
}

void append_event(std::string& trace, const TraceEvent& event) {
  const auto out = std::back_inserter(trace);
  const std::int64_t begun_ns = std::max<std::int64_t>(event.begun_ns, 0);  // not before the trace's base
  fmt::format_to(out, ",\n{{\"ph\":\"{}\",\"name\":{},\"pid\":{},\"tid\":{},\"ts\":{}", event.moment ? 'i' : 'X',
                 quoted(event.name), event.pid, event.tid, microseconds(begun_ns));
  if (event.moment)
    trace += R"(,"s":"t")";
  else
    fmt::format_to(out, ",\"dur\":{}", microseconds(event.ended_ns - begun_ns));
  if (!event.category.empty()) fmt::format_to(out, ",\"cat\":{}", quoted(event.category));
  if (event.flow != 0) {
    fmt::format_to(out, ",\"bind_id\":\"{:#x}\",\"flow_out\":true{}", event.flow,
                   event.begins_flow ? "" : R"(,"flow_in":true)");
  }
  std::string arguments;
  visit_arguments(event, Arguments{arguments});
  if (!event.error.empty())
    fmt::format_to(std::back_inserter(arguments), "{}\"error\":{}", arguments.empty() ? "" : ",", quoted(event.error));
  if (!arguments.empty()) fmt::format_to(out, ",\"args\":{{{}}}", arguments);
  trace += '}';
}

void append_counter(std::string& trace, std::uint64_t pid, std::string_view name, std::int64_t at_ns,
                    std::int64_t value) {
  fmt::format_to(std::back_inserter(trace),
                 ",\n{{\"ph\":\"C\",\"name\":{0},\"pid\":{1},\"ts\":{2},\"args\":{{{0}:{3}}}}}", quoted(name), pid,
                 microseconds(at_ns), value);
}

void append_process(std::string& trace, std::uint64_t pid, std::string_view name) {
  append_metadata(trace, "process_name", pid, 0, "\"name\":" + quoted(name));
  append_metadata(trace, "process_sort_index", pid, 0, fmt::format("\"sort_index\":{}", pid));
}

void append_row(std::string& trace, std::uint64_t pid, std::uint64_t tid, std::string_view name, std::uint64_t order) {
  append_metadata(trace, "thread_name", pid, tid, "\"name\":" + quoted(name));
  append_metadata(trace, "thread_sort_index", pid, tid, fmt::format("\"sort_index\":{}", order));
}

std::string begin_list(std::string_view events) {
  return "[" + std::string(events.substr(std::min<std::size_t>(events.size(), 1)));
}

std::int64_t RankTrace::time_of(std::int64_t at_ns) const noexcept { return since(options_.base_ns, at_ns); }

RankTrace::Row& RankTrace::row(std::string& trace, TraceTrack kind, std::uint16_t lane, std::string_view title) {
  const std::string restart = options_.epoch == 0 ? "" : fmt::format(", restart {}", options_.epoch);
  if (rows_.empty())
    append_process(trace, options_.rank,
                   fmt::format("rank {} ({}, pid {}{})", options_.rank, options_.host, options_.pid, restart));
  const auto [found, is_new] = rows_.try_emplace({kind, lane});
  Row& row = found->second;
  if (!is_new) return row;
  row.tid = TrackId{options_.rank, options_.epoch, kind, lane}.tid();
  const bool bare = lane == 0 || kind == TraceTrack::Thread;
  const std::string number = bare ? "" : fmt::format(" {}", lane + 1);
  append_row(trace, options_.rank, row.tid, fmt::format("{}{}{}", title, number, restart),
             std::uint64_t{options_.epoch} << 16 | order_of(kind) << 12 | lane);
  return row;
}

// Chooses an event's row. Slices of one row must be nested or disjoint; sets `free` to whether the event's slice is.
RankTrace::Row& RankTrace::place(std::string& trace, const TimelineEntry& entry, bool& free) {
  free = true;
  TraceTrack kind = TraceTrack::Operations;
  std::string_view title = "communication";
  switch (entry.kind) {
    case TimelineKind::Step: return row(trace, TraceTrack::Steps, 0, "steps");
    case TimelineKind::Wait:
    case TimelineKind::Span: {
      const auto [thread, is_new] = threads_.try_emplace(entry.lane, static_cast<std::uint16_t>(threads_.size()));
      const bool main = entry.lane == static_cast<std::uint32_t>(options_.pid);
      const auto lane = std::min<std::uint16_t>(thread->second, kMostThreads);
      return row(trace, TraceTrack::Thread, lane, main ? "program" : fmt::format("thread {}", entry.lane));
    }
    case TimelineKind::Bucket:
      kind = TraceTrack::Buckets;
      title = "buckets";
      break;
    case TimelineKind::Checkpoint:
      kind = TraceTrack::Checkpoints;
      title = "checkpoints";
      break;
    case TimelineKind::Named:
      kind = TraceTrack::Named;
      title = "named operations";
      break;
    case TimelineKind::Operation: break;
  }
  for (std::uint16_t lane = 0;; ++lane) {
    Row& found = row(trace, kind, lane, title);
    free = entry.begun_ns >= found.ended_ns;
    if (free || lane + 1 == kMostLanes) return found;
  }
}

void RankTrace::append(std::string& trace, const TimelineEntry& entry, std::string_view name) {
  bool free = true;
  Row& to = place(trace, entry, free);
  TraceEvent event{options_.rank, to.tid, name.empty() ? "(no room for its name)" : name};
  event.category = category_of(TrackId::of(event.pid, event.tid).kind);
  // An event without a free lane becomes a moment.
  event.moment = !free || (entry.ended_ns <= entry.begun_ns && entry.kind != TimelineKind::Span);
  event.ended_ns = time_of(entry.ended_ns);
  event.begun_ns = event.moment ? event.ended_ns : std::min(time_of(entry.begun_ns), event.ended_ns);
  event.bytes = entry.bytes;
  event.waited_ns = entry.waited_ns;
  event.wire_bytes = entry.wire_bytes;
  event.wire_us = entry.wire_us;
  event.failed = entry.failed ? 1 : 0;
  if (entry.kind == TimelineKind::Operation)
    event.flow = flow_of(entry.lane, entry.number);
  else
    event.number = entry.number;
  append_event(trace, event);
  if (!event.moment) to.ended_ns = std::max(to.ended_ns, entry.ended_ns);
}

void RankTrace::append_lost(std::string& trace, std::int64_t at_ns, std::uint64_t events) {
  TraceEvent event{options_.rank, row(trace, TraceTrack::Steps, 0, "steps").tid, "events are missing before this"};
  event.begun_ns = event.ended_ns = time_of(at_ns);
  event.moment = true;
  event.lost = events;
  append_event(trace, event);
}

void HostTrace::append_description(std::string& trace) const { append_process(trace, pid(), "clock of " + name); }

void HostTrace::append_offset(std::string& trace, std::int64_t base_ns, std::int64_t host_ns, std::int64_t offset_ns,
                              std::int64_t uncertainty_ns) const {
  TraceEvent event{pid(), 0, "clock measured"};
  event.begun_ns = event.ended_ns = since(base_ns, host_ns);
  event.moment = true;
  event.host_ns = host_ns;
  event.offset_ns = offset_ns;
  event.uncertainty_ns = uncertainty_ns;
  append_event(trace, event);
}

void HostTrace::append_clocks(std::string& trace, std::int64_t base_ns, std::int64_t monotonic_ns,
                              std::int64_t realtime_ns) const {
  TraceEvent event{pid(), 0, "clocks"};
  event.begun_ns = event.ended_ns = since(base_ns, monotonic_ns);
  event.moment = true;
  event.host_ns = monotonic_ns;
  event.realtime_ns = realtime_ns;
  append_event(trace, event);
}

}  // namespace cohort::status
