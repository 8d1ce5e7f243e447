#include "track/trace/merge.h"

#include "base/result.h"
#include "track/trace/placed.h"
#include "track/trace/slices.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

namespace cohort::track {
namespace {

namespace field = status::trace_field;
namespace fs = std::filesystem;
using status::TraceTrack;
using status::TrackEncoder;
using status::TrackId;

/// Of sequences of packets: above those of ranks, below those of hosts.
constexpr std::uint64_t kExternalSequences = std::uint64_t{1} << 30;

/// A file that is replaced as a whole, written in large pieces.
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

  // Packets stay as they are, but for their times and the names of processes.
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
        // What should lie within another and does not is cut off.
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

}  // namespace cohort::track
