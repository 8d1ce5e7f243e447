#include "observe/trace/merge.h"

#include "base/files.h"
#include "base/json.h"
#include "base/result.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <string_view>

namespace cohort::track {
namespace {

using Json = nlohmann::json;
using Row = ChromeTrace::Row;

/// Latest valid times, in the year 2096, in microseconds and in nanoseconds.
constexpr double kLastMicrosecond = 4e15;
constexpr double kLastNanosecond = 4e18;

std::string text_of(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  return value.is_number_integer() ? std::to_string(value.get<std::int64_t>()) : std::string();
}

std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? std::string() : text_of(*found);
}

std::optional<double> number_at(const Json& object, const char* key) {
  const auto number = number_in(object, key);
  return number && std::abs(*number) < kLastMicrosecond ? number : std::nullopt;
}

/// Horovod leaves the list of events open, and so does a program that is killed while it writes the list.
Json parse(std::string_view text) {
  Json whole = parse_json_or_discard<Json>(text);
  if (!whole.is_discarded()) return whole;
  const auto last = text.find_last_of('}');
  const auto first = text.find_first_not_of(" \t\r\n");
  if (last == std::string_view::npos || first == std::string_view::npos || text[first] != '[') return whole;
  return parse_json_or_discard<Json>(std::string(text.substr(0, last + 1)) + "]");
}

class EventReader {
 public:
  explicit EventReader(ChromeTrace& trace) : trace_(trace) {}

  /// Time of day, in nanoseconds, of the file's microsecond 0.
  std::optional<double> base_ns;

  void take(const Json& event) {
    if (!event.is_object()) return;
    const std::string phase = text_at(event, "ph");
    const Row row{text_at(event, "pid"), text_at(event, "tid")};
    const auto time = number_at(event, "ts");
    if (phase == "M") return take_metadata(event, row);
    if (phase == "X" && time) {
      const double duration = std::max(number_at(event, "dur").value_or(0), 0.0);
      return add(row, *time, *time + duration, text_at(event, "name"));
    }
    if (phase == "B" && time) {
      open_[row].emplace_back(*time, text_at(event, "name"));
    } else if (phase == "E" && time && !open_[row].empty()) {
      const auto [begun, name] = open_[row].back();
      open_[row].pop_back();
      add(row, begun, *time, name);
    }
  }

 private:
  void take_metadata(const Json& event, const Row& row) {
    const auto args = event.find("args");
    if (args == event.end() || !args->is_object()) return;
    const std::string name = text_at(event, "name");
    if (name == "start_time" && !base_ns) {
      if (const auto start = number_at(*args, "start_time_since_epoch_in_micros"))
        base_ns = std::clamp(*start * 1000, 0.0, kLastNanosecond);
      if (const auto rank = number_at(*args, "rank"); rank && *rank >= 0)
        trace_.rank = static_cast<std::uint32_t>(*rank);
      trace_.what = "Horovod timeline";
    }
    if (name == "process_name") processes_[row.first] = text_at(*args, "name");
    if (name == "thread_name") trace_.names[row] = text_at(*args, "name");
  }

  void add(const Row& row, double begun, double ended, const std::string& name) {
    // Adds integers, since a double cannot hold a time of day in nanoseconds.
    const auto ns = [base = static_cast<std::int64_t>(base_ns.value_or(0))](double microseconds) {
      return base + std::llround(std::clamp(microseconds * 1000, -kLastNanosecond, kLastNanosecond));
    };
    trace_.rows[row].push_back({ns(begun), ns(std::max(begun, ended)), name});
    if (trace_.what == "Horovod timeline" && !trace_.names.contains(row)) trace_.names[row] = processes_[row.first];
  }

  ChromeTrace& trace_;
  std::map<Row, std::vector<std::pair<double, std::string>>> open_;
  std::map<std::string, std::string> processes_;
};

}  // namespace

ChromeTrace read_chrome_trace(const std::filesystem::path& file) {
  return parse_chrome_trace(value_or_throw(sys::read_file(file.string())).text(), file);
}

ChromeTrace parse_chrome_trace(std::string_view text, const std::filesystem::path& file) {
  const Json whole = parse(text);
  ChromeTrace trace;
  trace.file = file;
  trace.what = "torch profiler";
  EventReader reader(trace);
  const Json* events = whole.is_array() ? &whole : nullptr;
  bool older = false;
  if (whole.is_object()) {
    if (const auto found = whole.find("traceEvents"); found != whole.end() && found->is_array()) events = &*found;
    const auto base = whole.find("baseTimeNanoseconds");
    if (base != whole.end() && base->is_number())
      reader.base_ns = std::clamp(base->get<double>(), 0.0, kLastNanosecond);
    older = !reader.base_ns && whole.contains("schemaVersion");  // its times are times of day
    if (const auto info = whole.find("distributedInfo"); info != whole.end() && info->is_object()) {
      if (const auto rank = number_at(*info, "rank"); rank && *rank >= 0)
        trace.rank = static_cast<std::uint32_t>(*rank);
    }
  }
  if (events == nullptr) {
    raise(ErrorCode::Corrupt,
          "{}: this is no trace in Chrome's JSON format: there is no list of events in it -- give what "
          "torch.profiler's export_chrome_trace wrote",
          file.string());
  }
  for (const Json& event : *events) reader.take(event);
  if (!reader.base_ns && !older) {
    raise(ErrorCode::Corrupt,
          "{}: it does not say when it began (baseTimeNanoseconds), so it cannot be placed in time -- "
          "write it with torch 2.2 or newer",
          file.string());
  }
  for (auto& [row, slices] : trace.rows) {
    std::stable_sort(slices.begin(), slices.end(), [](const ChromeSlice& a, const ChromeSlice& b) {
      return std::pair(a.begun_ns, -a.ended_ns) < std::pair(b.begun_ns, -b.ended_ns);
    });
  }
  return trace;
}

}  // namespace cohort::track
