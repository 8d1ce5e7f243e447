#include "telemetry/record.h"

#include "base/files.h"
#include "base/log.h"
#include "base/result.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <utility>

namespace cohort::track {
namespace {

using Json = nlohmann::json;

/// Takes each value when it is parsed, since building a tree of each line would take three times as long.
class FieldsReader {
 public:
  explicit FieldsReader(RecordLine& line) : line_(line) {}

  bool good() const noexcept { return whole_ && has_event_; }
  std::size_t count() const noexcept { return count_; }

  bool null() { return true; }
  bool boolean(bool value) {
    if (wanted()) next().value = value;
    return true;
  }
  bool number_integer(Json::number_integer_t value) {
    if (is_top("time"))
      line_.time = static_cast<double>(value);
    else if (wanted())
      next().value = value;
    return true;
  }
  bool number_unsigned(Json::number_unsigned_t value) {
    if (value <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return number_integer(static_cast<std::int64_t>(value));
    }
    return number_float(static_cast<double>(value), {});
  }
  bool number_float(double value, const std::string&) {
    if (is_top("time"))
      line_.time = value;
    else if (wanted())
      next().value = value;
    return true;
  }
  bool string(std::string& value) {
    if (is_top("event")) {
      line_.event = value;
      has_event_ = true;
    } else if (wanted()) {
      RecordLine::Field& field = next();
      if (auto* const text = std::get_if<std::string>(&field.value))
        *text = value;
      else
        field.value = value;
    }
    return true;
  }
  bool binary(Json::binary_t&) { return true; }
  bool start_object(std::size_t) {
    if (arrays_ > 0) return true;
    // A line is an object, whose fields may be objects.
    prefixes_.push_back(prefix_.size());
    if (prefixes_.size() > 1) prefix_.append(key_).push_back('/');
    return true;
  }
  bool key(std::string& name) {
    if (arrays_ == 0) key_ = name;
    return true;
  }
  bool end_object() {
    if (arrays_ > 0) return true;
    prefix_.resize(prefixes_.back());
    prefixes_.pop_back();
    if (prefixes_.empty()) whole_ = true;
    return true;
  }
  bool start_array(std::size_t) {
    if (prefixes_.empty()) return false;
    ++arrays_;
    return true;
  }
  bool end_array() {
    --arrays_;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) { return false; }

 private:
  bool wanted() const noexcept { return arrays_ == 0 && !prefixes_.empty(); }
  bool is_top(std::string_view name) const noexcept { return arrays_ == 0 && prefixes_.size() == 1 && key_ == name; }
  RecordLine::Field& next() {
    if (count_ == line_.fields.size()) line_.fields.emplace_back();
    RecordLine::Field& field = line_.fields[count_++];
    field.name.assign(prefix_).append(key_);
    return field;
  }

  RecordLine& line_;
  std::string prefix_, key_;
  std::vector<std::size_t> prefixes_;  // by open object: the length of prefix_ before the object
  std::size_t arrays_ = 0, count_ = 0;
  bool has_event_ = false, whole_ = false;
};

}  // namespace

bool RecordLine::read(std::string_view text) {
  time.reset();
  FieldsReader reader(*this);
  const bool parsed = Json::sax_parse(text.begin(), text.end(), &reader);
  fields.resize(reader.count());
  return parsed && reader.good();
}

const RecordLine::Field* RecordLine::find(std::string_view name) const noexcept {
  for (const Field& field : fields) {
    if (field.name == name) return &field;
  }
  return nullptr;
}

std::optional<double> RecordLine::number(std::string_view name) const {
  if (name == "time") return time;
  const Field* const field = find(name);
  return field != nullptr ? number_of(*field) : std::nullopt;
}

std::optional<std::int64_t> RecordLine::integer(std::string_view name) const {
  constexpr double kMost = 9.2e18;
  const auto value = number(name);
  if (!value || !(std::abs(*value) < kMost)) return std::nullopt;
  const Field* const field = find(name);
  const auto* const exact = field != nullptr ? std::get_if<std::int64_t>(&field->value) : nullptr;
  return exact != nullptr ? *exact : static_cast<std::int64_t>(*value);
}

std::string_view RecordLine::text(std::string_view name) const noexcept {
  const Field* const field = find(name);
  const auto* const held = field != nullptr ? std::get_if<std::string>(&field->value) : nullptr;
  return held != nullptr ? std::string_view(*held) : std::string_view();
}

std::optional<double> number_of(const RecordLine::Field& field) {
  if (const auto* const value = std::get_if<double>(&field.value)) return *value;
  if (const auto* const value = std::get_if<std::int64_t>(&field.value)) return static_cast<double>(*value);
  if (const auto* const value = std::get_if<std::string>(&field.value)) {
    if (*value == "NaN") return std::numeric_limits<double>::quiet_NaN();
    if (*value == "Infinity") return std::numeric_limits<double>::infinity();
    if (*value == "-Infinity") return -std::numeric_limits<double>::infinity();
  }
  return std::nullopt;
}

std::string text_of(double number) {
  if (std::isnan(number)) return "NaN";
  if (std::isinf(number)) return number > 0 ? "Infinity" : "-Infinity";
  return fmt::format("{}", number);
}

std::string text_of(const RecordLine::Field& field) {
  return std::visit([](const auto& held) { return fmt::format("{}", held); }, field.value);
}

namespace {

constexpr std::string_view kOperations = "operations/";

}  // namespace

bool is_known_event(std::string_view event) noexcept {
  constexpr std::array<std::string_view, 9> kEvents = {"metric", "step",      "epoch", "communication", "start",
                                                       "resume", "preempted", "end",   "weights"};
  return std::find(kEvents.begin(), kEvents.end(), event) != kEvents.end();
}

void PointReader::read(const RecordLine& line, const std::function<void(const MetricPoint&)>& take) {
  step_ = line.integer("step").value_or(step_);
  time_ = line.time.value_or(time_);
  MetricPoint point{.name = {}, .value = 0, .step = step_, .time = time_, .rank = {}};
  const bool metric = line.event == "metric", communication = line.event == "communication";
  if (!metric && !communication && line.event != "step" && line.event != "epoch") return;
  if (metric) {
    const auto rank = line.integer("rank");
    if (rank && *rank >= 0 && *rank <= std::numeric_limits<int>::max()) point.rank = static_cast<int>(*rank);
  }
  for (const RecordLine::Field& field : line.fields) {
    const auto value = number_of(field);
    if (!value) continue;
    point.name = field.name;
    if (metric) {
      if (!point.name.starts_with(kValues)) continue;
      point.name.remove_prefix(kValues.size());
    } else if (communication) {
      if (point.name.starts_with(kOperations)) point.name.remove_prefix(kOperations.size());
      name_.assign("communication/").append(point.name);
      point.name = name_;
    } else if (point.name == "step") {
      continue;
    }
    point.value = *value;
    take(point);
  }
}

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

namespace {

constexpr std::size_t kBlock = std::size_t{1} << 20;
constexpr std::size_t kLongestLine = std::size_t{256} << 20;

sys::UniqueFd open_record(const std::filesystem::path& record) {
  sys::UniqueFd fd(::open(record.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat status {};
  if (fd && ::fstat(fd.get(), &status) == 0 && S_ISREG(status.st_mode)) return fd;
  const int error = fd ? EISDIR : errno;
  raise(error == ENOENT ? ErrorCode::Unavailable : ErrorCode::Io,
        "reading the run record failed -- {} -- {} -- a run's folder, or its run.jsonl, is wanted", record.string(),
        fd ? "it is no regular file" : errno_text(error));
}

}  // namespace

bool LineReader::fill() {
  // Reads from the line's beginning each time, since a line without an end may have been cut off and written again.
  for (std::size_t block = kBlock;; block *= 2) {
    if (block > kLongestLine) {
      raise(ErrorCode::Corrupt, "reading the run record failed -- {} -- the line at byte {} is longer than {} MiB",
            path_, offset_, kLongestLine >> 20);
    }
    buffer_.resize(block);
    used_ = 0;
    std::size_t got = 0;
    while (got < block) {
      const ssize_t bytes = ::pread(fd_, buffer_.data() + got, block - got, static_cast<off_t>(offset_ + got));
      if (bytes < 0 && errno == EINTR) continue;
      if (bytes < 0) raise(ErrorCode::Io, "reading the run record failed -- {} -- {}", path_, errno_text(errno));
      const bool at_end = static_cast<std::size_t>(bytes) < block - got;
      got += static_cast<std::size_t>(bytes);
      // Stops at the end: a later read may return bytes of another writer that has cut off part of the line.
      if (at_end) break;
    }
    buffer_.resize(got);
    const std::size_t last = buffer_.rfind('\n');
    if (last != std::string::npos) {
      buffer_.resize(last + 1);
      return true;
    }
    if (got == block) continue;
    buffer_.clear();
    struct stat status {};
    if (got == 0 && ::fstat(fd_, &status) == 0 && static_cast<std::uint64_t>(status.st_size) < offset_) {
      raise(ErrorCode::Corrupt,
            "reading the run record failed -- {} -- it has {} bytes, and {} were read before -- is it another run's?",
            path_, status.st_size, offset_);
    }
    return false;
  }
}

std::optional<std::string_view> LineReader::next() {
  if (used_ == buffer_.size() && !fill()) return std::nullopt;
  const std::string_view rest = std::string_view(buffer_).substr(used_);
  const std::string_view line = rest.substr(0, rest.find('\n'));
  used_ += line.size() + 1;
  offset_ += line.size() + 1;
  return line;
}

RecordFollower::RecordFollower(const std::filesystem::path& record)
    : fd_(open_record(record)), lines_(fd_.get(), record.string()) {
  LineReader all(fd_.get(), record.string());
  for (auto text = all.next(); text; text = all.next()) {
    if (text->find("\"resume\"") == std::string_view::npos || !line_.read(*text) || line_.event != "resume") continue;
    if (const auto step = line_.integer("step")) resumes_.push_back({all.offset() - text->size() - 1, *step});
  }
  for (std::size_t i = resumes_.size(); i > 1; --i) {
    resumes_[i - 2].step = std::min(resumes_[i - 2].step, resumes_[i - 1].step);
  }
}

bool RecordFollower::next() {
  for (auto text = lines_.next(); text; text = lines_.next()) {
    if (!line_.read(*text)) {
      if (text->find_first_not_of(" \t\r") != std::string_view::npos) ++damaged_;
      continue;
    }
    const std::uint64_t begin = lines_.offset() - text->size() - 1;
    while (passed_resumes_ < resumes_.size() && resumes_[passed_resumes_].offset <= begin) ++passed_resumes_;
    step_ = line_.integer("step").value_or(step_);
    superseded_ = passed_resumes_ < resumes_.size() && step_ > resumes_[passed_resumes_].step;
    return true;
  }
  return false;
}

void raise_io(const AppendTo& to, int error) {
  raise(ErrorCode::Io, "{} failed -- {} -- {} -- is there space, and may this user write there?", to.what,
        to.file.string(), errno_text(error));
}

void append_all(const AppendTo& to, std::string_view bytes) {
  struct stat status {};
  const bool sized = ::fstat(to.fd, &status) == 0 && S_ISREG(status.st_mode);
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t wrote = ::write(to.fd, bytes.data() + done, bytes.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      const int error = errno;
      if (done > 0 && sized && ::ftruncate(to.fd, status.st_size) != 0) {
        log::warn("track", "{}: its end is torn: {}", to.file.string(), errno_text(errno));
      }
      raise_io(to, error);
    }
    done += static_cast<std::size_t>(wrote);
  }
}

namespace {

constexpr std::size_t kMostValues = 64;

/// Looks up a parameter of the run by its usual names.
std::optional<double> parameter(const RecordLine& line, std::initializer_list<const char*> names) {
  for (const char* const name : names) {
    const auto value = line.number(fmt::format("parameters/{}", name));
    if (value && *value > 0 && std::isfinite(*value)) return value;
  }
  return std::nullopt;
}

std::optional<double> share(std::optional<double> part, std::optional<double> whole) {
  if (!part || !whole || !std::isfinite(*part)) return std::nullopt;
  return std::clamp(*part / *whole, 0.0, 1.0);
}

}  // namespace

void RunProgress::take(const RecordLine& line) {
  time_ = line.time.value_or(time_);
  if (line.event == "start") {
    epochs_ = parameter(line, {"epochs", "num_epochs", "max_epochs"});
    steps_ = parameter(line, {"steps", "max_steps", "total_steps", "num_steps"});
    ended_ = false;
  }
  if (line.event == "start" || line.event == "resume") first_done_.reset();
  if (line.event == "end") ended_ = true;
  if (const auto step = line.number("step")) step_ = step;
  if (const auto epoch = line.number("epoch")) epoch_ = epoch;
  if (const auto epoch = line.number("values/epoch")) epoch_ = epoch;
  points_.read(line, [this](const MetricPoint& point) {
    if (point.rank || point.name == "epoch" || point.name.starts_with("communication/")) return;
    const auto known = values_.find(point.name);
    if (known != values_.end()) {
      known->second = point.value;
    } else if (values_.size() < kMostValues) {
      values_.emplace(point.name, point.value);
    }
  });
  const auto now = done();
  if (now && !first_done_ && line.event != "start") {
    first_done_ = now;
    first_time_ = time_;
  }
}

std::optional<double> RunProgress::done() const {
  if (ended_) return 1;
  const auto by_epoch = share(epoch_, epochs_), by_step = share(step_, steps_);
  // If epochs are counted at their ends, there is no progress by epochs during the first one.
  return by_epoch && (*by_epoch > 0 || !by_step) ? by_epoch : by_step;
}

std::optional<double> RunProgress::remaining_seconds() const {
  const auto now = done();
  if (!now) return std::nullopt;
  if (*now >= 1) return 0;
  if (!first_done_ || *now <= *first_done_ || time_ <= first_time_) return std::nullopt;
  return (1 - *now) * (time_ - first_time_) / (*now - *first_done_);
}

}  // namespace cohort::track
