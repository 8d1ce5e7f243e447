// A run record's values as a table: RFC 4180, a row for each, for spreadsheets and pandas.
#pragma once

#include "track/points.h"
#include "track/sinks/sink.h"

#include "sys/unique_fd.h"

#include <filesystem>
#include <string>

namespace cohort::track {

/// Columns time, step, rank (empty: of the run), name, value. Rows are appended whole; what is not finite is NaN,
/// Infinity or -Infinity.
class CsvSink final : public Sink {
 public:
  /// Replaces the file. Throws Io.
  explicit CsvSink(std::filesystem::path file);

  void take(const SinkLine& line) override;
  Replay go_back(std::int64_t step, double time) override;
  void flush() override;
  void finish(RunState state) override;

 private:
  void begin();

  std::filesystem::path file_;
  sys::UniqueFd fd_;
  PointReader points_;
  std::string rows_;
};

}  // namespace cohort::track
