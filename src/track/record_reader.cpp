#include "track/record_reader.h"

#include "base/result.h"
#include "sys/files.h"

#include <limits>

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
    auto event = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool good = event.is_object() && event.contains("event") && event["event"].is_string();
    if (good) {
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

std::optional<double> number_of(const nlohmann::json& event, std::string_view name) {
  const auto found = event.find(name);
  if (found == event.end()) return std::nullopt;
  if (found->is_number()) return found->get<double>();
  if (found->is_string()) {
    const auto& text = found->get_ref<const std::string&>();
    if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
    if (text == "Infinity") return std::numeric_limits<double>::infinity();
    if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
  }
  return std::nullopt;
}

}  // namespace cohort::track
