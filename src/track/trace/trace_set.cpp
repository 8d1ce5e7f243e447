#include "track/trace/trace_set.h"

#include "status/trace_encoder.h"

#include <algorithm>
#include <limits>
#include <system_error>

namespace cohort::track {
namespace {

namespace fs = std::filesystem;
using status::TrackId;

constexpr std::string_view kClockOf = "clock of ";

HostPiece look_at(const fs::path& file) {
  HostPiece piece;
  piece.file = file;
  const sys::FileBytes bytes = read_trace(piece);
  TraceReader reader(bytes.text());
  bool known = false;
  while (reader.next()) {
    known = true;
    if (const auto& about = reader.description()) {
      if (about->uuid >= status::kHostTracks && about->name.starts_with(kClockOf) && piece.host.empty())
        piece.host = about->name.substr(kClockOf.size());
      if (!about->process.empty() && about->uuid < status::kExternalTracks)
        piece.processes[TrackId::of(about->uuid).rank] = about->process;
    }
    if (const auto& event = reader.event(); event && event->track >= status::kHostTracks) piece.clock.take(*event);
  }
  piece.clock.settle();
  piece.damaged = reader.damaged();
  piece.torn = reader.torn();
  if (!known || piece.host.empty()) {
    raise(ErrorCode::Corrupt,
          "{}: this is no trace of one host -- give the folder of a run that was started with "
          "`cohort run --trace`, or its trace/host-N.pftrace",
          file.string());
  }
  return piece;
}

}  // namespace

sys::FileBytes read_trace(const HostPiece& piece) { return value_or_throw(sys::read_file(piece.file.string())); }

std::int64_t HostPiece::common_ns(std::int64_t time_ns, std::int64_t zero_ns) const noexcept {
  // Not measured: it begins where all begin, and says that it is placed so.
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
      if (name.starts_with("host-") && name.ends_with(".pftrace")) set.pieces.push_back(look_at(entry.path()));
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

}  // namespace cohort::track
