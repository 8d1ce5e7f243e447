// TensorBoard's event files: records of length, checksum, payload, checksum; the payload is a protobuf Event. Writes,
// without a protobuf library, only what scalars need. One thread. Exports a run record to a folder of TensorBoard:
// scalars of the run in DIR, those of rank R alone in DIR/rankR, which TensorBoard overlays.
#pragma once

#include "base/unique_fd.h"
#include "export/export.h"
#include "telemetry/record.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::track {

/// CRC-32C (Castagnoli).
std::uint32_t crc32c(std::string_view bytes) noexcept;

/// The values of one step.
class ScalarEvent {
 public:
  void begin(double wall_time, std::int64_t step);
  /// `tag` has to be UTF-8, or protobuf's readers refuse it; text from JSON is.
  void add(std::string_view tag, float value);
  bool empty() const noexcept { return summary_.empty(); }
  /// The protobuf message Event. Valid until the next call.
  const std::string& payload();

 private:
  std::string event_, summary_, value_;
};

/// A file that only this process appends to. `flush` writes added points as a whole; points not flushed are lost on
/// destruction.
class EventFile {
 public:
  /// Creates `folder`, and in it a file with a new name that sorts after those of earlier files. Throws Io.
  explicit EventFile(const std::filesystem::path& folder);

  void add(std::string_view payload);
  /// Writes a mark that readers take as a restart: points of `step` and later in other files are then invalid.
  void add_restart(double wall_time, std::int64_t step);
  void flush();

  /// True if EventFile has made a file of this name.
  static bool made(std::string_view name) noexcept;

 private:
  std::filesystem::path file_;
  sys::UniqueFd fd_;
  std::string buffer_;
};

/// A run that goes back while it is followed begins new files after a restart mark: readers differ in the treatment of
/// the older points (TensorBoard's default reader drops them). An export after the run does not contain these points.
class TensorBoardSink final : public Sink {
 public:
  /// Removes an earlier export's files from `folder`. Throws InvalidArgument if there are other programs' event files;
  /// Io.
  explicit TensorBoardSink(std::filesystem::path folder);

  void take(const SinkLine& line) override;
  Replay go_back(std::int64_t step, double time) override;
  void flush() override;
  void finish(RunState state) override;

 private:
  EventFile& file(std::optional<int> rank);

  std::filesystem::path folder_;
  std::map<std::optional<int>, EventFile> files_;
  PointReader points_;
  ScalarEvent event_;
};

}  // namespace cohort::track
