#include "observe/trace/trace_set.h"

#include "base/json.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>
#include <utility>
#include <vector>

namespace cohort::track {
namespace {

using Json = nlohmann::json;

/// Latest valid time of a trace, in microseconds. Sums of a few such times, in nanoseconds, do not overflow.
constexpr double kLatest = 1e15;

std::optional<std::int64_t> time_in(const Json& object, const char* name) {
  const auto microseconds = number_in(object, name);
  if (!microseconds || *microseconds < 0 || *microseconds > kLatest) return std::nullopt;
  return std::llround(*microseconds * 1000);
}

std::uint64_t count_in(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_number_unsigned() ? found->get<std::uint64_t>() : 0;
}

/// Reads those arguments of an event that it has.
struct ArgumentReader {
  const Json& arguments;
  void operator()(const char* name, std::uint64_t& value) const { value = count_in(arguments, name); }
  void operator()(const char* name, std::optional<std::int64_t>& value) const {
    const auto found = arguments.find(name);
    if (found == arguments.end() || !found->is_number_integer()) return;
    if (found->is_number_unsigned() && found->get<std::uint64_t>() > INT64_MAX) return;
    value = found->get<std::int64_t>();
  }
};

}  // namespace

bool TraceReader::next() {
  for (bool first = line_.data() == nullptr; !rest_.empty(); first = false) {
    const auto end = rest_.find('\n');
    line_ = rest_.substr(0, end);
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 1);
    if (first && line_.starts_with('[')) line_.remove_prefix(1);
    if (line_.ends_with(',')) line_.remove_suffix(1);
    if (line_.empty() || line_ == "]") continue;
    if (decode()) return true;
    if (rest_.empty())
      torn_ = true;
    else
      ++damaged_;
  }
  return false;
}

bool TraceReader::decode() {
  event_.reset();
  description_.reset();
  const Json object = parse_json_or_discard<Json>(line_);
  const std::string phase = text_in(object, "ph");
  if (phase.empty()) return false;
  static const Json kNone = Json::object();
  const auto found = object.find("args");
  const Json& arguments = found != object.end() && found->is_object() ? *found : kNone;
  const std::uint64_t pid = count_in(object, "pid"), tid = count_in(object, "tid");
  name_ = text_in(object, "name");
  if (phase == "M") {
    description_ = {pid, name_ == "process_name", text_in(arguments, "name")};
    return true;
  }
  const auto begun = time_in(object, "ts");
  const auto lasted = phase == "X" ? time_in(object, "dur") : std::optional<std::int64_t>(0);
  if (!begun || !lasted || (phase != "X" && phase != "i")) return false;
  event_.emplace();
  event_->pid = pid;
  event_->tid = tid;
  event_->name = name_;
  event_->begun_ns = *begun;
  event_->ended_ns = *begun + *lasted;
  event_->moment = phase == "i";
  if (const std::string flow = text_in(object, "bind_id"); flow.starts_with("0x"))
    std::from_chars(flow.data() + 2, flow.data() + flow.size(), event_->flow, 16);
  visit_arguments(*event_, ArgumentReader{arguments});
  return true;
}

namespace {

/// A measurement this many times worse than the best would make the drift less accurate, and is left out.
constexpr std::int64_t kWorse = 4;
constexpr std::int64_t kNegligible = 20'000;
/// Longer than any clock runs or differs from another, and small enough that sums of a few do not overflow.
constexpr std::int64_t kFarthest = std::int64_t{1} << 61;
/// Limit for times of day.
constexpr std::int64_t kLatestDay = std::int64_t{1} << 62;

bool sane(std::int64_t ns) { return ns > -kFarthest && ns < kFarthest; }
bool sane_day(std::int64_t ns) { return ns >= 0 && ns < kLatestDay; }

}  // namespace

void HostClock::take(const TraceEvent& event) {
  if (!event.host_ns || !sane(*event.host_ns) || *event.host_ns < 0) return;
  if (event.realtime_ns && sane_day(*event.realtime_ns)) {
    if (!base_ns_ && *event.host_ns >= event.begun_ns) base_ns_ = *event.host_ns - event.begun_ns;
    realtime_.push_back({*event.host_ns, *event.realtime_ns});
  }
  const std::int64_t uncertainty = event.uncertainty_ns.value_or(0);
  if (event.offset_ns && sane(*event.offset_ns) && uncertainty >= 0 && uncertainty < kFarthest / kWorse)
    offsets_.push_back({*event.host_ns, *event.offset_ns, uncertainty});
}

void HostClock::settle() {
  const auto by_time = [](const auto& a, const auto& b) { return a.host_ns < b.host_ns; };
  std::stable_sort(realtime_.begin(), realtime_.end(), by_time);
  std::stable_sort(offsets_.begin(), offsets_.end(), by_time);
  if (offsets_.empty()) return;
  std::int64_t best = offsets_.front().uncertainty_ns;
  for (const Offset& one : offsets_) best = std::min(best, one.uncertainty_ns);
  const std::int64_t most = std::max(best * kWorse, kNegligible);
  std::erase_if(offsets_, [most](const Offset& one) { return one.uncertainty_ns > most; });
}

std::int64_t HostClock::common_ns(std::int64_t host_ns) const noexcept {
  if (offsets_.empty()) return host_ns;
  const auto after =
      std::find_if(offsets_.begin(), offsets_.end(), [host_ns](const Offset& one) { return one.host_ns >= host_ns; });
  if (after == offsets_.end()) return host_ns - offsets_.back().offset_ns;
  if (after == offsets_.begin() || after->host_ns == host_ns) return host_ns - after->offset_ns;
  const Offset& before = *std::prev(after);
  const double share =
      static_cast<double>(host_ns - before.host_ns) / static_cast<double>(after->host_ns - before.host_ns);
  const double drifted = static_cast<double>(after->offset_ns - before.offset_ns) * share;
  return host_ns - (before.offset_ns + static_cast<std::int64_t>(drifted));
}

const HostClock::Realtime& HostClock::nearest(std::int64_t Realtime::*clock, std::int64_t ns) const noexcept {
  return *std::min_element(realtime_.begin(), realtime_.end(), [clock, ns](const Realtime& a, const Realtime& b) {
    return std::llabs(a.*clock - ns) < std::llabs(b.*clock - ns);
  });
}

std::optional<std::int64_t> HostClock::host_ns_of(std::int64_t realtime_ns) const noexcept {
  if (realtime_.empty() || !sane_day(realtime_ns)) return std::nullopt;
  const Realtime& one = nearest(&Realtime::realtime_ns, realtime_ns);
  return one.host_ns + (realtime_ns - one.realtime_ns);
}

std::optional<std::int64_t> HostClock::realtime_of(std::int64_t host_ns) const noexcept {
  if (realtime_.empty() || !sane(host_ns)) return std::nullopt;
  const Realtime& one = nearest(&Realtime::host_ns, host_ns);
  return one.realtime_ns + (host_ns - one.host_ns);
}

std::int64_t HostClock::uncertainty_ns() const noexcept {
  std::int64_t most = 0;
  for (const Offset& one : offsets_) most = std::max(most, one.uncertainty_ns);
  return most;
}

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kClockOf = "clock of ";

HostPiece look_at(const fs::path& file) {
  HostPiece piece;
  piece.file = file;
  const sys::FileBytes bytes = read_trace(piece);
  TraceReader reader(bytes.text());
  bool known = false;
  while (reader.next()) {
    known = true;
    if (const auto& about = reader.description(); about && about->names_process) {
      if (about->pid >= status::kHostPids && about->text.starts_with(kClockOf) && piece.host.empty())
        piece.host = about->text.substr(kClockOf.size());
      if (about->pid < status::kHostPids) piece.processes[static_cast<std::uint32_t>(about->pid)] = about->text;
    }
    if (const auto& event = reader.event(); event && event->pid >= status::kHostPids) piece.clock.take(*event);
  }
  piece.clock.settle();
  piece.damaged = reader.damaged();
  piece.torn = reader.torn();
  // A merged trace is an object. Its clocks belong to several hosts.
  if (!known || piece.host.empty() || !bytes.text().starts_with('[')) {
    raise(ErrorCode::Corrupt,
          "{}: this is no trace of one host -- give the folder of a run that was started with "
          "`cohort run --trace`, or its trace/host-N.json",
          file.string());
  }
  return piece;
}

}  // namespace

sys::FileBytes read_trace(const HostPiece& piece) { return value_or_throw(sys::read_file(piece.file.string())); }

std::int64_t HostPiece::common_ns(std::int64_t time_ns, std::int64_t zero_ns) const noexcept {
  // Without clock measurements, the host's trace begins at the common beginning, and remarks_on reports that.
  if (!clock.measured() || !clock.has_base()) return time_ns;
  return std::max<std::int64_t>(clock.common_ns(clock.base_ns() + time_ns) - zero_ns, 0);
}

const HostPiece* TraceSet::of_rank(std::uint32_t rank) const {
  for (const HostPiece& piece : pieces) {
    if (piece.processes.contains(rank)) return &piece;
  }
  return nullptr;
}

TraceSet open_traces(const fs::path& run) {
  TraceSet set;
  std::error_code error;
  if (fs::is_directory(run, error)) {
    const fs::path folder = run / "trace";
    for (const auto& entry : fs::directory_iterator(folder, error)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("host-") && name.ends_with(".json")) set.pieces.push_back(look_at(entry.path()));
    }
    if (set.pieces.empty()) {
      raise(ErrorCode::Unavailable, "{}: there is no trace in trace/ -- was the run started with `cohort run --trace`?",
            run.string());
    }
  } else if (fs::exists(run, error)) {
    set.pieces.push_back(look_at(run));
  } else {
    raise(ErrorCode::Unavailable, "{}: there is no such run -- give its folder", run.string());
  }
  std::sort(set.pieces.begin(), set.pieces.end(), [](const HostPiece& a, const HostPiece& b) {
    return std::pair(a.file.string().size(), a.file.string()) < std::pair(b.file.string().size(), b.file.string());
  });
  std::int64_t zero = std::numeric_limits<std::int64_t>::max();
  for (const HostPiece& piece : set.pieces) {
    if (piece.clock.measured() && piece.clock.has_base())
      zero = std::min(zero, piece.clock.common_ns(piece.clock.base_ns()));
  }
  set.zero_ns = zero == std::numeric_limits<std::int64_t>::max() ? 0 : zero;
  return set;
}

std::vector<std::string> remarks_on(const TraceSet& set) {
  std::vector<std::string> remarks;
  for (const HostPiece& piece : set.pieces) {
    const auto say = [&](const std::string& what) { remarks.push_back(fmt::format("{}: {}", piece.host, what)); };
    if (!piece.clock.measured() || !piece.clock.has_base())
      say("its clock was not measured; its ranks are placed at the beginning");
    if (piece.torn) say("the trace ends in the middle of an event");
    if (piece.damaged > 0) say(fmt::format("{} events make no sense and are left out", piece.damaged));
  }
  return remarks;
}

void each_slice(const TraceSet& set, const HostPiece& piece, const std::function<void(const Slice&)>& take) {
  const sys::FileBytes bytes = read_trace(piece);
  for (TraceReader reader(bytes.text()); reader.next();) {
    const auto& event = reader.event();
    if (!event || event->pid >= status::kHostPids) continue;
    const std::int64_t begun = piece.common_ns(event->begun_ns, set.zero_ns);
    const std::int64_t ended = std::max(piece.common_ns(event->ended_ns, set.zero_ns), begun);
    take({status::TrackId::of(event->pid, event->tid), *event, begun, ended});
  }
}

}  // namespace cohort::track
