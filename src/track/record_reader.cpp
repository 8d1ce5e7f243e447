#include "track/record_reader.h"

#include "base/result.h"
#include "sys/files.h"

#include <algorithm>
#include <utility>

namespace cohort::track {

RecordLines parse_record(std::string_view text) {
  RecordLines lines;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) {
      lines.torn = true;
      break;
    }
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    RecordLine event;
    if (event.read(line)) {
      lines.events.push_back(std::move(event));
    } else {
      ++lines.damaged;
    }
  }
  return lines;
}

RecordLines read_record(const std::filesystem::path& file) {
  const auto content = sys::read_file(file.string());
  if (!content) throw content.error();
  RecordLines lines = parse_record(content->text());
  if (lines.events.empty() && lines.damaged > 0) {
    raise(ErrorCode::Corrupt,
          "reading the run record failed -- {} -- none of its {} lines is an event -- is it a run record?",
          file.string(), lines.damaged);
  }
  return lines;
}

RecordLines read_run(const std::filesystem::path& record) {
  RecordLines lines = read_record(record);
  const auto content = sys::read_file((record.parent_path() / "warnings.jsonl").string());
  if (!content) return lines;
  RecordLines warnings = parse_record(content->text());
  lines.damaged += warnings.damaged;
  for (RecordLine& warning : warnings.events) {
    const auto later = std::find_if(lines.events.begin(), lines.events.end(), [&](const RecordLine& line) {
      return line.time && warning.time && *line.time > *warning.time;
    });
    lines.events.insert(later, std::move(warning));
  }
  return lines;
}

std::filesystem::path record_of(const std::filesystem::path& run, Absent absent) {
  if (!std::filesystem::is_directory(run)) return run;
  std::filesystem::path record = run / "run.jsonl";
  if (absent == Absent::Error && !std::filesystem::exists(record) && std::filesystem::exists(run / "job.json")) {
    raise(ErrorCode::Unavailable,
          "{} has no run.jsonl -- the program of this run writes no run record: a cohort::track::RunRecord or "
          "cohort.track.log does ({}/logs has what it printed)",
          run.string(), run.string());
  }
  return record;
}

}  // namespace cohort::track
