#include "launch/record/live_run.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <iterator>
#include <utility>

namespace cohort::launch {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<const char*, 12> kColumns = {
    "rank",    "state",  "step",       "steps_per_second", "samples", "samples_per_second",
    "exposed", "waited", "waited_for", "memory",           "line",    "doing"};

std::string json_quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// A row of its own for each rank, by hand: thousands of them would be a slow tree.
void add_row(std::string& out, int number, const LiveRank& rank) {
  const RankFigures& f = rank.figures;
  fmt::format_to(std::back_inserter(out), "{}[{},{},{},{:.4g},{},{:.5g},{:.3f},{:.3f},{:.3f},{},{},{}]",
                 out.back() == '[' ? "\n" : ",\n", number, json_quoted(f.state), f.step, f.steps_per_second, f.samples,
                 f.samples_per_second, f.exposed, f.waited, f.waited_for, f.memory, json_quoted(rank.line),
                 json_quoted(f.doing));
}

template <class T>
T number_of(const Json& value) {
  if (!value.is_number()) return T();
  if constexpr (std::is_floating_point_v<T>) {
    const double number = value.get<double>();
    return std::isfinite(number) ? number : 0;
  } else {
    // (A cast of what does not fit is undefined.)
    if (value.is_number_float()) return T();
    if (value.is_number_unsigned())
      return static_cast<T>(std::min<std::uint64_t>(value.get<std::uint64_t>(), std::numeric_limits<T>::max()));
    return static_cast<T>(std::clamp<std::int64_t>(
        value.get<std::int64_t>(), std::is_signed_v<T> ? static_cast<std::int64_t>(std::numeric_limits<T>::min()) : 0,
        std::numeric_limits<std::int64_t>::max()));
  }
}

template <class T>
void read(const Json& from, const char* name, T& to) {
  const auto found = from.find(name);
  if (found == from.end()) return;
  if constexpr (std::is_same_v<T, std::string>) {
    if (found->is_string()) to = found->template get<std::string>();
  } else {
    to = number_of<T>(*found);
  }
}

const Json& list(const Json& from, const char* name) {
  static const Json kNone = Json::array();
  const auto found = from.find(name);
  return found != from.end() && found->is_array() ? *found : kNone;
}

/// Where the columns are that this build knows; others may come between them.
std::array<std::size_t, kColumns.size()> places_of(const Json& names) {
  std::array<std::size_t, kColumns.size()> places;
  places.fill(std::string::npos);
  for (std::size_t i = 0; i < names.size(); ++i) {
    for (std::size_t known = 0; known < kColumns.size(); ++known) {
      if (names[i] == kColumns[known]) places[known] = i;
    }
  }
  return places;
}

LiveRank rank_of(const Json& row, const std::array<std::size_t, kColumns.size()>& places) {
  LiveRank rank;
  RankFigures& f = rank.figures;
  const auto take = [&](std::size_t column, auto& to) {
    if (places[column] >= row.size()) return;
    const Json& value = row[places[column]];
    if constexpr (std::is_same_v<std::decay_t<decltype(to)>, std::string>) {
      if (value.is_string()) to = value.get<std::string>();
    } else {
      to = number_of<std::decay_t<decltype(to)>>(value);
    }
  };
  take(1, f.state);
  take(2, f.step);
  take(3, f.steps_per_second);
  take(4, f.samples);
  take(5, f.samples_per_second);
  take(6, f.exposed);
  take(7, f.waited);
  take(8, f.waited_for);
  take(9, f.memory);
  take(10, rank.line);
  take(11, f.doing);
  return rank;
}

}  // namespace

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string to_json(const LiveRun& run) {
  Json head = {{"schema", 1},
               {"time", std::round(run.time * 1e3) / 1e3},
               {"job", run.job},
               {"program", run.program},
               {"state", run.state},
               {"start", std::round(run.start * 1e3) / 1e3},
               {"restarts", run.restarts},
               {"logs", run.logs}};
  if (run.exit_status) head["exit_status"] = *run.exit_status;
  if (!run.reason.empty()) head["reason"] = run.reason;
  head["world_size"] = run.ranks.size();
  head["hosts"] = Json::array();
  for (const LiveHost& host : run.hosts)
    head["hosts"].push_back({{"name", host.name}, {"first_rank", host.first_rank}, {"ranks", host.ranks}});
  head["notices"] = Json::array();
  for (const LiveNotice& notice : run.notices)
    head["notices"].push_back({{"time", std::round(notice.time * 1e3) / 1e3}, {"text", notice.text}});
  if (!run.others.empty()) head["others"] = Json::array();
  for (const LiveOther& other : run.others) {
    head["others"].push_back({{"name", other.name},
                              {"host", other.host},
                              {"state", other.state},
                              {"memory", other.memory},
                              {"line", other.line},
                              {"restarts", other.restarts}});
  }
  head["columns"] = kColumns;
  std::string out = head.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  out.back() = ',';
  out += "\"ranks\":[";
  out.reserve(out.size() + run.ranks.size() * 256);
  int number = run.first_rank;
  for (const LiveRank& rank : run.ranks) add_row(out, number++, rank);
  return out += "]}\n";
}

Result<LiveRun> parse_live_run(std::string_view text) {
  // Deep nesting is refused before it takes the stack.
  const auto shallow = [](int depth, nlohmann::json::parse_event_t, Json&) { return depth <= 4; };
  const Json json = Json::parse(text, shallow, false);
  if (!json.is_object()) return fail(ErrorCode::Corrupt, "it is no JSON object");
  int schema = 0;
  read(json, "schema", schema);
  if (schema != 1) return fail(ErrorCode::Corrupt, "its schema is {}, and 1 is known here", schema);
  LiveRun run;
  read(json, "time", run.time);
  read(json, "job", run.job);
  read(json, "program", run.program);
  read(json, "state", run.state);
  read(json, "start", run.start);
  read(json, "restarts", run.restarts);
  read(json, "logs", run.logs);
  read(json, "reason", run.reason);
  if (json.contains("exit_status")) read(json, "exit_status", run.exit_status.emplace());
  for (const Json& host : list(json, "hosts")) {
    if (!host.is_object()) continue;
    LiveHost& one = run.hosts.emplace_back();
    read(host, "name", one.name);
    read(host, "first_rank", one.first_rank);
    read(host, "ranks", one.ranks);
  }
  for (const Json& notice : list(json, "notices")) {
    if (!notice.is_object()) continue;
    LiveNotice& one = run.notices.emplace_back();
    read(notice, "time", one.time);
    read(notice, "text", one.text);
  }
  for (const Json& other : list(json, "others")) {
    if (!other.is_object()) continue;
    LiveOther& one = run.others.emplace_back();
    read(other, "name", one.name);
    read(other, "host", one.host);
    read(other, "state", one.state);
    read(other, "memory", one.memory);
    read(other, "line", one.line);
    read(other, "restarts", one.restarts);
  }
  const auto places = places_of(list(json, "columns"));
  for (const Json& row : list(json, "ranks")) {
    if (row.is_array()) run.ranks.push_back(rank_of(row, places));
  }
  return run;
}

}  // namespace cohort::launch
