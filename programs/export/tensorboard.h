// TensorBoard's event files: records of length, checksum, payload, checksum; the payload is a protobuf Event. Only what
// scalars need is written, by hand. One thread.
// A run record as a folder of TensorBoard: scalars of the run in DIR, those of rank R alone in DIR/rankR, which
// TensorBoard lays over each other.
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
  /// A tag that is no UTF-8 is refused by protobuf's readers: JSON, which it comes from, has none.
  void add(std::string_view tag, float value);
  bool empty() const noexcept { return summary_.empty(); }
  /// The protobuf message Event. Valid until the next call.
  const std::string& payload();

 private:
  std::string event_, summary_, value_;
};

/// A file that only this process writes, and only appends to. Added points reach it whole, at `flush`; points not
/// flushed are lost on destruction.
class EventFile {
 public:
  /// Makes `folder`, and in it a file of a name of its own that sorts after those that were made before. Throws Io.
  explicit EventFile(const std::filesystem::path& folder);

  void add(std::string_view payload);
  /// Writes a mark that readers take as a restart: points of `step` and later in other files count no more.
  void add_restart(double wall_time, std::int64_t step);
  void flush();

  /// Returns whether a file of this name is one that EventFile has made.
  static bool made(std::string_view name) noexcept;

 private:
  std::filesystem::path file_;
  sys::UniqueFd fd_;
  std::string buffer_;
};

/// A run that goes back while it is followed begins new files after a restart mark: readers differ in what they make of
/// the older points (TensorBoard's default reader lets go of them). Exported afterwards, they are not there.
class TensorBoardSink final : public Sink {
 public:
  /// Removes what an earlier export has left in `folder`. Throws InvalidArgument if there are event files of somebody
  /// else, Io.
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
