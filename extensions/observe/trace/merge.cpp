#include "observe/trace/merge.h"

#include "base/json.h"
#include "base/result.h"
#include "observe/trace/trace_set.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <system_error>
#include <unordered_map>
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
  constexpr std::int64_t kLongest = std::int64_t{1} << 60;  // as in our traces: sums with clock times fit
  return piece_->common_ns(std::clamp<std::int64_t>(host_ns - piece_->clock.base_ns(), 0, kLongest), set_.zero_ns);
}

namespace {

/// Returns the title of a row.
std::string title_of(const ChromeTrace& trace, const ChromeTrace::Row& row) {
  const auto found = trace.names.find(row);
  return found == trace.names.end() || found->second.empty() ? fmt::format("thread {}", row.second) : found->second;
}

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;
using status::TraceTrack;
using status::TrackId;

/// More than any operation has, and small enough that sums of many do not overflow.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 40;

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

/// Writes events in large pieces into a file, replaced as a whole: an object like that of torch's profiler.
class File {
 public:
  File(const fs::path& path, const OrderedJson& head) : file_(value_or_throw(sys::AtomicFile::create(path.string()))) {
    text_ = json_text(head);
    text_.back() = ',';
    text_ += "\"traceEvents\":";
  }
  /// `events` begin with a comma.
  void add(std::string_view events) {
    text_ += first_ ? status::begin_list(events) : events;
    first_ = false;
    if (text_.size() < kMergeBuffer) return;
    value_or_throw(file_.writer().write(text_));
    text_.clear();
  }
  void commit() {
    text_ += first_ ? "[]}\n" : "\n]}\n";
    value_or_throw(file_.writer().write(text_));
    value_or_throw(file_.commit());
  }

 private:
  sys::AtomicFile file_;
  std::string text_;
  bool first_ = true;
};

class Merge {
 public:
  Merge(const TraceSet& set, const fs::path& output) : set_(set), output_(output) {
    std::error_code error;
    each_rank_ = fs::is_directory(output, error);
    for (const HostPiece& piece : set.pieces) summary_.ranks += static_cast<int>(piece.processes.size());
    const HostClock& clock = set.pieces.front().clock;
    base_ns_ = clock.realtime_of(set.zero_ns + clock.offset_ns()).value_or(0);
  }

  MergeSummary run(const std::vector<ChromeTrace>& others) {
    for (const HostPiece& piece : set_.pieces)
      each_slice(set_, piece, [this](const Slice& slice) { note_flow(slice); });
    for (const HostPiece& piece : set_.pieces) append(piece);
    for (std::size_t i = 0; i < others.size(); ++i) append(others[i], i);
    for (auto& [rank, file] : files_) file->commit();
    summary_.remarks = remarks_on(set_);
    return std::move(summary_);
  }

 private:
  struct First {
    std::int64_t begun_ns;
    std::uint64_t rank;
  };

  File& file_of(std::uint64_t rank) {
    auto& file = files_[each_rank_ ? rank : 0];
    if (file) return *file;
    OrderedJson info{{"backend", "cohort"}, {"world_size", summary_.ranks}};
    if (each_rank_) info["rank"] = rank;
    const OrderedJson head{
        {"schemaVersion", 1}, {"distributedInfo", info}, {"displayTimeUnit", "ms"}, {"baseTimeNanoseconds", base_ns_}};
    file = std::make_unique<File>(each_rank_ ? output_ / fmt::format("rank-{}.json", rank) : output_, head);
    return *file;
  }

  /// Arrows of a collective begin at the rank that began it first.
  void note_flow(const Slice& slice) {
    if (slice.event.flow == 0) return;
    const First mine{slice.begun_ns, slice.event.pid};
    const auto [found, is_new] = flows_.try_emplace(slice.event.flow, mine);
    if (!is_new && mine.begun_ns < found->second.begun_ns) found->second = mine;
  }

  // Appends lines without changes, except for times, arrows and names of processes.
  void append(const HostPiece& piece) {
    const sys::FileBytes bytes = read_trace(piece);
    for (TraceReader reader(bytes.text()); reader.next();) {
      text_.clear();
      const auto& about = reader.description();
      const std::uint64_t pid = about ? about->pid : reader.event()->pid;
      if (each_rank_ && pid >= status::kHostPids) continue;
      if (about && about->names_process && pid < status::kHostPids)
        status::append_process(text_, pid, process_name(piece, about->text));
      else if (about)
        text_.append(",\n").append(reader.line());
      else
        append(piece, *reader.event());
      file_of(pid).add(text_);
    }
    append_in_flight();
  }

  void append(const HostPiece& piece, TraceEvent event) {
    const std::int64_t begun = piece.common_ns(event.begun_ns, set_.zero_ns);
    event.ended_ns = std::max(piece.common_ns(event.ended_ns, set_.zero_ns), begun);
    event.begun_ns = begun;
    const TrackId id = TrackId::of(event.pid, event.tid);
    if (event.flow != 0) event.begins_flow = flows_[event.flow].rank == event.pid;
    if (event.pid < status::kHostPids) {
      event.category = status::category_of(id.kind);
      if (id.kind == TraceTrack::Operations && !event.moment && event.bytes > 0) {
        auto& changes = in_flight_[event.pid];
        const auto bytes = static_cast<std::int64_t>(std::min(event.bytes, kMostBytes));
        changes.emplace_back(event.begun_ns, bytes);
        changes.emplace_back(event.ended_ns, -bytes);
      }
    }
    status::append_event(text_, event);
    ++summary_.events;
  }

  /// Appends the sums for one host's ranks at a time, so that only the operations of that host are kept in memory.
  void append_in_flight() {
    for (auto& [rank, changes] : in_flight_) {
      std::stable_sort(changes.begin(), changes.end());
      std::int64_t sum = 0;
      for (std::size_t i = 0; i < changes.size(); ++i) {
        sum += changes[i].second;
        if (i + 1 < changes.size() && changes[i + 1].first == changes[i].first) continue;
        text_.clear();
        status::append_counter(text_, rank, "bytes under way", changes[i].first, sum);
        file_of(rank).add(text_);
        ++summary_.events;
      }
    }
    in_flight_.clear();
  }

  void append(const ChromeTrace& trace, std::size_t number) {
    const Placed placed(set_, trace);
    const std::uint64_t pid = status::kExternalPids + number;
    text_.clear();
    status::append_process(text_, pid, fmt::format("rank {}: {}", *trace.rank, trace.what));
    std::uint64_t tid = 0;
    for (const auto& [row, slices] : trace.rows) {
      ++tid;
      status::append_row(text_, pid, tid, title_of(trace, row), tid);
      for (const ChromeSlice& slice : slices) {
        const std::int64_t begun = placed(slice.begun_ns);
        TraceEvent event{pid, tid, slice.name};
        event.begun_ns = begun;
        event.ended_ns = std::max(placed(slice.ended_ns), begun);
        status::append_event(text_, event);
        file_of(*trace.rank).add(text_);
        text_.clear();
        ++summary_.events;
      }
    }
    if (!text_.empty()) file_of(*trace.rank).add(text_);
  }

  const TraceSet& set_;
  const fs::path output_;
  bool each_rank_ = false;
  std::int64_t base_ns_ = 0;
  MergeSummary summary_;
  std::string text_;
  std::unordered_map<std::uint64_t, First> flows_;
  std::map<std::uint64_t, std::vector<std::pair<std::int64_t, std::int64_t>>> in_flight_;  ///< by rank
  std::map<std::uint64_t, std::unique_ptr<File>> files_;
};

}  // namespace

MergeSummary merge_traces(const TraceSet& set, const std::vector<ChromeTrace>& others, const fs::path& output) {
  return Merge(set, output).run(others);
}

}  // namespace cohort::track
