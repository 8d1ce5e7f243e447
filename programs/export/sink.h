// Where the lines of a run record go besides the record: TensorBoard, a CSV file, Prometheus, MLflow. A Sink is fed by
// one thread of a process of its own, never by the training: the record is the queue, and a sink that is slow blocks
// nobody else. Methods throw cohort::Error for what waiting does not cure.
#pragma once

#include "telemetry/record.h"

#include <cstdint>

namespace cohort::track {

struct SinkLine {
  const RecordLine& line;
  bool superseded = false;  ///< the run did its step again
  std::uint64_t end = 0;    ///< where the line after it begins
};

enum class RunState { Running, Finished, Failed, Killed };

class Sink {
 public:
  enum class Replay { No, Yes };

  virtual ~Sink() = default;
  virtual void take(const SinkLine& line) = 0;
  /// The run went on after `step` while it was followed: what was taken of later steps counts no more. Yes: the sink
  /// has let go of all that it had, and wants every line again.
  virtual Replay go_back(std::int64_t step, double time) = 0;
  /// What was taken shall be where others find it.
  virtual void flush() = 0;
  /// There was nothing new for an interval.
  virtual void idle() {}
  /// There will be nothing more.
  virtual void finish(RunState state) = 0;
};

}  // namespace cohort::track
