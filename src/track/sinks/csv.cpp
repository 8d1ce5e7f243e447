#include "track/sinks/csv.h"

#include "track/append.h"

#include <fmt/format.h>

#include <fcntl.h>

#include <cerrno>
#include <cmath>
#include <iterator>

namespace cohort::track {
namespace {

constexpr std::string_view kWritingCsv = "writing the CSV file";

void add_text(std::string& row, std::string_view text) {
  if (text.find_first_of("\",\r\n") == std::string_view::npos) {
    row += text;
    return;
  }
  row += '"';
  for (const char c : text) {
    row += c;
    if (c == '"') row += c;
  }
  row += '"';
}

void add_number(std::string& row, double value) {
  if (std::isnan(value))
    row += "NaN";
  else if (std::isinf(value))
    row += value > 0 ? "Infinity" : "-Infinity";
  else
    fmt::format_to(std::back_inserter(row), "{}", value);
}

}  // namespace

CsvSink::CsvSink(std::filesystem::path file) : file_(std::move(file)) {
  if (file_.has_parent_path()) {
    std::error_code error;
    std::filesystem::create_directories(file_.parent_path(), error);
    if (error) raise_io({-1, file_, kWritingCsv}, error.value());
  }
  begin();
}

void CsvSink::begin() {
  fd_.reset(::open(file_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOCTTY, 0644));
  if (!fd_) raise_io({-1, file_, kWritingCsv}, errno);
  points_ = {};
  rows_ = "time,step,rank,name,value\r\n";
}

void CsvSink::take(const SinkLine& line) {
  if (line.superseded) return;
  points_.read(line.line, [this](const MetricPoint& point) {
    fmt::format_to(std::back_inserter(rows_), "{:.3f},{},", point.time, point.step);
    if (point.rank) fmt::format_to(std::back_inserter(rows_), "{}", *point.rank);
    rows_ += ',';
    add_text(rows_, point.name);
    rows_ += ',';
    add_number(rows_, point.value);
    rows_ += "\r\n";
  });
  if (rows_.size() >= kAppendBuffer) flush();
}

Sink::Replay CsvSink::go_back(std::int64_t /*step*/, double /*time*/) {
  begin();
  return Replay::Yes;
}

void CsvSink::flush() {
  append_all({fd_.get(), file_, kWritingCsv}, rows_);
  rows_.clear();
}

void CsvSink::finish(RunState /*state*/) { flush(); }

}  // namespace cohort::track
