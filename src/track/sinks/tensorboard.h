// A run record as a folder of TensorBoard: scalars of the run in DIR, those of rank R alone in DIR/rankR, which
// TensorBoard lays over each other.
#pragma once

#include "track/points.h"
#include "track/sinks/event_file.h"
#include "track/sinks/sink.h"

#include <filesystem>
#include <map>
#include <optional>

namespace cohort::track {

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
