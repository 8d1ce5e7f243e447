#include "trace/merge.h"

#include "base/json.h"
#include "base/result.h"
#include "trace/trace_set.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

namespace cohort::track {

Placed::Placed(const TraceSet& set, const ChromeTrace& trace) : set_(set), piece_(nullptr) {
  if (!trace.rank) {
    raise(ErrorCode::InvalidArgument, "{}: it does not say of which rank it is -- name the rank: 3={}",
          trace.file.string(), trace.file.string());
  }
  piece_ = set.of_rank(*trace.rank);
  if (piece_ == nullptr) {
    raise(ErrorCode::InvalidArgument, "{}: it is of rank {}, and the run has none in its trace", trace.file.string(),
          *trace.rank);
  }
  if (!piece_->clock.host_ns_of(0)) {
    raise(ErrorCode::InvalidArgument, "{}: the trace of {} does not say what time of day it was", trace.file.string(),
          piece_->host);
  }
}

std::int64_t Placed::operator()(std::int64_t realtime_ns) const {
  const std::int64_t host_ns = piece_->clock.host_ns_of(realtime_ns).value_or(0);
  constexpr std::int64_t kLongest = std::int64_t{1} << 60;  // as in our own traces: sums with clocks' times do not
                                                            // overflow
  return piece_->common_ns(std::clamp<std::int64_t>(host_ns - piece_->clock.base_ns(), 0, kLongest), set_.zero_ns);
}

namespace {

/// Title of a row.
std::string title_of(const ChromeTrace& trace, const ChromeTrace::Row& row) {
  const auto found = trace.names.find(row);
  return found == trace.names.end() || found->second.empty() ? fmt::format("thread {}", row.second) : found->second;
}

namespace field = status::trace_field;
namespace fs = std::filesystem;
using status::TraceTrack;
using status::TrackEncoder;
using status::TrackId;

/// Numbers of packet sequences for external traces: above those of ranks, below those of hosts.
constexpr std::uint64_t kExternalSequences = std::uint64_t{1} << 30;

/// Replaces a file as a whole, writing in large pieces.
class Output {
 public:
  explicit Output(const fs::path& path) : file_(value_or_throw(sys::AtomicFile::create(path.string()))) {}
  std::string& text() noexcept { return text_; }
  void spill() {
    if (text_.size() < kMergeBuffer) return;
    value_or_throw(file_.writer().write(text_));
    text_.clear();
  }
  void commit() {
    value_or_throw(file_.writer().write(text_));
    value_or_throw(file_.commit());
  }

 private:
  sys::AtomicFile file_;
  std::string text_;
};

std::string remark_on(const HostPiece& piece) {
  if (!piece.clock.measured() || !piece.clock.has_base()) return "clock not measured: placed at the beginning";
  const std::int64_t uncertainty = piece.clock.uncertainty_ns();
  return uncertainty == 0 ? std::string() : fmt::format("clock ± {:.0f} us", static_cast<double>(uncertainty) / 1000);
}

std::string process_name(const HostPiece& piece, std::string_view name) {
  const std::string remark = remark_on(piece);
  if (remark.empty() || !name.ends_with(')')) return std::string(name);
  return fmt::format("{}; {})", name.substr(0, name.size() - 1), remark);
}

class PerfettoMerge {
 public:
  PerfettoMerge(const TraceSet& set, const fs::path& output) : set_(set), out_(output) {}

  MergeSummary run(const std::vector<ChromeTrace>& others) {
    append_time_of_day();
    for (const HostPiece& piece : set_.pieces) append(piece);
    append_in_flight();
    for (std::size_t i = 0; i < others.size(); ++i) append(others[i], i);
    out_.commit();
    for (const HostPiece& piece : set_.pieces) summary_.ranks += static_cast<int>(piece.processes.size());
    summary_.remarks = remarks_on(set_);
    return std::move(summary_);
  }

 private:
  void append_time_of_day() {
    if (set_.pieces.empty()) return;
    const HostClock& clock = set_.pieces.front().clock;
    const auto realtime = clock.realtime_of(set_.zero_ns + clock.offset_ns());
    if (!clock.measured() || !realtime || *realtime < 0) return;
    std::string snapshot, packet;
    for (const auto& [id, time] :
         {std::pair(field::kBoottime, std::int64_t{0}), std::pair(field::kRealtime, *realtime)}) {
      std::string one;
      status::ProtoWriter(one).number(field::kClockId, id).number(field::kClockTime, static_cast<std::uint64_t>(time));
      status::ProtoWriter(snapshot).bytes(field::kClocks, one);
    }
    status::ProtoWriter(packet).bytes(field::kClockSnapshot, snapshot);
    status::append_packet(out_.text(), packet);
  }

  // Appends packets unchanged except for times and names of processes.
  void append(const HostPiece& piece) {
    const sys::FileBytes bytes = read_trace(piece);
    TraceReader reader(bytes.text());
    std::string packet;
    while (reader.next()) {
      if (const auto& about = reader.description(); about && !about->process.empty()) {
        const TrackId id = TrackId::of(about->uuid);
        status::append_process(out_.text(), about->uuid, (std::uint64_t{id.epoch} << 20) + id.rank + 1,
                               process_name(piece, about->process));
        continue;
      }
      packet.clear();
      std::int64_t time = 0;
      for (ProtoReader fields(reader.packet()); fields.next();) {
        if (fields.field() == field::kTimestamp) {
          time = piece.common_ns(static_cast<std::int64_t>(fields.number()), set_.zero_ns);
          status::ProtoWriter(packet).number(field::kTimestamp, static_cast<std::uint64_t>(time));
        } else {
          packet += fields.raw();
        }
      }
      status::append_packet(out_.text(), packet);
      out_.spill();
      if (!reader.event()) continue;
      ++summary_.events;
      note_in_flight(*reader.event(), time);
    }
  }

  void note_in_flight(const TraceEvent& event, std::int64_t time) {
    const TrackId id = TrackId::of(event.track);
    if (event.track >= status::kExternalTracks || id.kind != TraceTrack::Operations) return;
    auto& changes = in_flight_[TrackId{id.rank, id.epoch, TraceTrack::InFlight, 0}.uuid()];
    if (event.type == TraceEvent::Type::Begin && event.bytes > 0) {
      begun_[event.track] = static_cast<std::int64_t>(event.bytes);
      changes.emplace_back(time, begun_[event.track]);
    } else if (event.type == TraceEvent::Type::End) {
      if (const std::int64_t bytes = std::exchange(begun_[event.track], 0); bytes != 0)
        changes.emplace_back(time, -bytes);
    }
  }

  void append_in_flight() {
    for (auto& [uuid, changes] : in_flight_) {
      std::stable_sort(changes.begin(), changes.end());
      const TrackId id = TrackId::of(uuid);
      TrackEncoder track((std::uint64_t{id.rank} + 1) << 7 | 126, uuid);
      track.append_description(
          out_.text(), {TrackId{id.rank, id.epoch, TraceTrack::Process, 0}.uuid(), "bytes under way", 6U << 12, true});
      std::int64_t sum = 0;
      for (std::size_t i = 0; i < changes.size(); ++i) {
        sum += changes[i].second;
        if (i + 1 < changes.size() && changes[i + 1].first == changes[i].first) continue;
        track.append(out_.text(), static_cast<std::uint64_t>(changes[i].first), TrackEncoder::count(sum));
        ++summary_.events;
        out_.spill();
      }
    }
  }

  void append(const ChromeTrace& trace, std::size_t number) {
    const Placed placed(set_, trace);
    place_ = &placed;
    const std::uint64_t process = status::kExternalTracks + (std::uint64_t{number} << 32);
    status::append_process(out_.text(), process, (std::uint64_t{1} << 30) + number,
                           fmt::format("rank {}: {}", *trace.rank, trace.what));
    std::uint64_t row_number = 0;
    for (const auto& [row, slices] : trace.rows) {
      ++row_number;
      TrackEncoder track(kExternalSequences + (std::uint64_t{number} << 16) + row_number, process + row_number);
      track.append_description(out_.text(), {process, title_of(trace, row), row_number, false});
      std::vector<std::int64_t> ends;
      const auto end_until = [&](std::int64_t time) {
        for (; !ends.empty() && ends.back() <= time; ends.pop_back())
          append_to(track, ends.back(), TrackEncoder::end());
      };
      for (const ChromeSlice& slice : slices) {
        end_until(slice.begun_ns);
        append_to(track, slice.begun_ns, track.begin(slice.name));
        // A nested slice that ends after the outer one is cut off.
        ends.push_back(ends.empty() ? slice.ended_ns : std::min(slice.ended_ns, ends.back()));
      }
      end_until(INT64_MAX);
    }
  }

  void append_to(TrackEncoder& track, std::int64_t realtime_ns, std::string_view event) {
    track.append(out_.text(), static_cast<std::uint64_t>((*place_)(realtime_ns)), event);
    ++summary_.events;
    out_.spill();
  }

  const TraceSet& set_;
  Output out_;
  MergeSummary summary_;
  const Placed* place_ = nullptr;
  std::map<std::uint64_t, std::int64_t> begun_;  ///< bytes, by track
  std::map<std::uint64_t, std::vector<std::pair<std::int64_t, std::int64_t>>> in_flight_;
};

}  // namespace

MergeSummary merge_traces(const TraceSet& set, const std::vector<ChromeTrace>& others, const fs::path& output) {
  return PerfettoMerge(set, output).run(others);
}

namespace {

using OrderedJson = nlohmann::ordered_json;

std::string_view category_of(TraceTrack kind) {
  switch (kind) {
    case TraceTrack::Steps: return "step";
    case TraceTrack::Buckets: return "bucket";
    case TraceTrack::Checkpoints: return "checkpoint";
    case TraceTrack::Operations: return "communication";
    case TraceTrack::Named: return "named";
    default: return "program";
  }
}

/// Writes one file: an object as torch's profiler writes it.
class File {
 public:
  File(const fs::path& path, const OrderedJson& head) : out_(path) {
    out_.text() = json_text(head);
    out_.text().back() = ',';
    out_.text() += "\"traceEvents\":[";
  }
  void add(const OrderedJson& event) {
    out_.text() += first_ ? "\n" : ",\n";
    first_ = false;
    out_.text() += json_text(event);
    out_.spill();
  }
  void commit() {
    out_.text() += "\n]}\n";
    out_.commit();
  }

 private:
  Output out_;
  bool first_ = true;
};

class JsonMerge {
 public:
  JsonMerge(const TraceSet& set, const fs::path& output) : set_(set), output_(output) {
    std::error_code error;
    each_rank_ = fs::is_directory(output, error);
    for (const HostPiece& piece : set.pieces) ranks_ += static_cast<int>(piece.processes.size());
    const HostClock& clock = set.pieces.front().clock;
    base_ns_ = clock.realtime_of(set.zero_ns + clock.offset_ns()).value_or(0);
  }

  MergeSummary run(const std::vector<ChromeTrace>& others) {
    for (const HostPiece& piece : set_.pieces) append(piece);
    for (std::size_t i = 0; i < others.size(); ++i) append(others[i], i);
    for (auto& [rank, file] : files_) file->commit();
    summary_.ranks = ranks_;
    summary_.remarks = remarks_on(set_);
    return std::move(summary_);
  }

 private:
  File& file_of(std::uint32_t rank) {
    auto& file = files_[each_rank_ ? rank : 0];
    if (file) return *file;
    OrderedJson info{{"backend", "cohort"}, {"world_size", ranks_}};
    if (each_rank_) info["rank"] = rank;
    const OrderedJson head{
        {"schemaVersion", 1}, {"distributedInfo", info}, {"displayTimeUnit", "ms"}, {"baseTimeNanoseconds", base_ns_}};
    file = std::make_unique<File>(each_rank_ ? output_ / fmt::format("rank-{}.json", rank) : output_, head);
    return *file;
  }

  void add(std::uint32_t rank, const OrderedJson& event) {
    file_of(rank).add(event);
    ++summary_.events;
  }

  void name(std::uint32_t rank, const char* what, std::uint64_t pid, std::uint64_t tid, const std::string& text) {
    file_of(rank).add({{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"ts", 0}, {"args", {{"name", text}}}});
  }

  static double microseconds(std::int64_t ns) { return static_cast<double>(ns) / 1000; }

  void append(const HostPiece& piece) {
    for (const auto& [rank, process] : piece.processes) name(rank, "process_name", rank, 0, process);
    const sys::FileBytes bytes = read_trace(piece);
    for (TraceReader reader(bytes.text()); reader.next();) {
      const auto& about = reader.description();
      if (!about || about->name.empty() || about->uuid >= status::kExternalTracks) continue;
      const auto id = status::TrackId::of(about->uuid);
      name(id.rank, "thread_name", id.rank, thread_of(id), std::string(about->name));
    }
    each_slice(set_, piece, [this](const Slice& slice) { append(slice); });
  }

  static std::uint64_t thread_of(const status::TrackId& id) {
    return std::uint64_t{id.epoch} << 16 | std::uint64_t{static_cast<std::uint8_t>(id.kind)} << 12 | id.lane;
  }

  void append(const Slice& slice) {
    const TraceEvent& event = slice.event;
    OrderedJson args = OrderedJson::object();
    const auto put = [&args](const char* title, std::uint64_t value) {
      if (value != 0) args[title] = value;
    };
    put("bytes", event.bytes);
    put("waited_ns", event.waited_ns);
    put("wire_bytes", event.wire_bytes);
    put("wire_us", event.wire_us);
    put("number", event.number);
    put("events_lost", event.lost);
    if (event.failed) args["failed"] = true;
    const bool moment = slice.ended_ns == slice.begun_ns;
    OrderedJson out{
        {"ph", moment ? "i" : "X"}, {"cat", category_of(slice.track.kind)}, {"name", slice.name},
        {"pid", slice.track.rank},  {"tid", thread_of(slice.track)},        {"ts", microseconds(slice.begun_ns)}};
    if (moment)
      out["s"] = "t";
    else
      out["dur"] = microseconds(slice.ended_ns - slice.begun_ns);
    if (!args.empty()) out["args"] = std::move(args);
    add(slice.track.rank, out);
  }

  void append(const ChromeTrace& trace, std::size_t number) {
    const Placed placed(set_, trace);
    const std::uint64_t pid = (std::uint64_t{1} << 30) + number;
    name(*trace.rank, "process_name", pid, 0, fmt::format("rank {}: {}", *trace.rank, trace.what));
    std::uint64_t tid = 0;
    for (const auto& [row, slices] : trace.rows) {
      name(*trace.rank, "thread_name", pid, ++tid, title_of(trace, row));
      for (const ChromeSlice& slice : slices) {
        const std::int64_t begun = placed(slice.begun_ns);
        add(*trace.rank, {{"ph", "X"},
                          {"name", slice.name},
                          {"pid", pid},
                          {"tid", tid},
                          {"ts", microseconds(begun)},
                          {"dur", microseconds(placed(slice.ended_ns) - begun)}});
      }
    }
  }

  const TraceSet& set_;
  const fs::path output_;
  bool each_rank_ = false;
  int ranks_ = 0;
  std::int64_t base_ns_ = 0;
  MergeSummary summary_;
  std::map<std::uint32_t, std::unique_ptr<File>> files_;
};

}  // namespace

MergeSummary merge_as_json(const TraceSet& set, const std::vector<ChromeTrace>& others, const fs::path& output) {
  return JsonMerge(set, output).run(others);
}

}  // namespace cohort::track
