#include "launch/output/live_run.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

namespace cohort::launch {
namespace {

using std::chrono::seconds;

double between(Figures::Clock::time_point begin, Figures::Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

/// Returns the growth of a counter; if a rank has written a smaller value, 0.
template <class Number>
double grown(Number from, Number to) {
  return to > from ? static_cast<double>(to) - static_cast<double>(from) : 0;
}

std::uint64_t waiting_in(const RankReport& report) {
  for (const GroupReport& group : report.groups) {
    if (!group.message.empty()) return group.message_number;
    if (group.waiting) return group.begun;
  }
  return report.named.ended;
}

std::string state_of(const RankReport& report) {
  if (report.state == 'T' || report.state == 't') return "stopped";
  if (report.preempted_by != 0) return "saving";
  return waits(report) || report.forming == status::StatusLayout::kToBeMember ? "waiting" : "running";
}

double share(double part, double whole) { return whole > 0 ? std::clamp(part / whole, 0.0, 1.0) : 0; }

}  // namespace

void Figures::add_waits(Rank& rank, const RankReport& report, Clock::time_point now) {
  Waits waits{now, 0, report.exposed_ns, report.cpu_ms};
  for (const GroupReport& group : report.groups) waits.waited_ns += group.waited_ns;
  // The sums shrink when a group has been left, since its times go with it, and when a program has begun anew.
  if (!rank.waits.empty() &&
      (waits.waited_ns < rank.waits.back().waited_ns || waits.exposed_ns < rank.waits.back().exposed_ns ||
       waits.cpu_ms < rank.waits.back().cpu_ms))
    rank.waits.clear();
  const std::size_t count = rank.waits.size();
  if (count >= 2 && rank.waits[count - 1].at - rank.waits[count - 2].at < seconds(1)) rank.waits.pop_back();
  rank.waits.push_back(waits);
  while (rank.waits.size() > 2 && now - rank.waits[1].at >= kWindow) rank.waits.pop_front();
}

void Figures::add_steps(Rank& rank, const RankReport& report, Clock::time_point now) {
  const Steps steps{now, report.step, report.samples};
  if (!rank.steps.empty()) {
    if (report.step == rank.steps.back().step) return;
    if (report.step < rank.steps.back().step) rank.steps.clear();
  }
  const std::size_t count = rank.steps.size();
  if (count >= 2 && rank.steps[count - 1].at - rank.steps[count - 2].at < seconds(1)) rank.steps.pop_back();
  rank.steps.push_back(steps);
  while (rank.steps.size() > 2 && now - rank.steps[1].at >= kWindow) rank.steps.pop_front();
}

void Figures::report(const RankReport& report, Clock::time_point now) {
  if (report.rank < 0 || static_cast<std::size_t>(report.rank) >= ranks_.size()) return;
  Rank& rank = ranks_[static_cast<std::size_t>(report.rank)];
  if (rank.gone) return;
  rank.known = true;
  rank.figures.state = state_of(report);
  rank.figures.doing = doing(report);
  rank.figures.step = std::max<std::int64_t>(report.step, 0);
  rank.figures.samples = std::max<std::int64_t>(report.samples, 0);
  rank.figures.memory = report.memory;
  if (!waits(report)) {
    rank.since.reset();
  } else if (!rank.since || rank.operation != waiting_in(report)) {
    rank.since = now;
    rank.operation = waiting_in(report);
  }
  add_waits(rank, report, now);
  add_steps(rank, report, now);
}

void Figures::begins_anew(int number) {
  if (number >= 0 && static_cast<std::size_t>(number) < ranks_.size()) ranks_[static_cast<std::size_t>(number)] = {};
}

void Figures::ended(int number, bool well, std::string how) {
  if (number < 0 || static_cast<std::size_t>(number) >= ranks_.size()) return;
  Rank& rank = ranks_[static_cast<std::size_t>(number)];
  rank.gone = true;
  rank.figures.state = well ? "ended" : "failed";
  rank.figures.doing = std::move(how);
}

std::vector<RankFigures> Figures::look(Clock::time_point now) const {
  std::vector<RankFigures> all;
  std::vector<double> waited;  // only of ranks that run
  all.reserve(ranks_.size());
  for (const Rank& rank : ranks_) {
    RankFigures& figures = all.emplace_back(rank.figures);
    if (!rank.known || rank.gone || all.size() > workers_) continue;
    // The current wait is not in any sum yet.
    const double open = rank.since ? between(std::max(*rank.since, rank.waits.front().at), now) : 0;
    const double time = between(rank.waits.front().at, now);
    const double closed = grown(rank.waits.front().waited_ns, rank.waits.back().waited_ns) * 1e-9;
    const double exposed = grown(rank.waits.front().exposed_ns, rank.waits.back().exposed_ns) * 1e-9;
    figures.waited = share(closed + open, time);
    figures.exposed = std::max(share(exposed, time), share(open, time));
    if (time > 0) figures.cpu = grown(rank.waits.front().cpu_ms, rank.waits.back().cpu_ms) * 1e-3 / time;
    waited.push_back(figures.waited);
    const Steps& first = rank.steps.front();
    const Steps& last = rank.steps.back();
    const double took = between(first.at, last.at);
    const double steps = grown(first.step, last.step);
    // No step has come for much longer than a step takes: the rank has halted.
    if (took <= 0 || between(last.at, now) > std::max(5.0, 3 * took / std::max(steps, 1.0))) continue;
    figures.steps_per_second = steps / took;
    figures.samples_per_second = grown(first.samples, last.samples) / took;
  }
  if (waited.size() < 2) return all;
  const auto middle = waited.begin() + static_cast<std::ptrdiff_t>(waited.size() / 2);
  std::nth_element(waited.begin(), middle, waited.end());
  for (std::size_t i = 0; i < workers_; ++i) {
    if (ranks_[i].known && !ranks_[i].gone) all[i].waited_for = std::max(0.0, *middle - all[i].waited);
  }
  return all;
}

namespace {

using Json = nlohmann::ordered_json;

/// Visits the named fields in their order.
template <class T, class Act>
void visit_fields(T& it, const Act& act) {
  using Of = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Of, LiveHost>) {
    act("name", it.name), act("first_rank", it.first_rank), act("ranks", it.ranks);
    act("gpus", it.gpus), act("gpu", it.gpu), act("gpu_memory", it.gpu_memory);
  } else if constexpr (std::is_same_v<Of, LiveNotice>) {
    act("time", it.time), act("text", it.text);
  } else if constexpr (std::is_same_v<Of, LiveMembers>) {
    act("epoch", it.epoch), act("size", it.size), act("workers", it.workers);
    act("cause", it.cause), act("since", it.since), act("form_ms", it.form_ms);
  } else if constexpr (std::is_same_v<Of, LiveOther>) {
    act("name", it.name), act("host", it.host), act("state", it.state);
    act("memory", it.memory), act("line", it.line), act("restarts", it.restarts);
  } else {
    act("time", it.time), act("job", it.job), act("program", it.program), act("state", it.state);
    act("start", it.start), act("restarts", it.restarts), act("logs", it.logs);
  }
}

/// Visits the columns of a rank's row after its number, in their order, with the format of each.
template <class Rank, class Act>
void visit_columns(Rank& rank, const Act& act) {
  auto& f = rank.figures;
  act("state", f.state, ""), act("step", f.step, ",{}"), act("steps_per_second", f.steps_per_second, ",{:.4g}");
  act("samples", f.samples, ",{}"), act("samples_per_second", f.samples_per_second, ",{:.5g}");
  act("exposed", f.exposed, ",{:.3f}"), act("waited", f.waited, ",{:.3f}"), act("waited_for", f.waited_for, ",{:.3f}");
  act("memory", f.memory, ",{}"), act("cpu", f.cpu, ",{:.2f}"), act("line", rank.line, ""), act("doing", f.doing, "");
}

std::string json_quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Writes a row for each rank by hand, since a JSON tree for thousands of ranks would be slow.
void add_row(std::string& out, int number, const LiveRank& rank) {
  fmt::format_to(std::back_inserter(out), "{}[{}", out.back() == '[' ? "\n" : ",\n", number);
  visit_columns(rank, [&out](const char*, const auto& value, const char* form) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::string>)
      out.append(",").append(json_quoted(value));
    else
      fmt::format_to(std::back_inserter(out), fmt::runtime(form), value);
  });
  out += ']';
}

template <class T>
Json object_of(const T& it) {
  Json out = Json::object();
  visit_fields(it, [&out](const char* name, const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, double>)
      out[name] = std::round(value * 1e3) / 1e3;
    else
      out[name] = value;
  });
  return out;
}

template <class T>
Json list_of(const std::vector<T>& all) {
  Json out = Json::array();
  for (const T& one : all) out.push_back(object_of(one));
  return out;
}

template <class T>
T number_of(const Json& value) {
  if (!value.is_number()) return T();
  if constexpr (std::is_floating_point_v<T>) {
    const double number = value.get<double>();
    return std::isfinite(number) ? number : 0;
  } else {
    // (Casting a value that does not fit is undefined.)
    if (value.is_number_float()) return T();
    if (value.is_number_unsigned())
      return static_cast<T>(std::min<std::uint64_t>(value.get<std::uint64_t>(), std::numeric_limits<T>::max()));
    return static_cast<T>(std::clamp<std::int64_t>(
        value.get<std::int64_t>(), std::is_signed_v<T> ? static_cast<std::int64_t>(std::numeric_limits<T>::min()) : 0,
        std::numeric_limits<std::int64_t>::max()));
  }
}

template <class T>
void take(const Json& value, T& to) {
  if constexpr (std::is_same_v<T, std::string>) {
    if (value.is_string()) to = value.get<std::string>();
  } else {
    to = number_of<T>(value);
  }
}

template <class T>
void read(const Json& from, const char* name, T& to) {
  if (const auto found = from.find(name); found != from.end()) take(*found, to);
}

const Json& list(const Json& from, const char* name) {
  static const Json kNone = Json::array();
  const auto found = from.find(name);
  return found != from.end() && found->is_array() ? *found : kNone;
}

template <class T>
void read_list(const Json& from, const char* name, std::vector<T>& to) {
  for (const Json& object : list(from, name)) {
    if (!object.is_object()) continue;
    visit_fields(to.emplace_back(), [&object](const char* field, auto& value) { read(object, field, value); });
  }
}

/// Reads a row; columns that this build does not know may be between those that it knows.
LiveRank rank_of(const Json& row, const std::map<std::string, std::size_t>& places) {
  LiveRank rank;
  visit_columns(rank, [&](const char* name, auto& to, const char*) {
    const auto place = places.find(name);
    if (place != places.end() && place->second < row.size()) take(row[place->second], to);
  });
  return rank;
}

}  // namespace

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string to_json(const LiveRun& run) {
  Json head = {{"schema", 1}};
  head.update(object_of(run));
  if (run.exit_status) head["exit_status"] = *run.exit_status;
  if (!run.reason.empty()) head["reason"] = run.reason;
  head["world_size"] = run.ranks.size();
  head["hosts"] = list_of(run.hosts);
  head["notices"] = list_of(run.notices);
  if (!run.others.empty()) head["others"] = list_of(run.others);
  if (run.members) head["members"] = object_of(*run.members);
  head["columns"] = {"rank"};
  const LiveRank any;
  visit_columns(any, [&head](const char* name, const auto&, const char*) { head["columns"].push_back(name); });
  std::string out = head.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  out.back() = ',';
  out += "\"ranks\":[";
  out.reserve(out.size() + run.ranks.size() * 256);
  int number = run.first_rank;
  for (const LiveRank& rank : run.ranks) add_row(out, number++, rank);
  return out += "]}\n";
}

void describe_gpus(const std::vector<GpuUse>& gpus, LiveHost& host) {
  double percents = 0;
  int told = 0;
  for (const GpuUse& one : gpus) {
    if (one.percent >= 0) {
      percents += static_cast<double>(one.percent);
      ++told;
    }
    if (one.memory >= 0) host.gpu_memory = std::max<std::int64_t>(host.gpu_memory, 0) + one.memory;
  }
  host.gpus = static_cast<int>(gpus.size());
  if (told > 0) host.gpu = percents * 0.01 / told;
}

std::string usage_line(const LiveRun& run, const std::map<std::string, std::vector<GpuUse>>& gpus) {
  std::int64_t step = 0;
  Json values = Json::object();
  for (const LiveHost& host : run.hosts) {
    const std::string name = run.hosts.size() > 1 ? host.name + "/" : "";
    double cpu = 0, memory = 0;
    for (std::size_t i = 0; i < run.ranks.size(); ++i) {
      const int rank = static_cast<int>(i);
      if (rank < host.first_rank || rank - host.first_rank >= host.ranks) continue;
      cpu += run.ranks[i].figures.cpu;
      memory += static_cast<double>(run.ranks[i].figures.memory);
      step = std::max(step, run.ranks[i].figures.step);
    }
    values["system/" + name + "cpu"] = std::round(cpu * 100) / 100;
    values["system/" + name + "memory"] = memory;
    const auto found = gpus.find(host.name);
    for (std::size_t i = 0; found != gpus.end() && i < found->second.size(); ++i) {
      const GpuUse& use = found->second[i];
      if (use.percent >= 0) values[fmt::format("system/{}gpu{}", name, i)] = static_cast<double>(use.percent) * 0.01;
      if (use.memory >= 0) values[fmt::format("system/{}gpu{}_memory", name, i)] = use.memory;
    }
  }
  const Json line = {
      {"event", "metric"}, {"time", std::round(run.time * 1e3) / 1e3}, {"step", step}, {"values", std::move(values)}};
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

Result<LiveRun> parse_live_run(std::string_view text) {
  // Refuses deep nesting before it overflows the stack.
  const auto shallow = [](int depth, nlohmann::json::parse_event_t, Json&) { return depth <= 4; };
  const Json json = Json::parse(text, shallow, false);
  if (!json.is_object()) return fail(ErrorCode::Corrupt, "it is no JSON object");
  int schema = 0;
  read(json, "schema", schema);
  if (schema != 1) return fail(ErrorCode::Corrupt, "its schema is {}, and 1 is known here", schema);
  LiveRun run;
  visit_fields(run, [&json](const char* name, auto& value) { read(json, name, value); });
  read(json, "reason", run.reason);
  if (json.contains("exit_status")) read(json, "exit_status", run.exit_status.emplace());
  read_list(json, "hosts", run.hosts);
  read_list(json, "notices", run.notices);
  read_list(json, "others", run.others);
  if (const auto members = json.find("members"); members != json.end() && members->is_object()) {
    visit_fields(run.members.emplace(), [&members](const char* name, auto& value) { read(*members, name, value); });
  }
  std::map<std::string, std::size_t> places;
  const Json& names = list(json, "columns");
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].is_string()) places[names[i].get<std::string>()] = i;
  }
  for (const Json& row : list(json, "ranks")) {
    if (row.is_array()) run.ranks.push_back(rank_of(row, places));
  }
  return run;
}

namespace {

using Clock = std::chrono::steady_clock;

/// Pause between writes; longer if a write takes long, so that writing takes a small part of the time.
constexpr std::chrono::milliseconds kPause{250};
constexpr int kPauseShare = 20;
/// Interval at which unchanged contents are written, too: the file's time shows readers that the launcher lives.
constexpr double kPulseSeconds = 2;

}  // namespace

LiveFile::~LiveFile() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void LiveFile::write(LiveRun run) {
  due_.store(false, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    next_ = std::move(run);
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  }
  changed_.notify_all();
}

std::optional<std::string> LiveFile::complaint() {
  const std::lock_guard lock(mutex_);
  if (!complaint_ || std::exchange(complained_, true)) return std::nullopt;
  return complaint_;
}

void LiveFile::work() {
  std::string written;
  double written_at = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || next_; });
    if (!next_) return;
    LiveRun run = *std::exchange(next_, std::nullopt);
    lock.unlock();
    const auto begin = Clock::now();
    const double time = std::exchange(run.time, 0);
    std::string text = to_json(run);
    std::optional<std::string> failed;
    if (text != written || time - written_at >= kPulseSeconds || time < written_at) {
      run.time = time;
      if (const auto done = replace_file(folder_, kLiveFile, to_json(run)); !done) failed = done.error().what();
      written = std::move(text);
      written_at = time;
    }
    const auto pause = std::max<Clock::duration>(kPause, kPauseShare * (Clock::now() - begin));
    lock.lock();
    if (failed && !complaint_) complaint_ = std::move(failed);
    changed_.wait_for(lock, pause, [this] { return closing_; });
    due_.store(true, std::memory_order_relaxed);
  }
}

}  // namespace cohort::launch
