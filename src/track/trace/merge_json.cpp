#include "base/result.h"
#include "track/trace/merge.h"
#include "track/trace/placed.h"
#include "track/trace/slices.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <string_view>
#include <system_error>

namespace cohort::track {
namespace {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;
using status::TraceTrack;

std::string text_of(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

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

/// One file: an object as torch's profiler writes it.
class File {
 public:
  File(const fs::path& path, const OrderedJson& head) : file_(value_or_throw(sys::AtomicFile::create(path.string()))) {
    text_ = text_of(head);
    text_.back() = ',';
    text_ += "\"traceEvents\":[";
  }
  void add(const OrderedJson& event) {
    text_ += first_ ? "\n" : ",\n";
    first_ = false;
    text_ += text_of(event);
    if (text_.size() < kMergeBuffer) return;
    value_or_throw(file_.writer().write(text_));
    text_.clear();
  }
  void commit() {
    text_ += "\n]}\n";
    value_or_throw(file_.writer().write(text_));
    value_or_throw(file_.commit());
  }

 private:
  sys::AtomicFile file_;
  std::string text_;
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
