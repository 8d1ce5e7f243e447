// Exports a run record to a sink, either once or while the run goes on. One thread.
#pragma once

#include "telemetry/record.h"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace cohort::track {

// Destinations for the lines of a run record: TensorBoard, a CSV file, Prometheus, MLflow. One thread of a separate
// process feeds a Sink, and never the training. The record is the queue, so a slow sink blocks nobody else. Methods
// throw cohort::Error for failures that are not temporary.
struct SinkLine {
  const RecordLine& line;
  bool superseded = false;  ///< the run repeated the line's step
  std::uint64_t end = 0;    ///< offset of the next line
};

enum class RunState { Running, Finished, Failed, Killed };

class Sink {
 public:
  enum class Replay { No, Yes };

  virtual ~Sink() = default;
  virtual void take(const SinkLine& line) = 0;
  /// Called when the followed run went back to `step`: lines of later steps are invalid. Returns Yes if the sink has
  /// dropped all its lines, and needs every line again.
  virtual Replay go_back(std::int64_t /*step*/, double /*time*/) { return Replay::No; }
  /// Makes the lines taken so far visible to others.
  virtual void flush() = 0;
  /// Called when there was nothing new for an interval.
  virtual void idle() {}
  /// Called after the last line.
  virtual void finish(RunState state) = 0;
};

struct SinkOptions {
  bool openmetrics = false;           ///< prometheus:FILE: OpenMetrics 1.0; otherwise text format 0.0.4
  std::string token_file = {};        ///< prometheus:HOST:PORT: token for clients; only loopback may go without
  std::filesystem::path record = {};  ///< the record; MLflow's state and the warnings are beside it
  /// For prometheus and kubeflow: called to report where the metrics are, and that a server does not answer.
  std::function<void(const std::string&)> say = {};
  std::chrono::milliseconds patience = std::chrono::minutes(15);  ///< mlflow: limit if a server does not answer
};

/// "tensorboard:DIR", "csv:FILE", "prometheus:FILE", "prometheus:HOST:PORT", "mlflow:URI", "wandb:PROJECT", "kubeflow".
/// Throws InvalidArgument, naming the kinds; Io; Unavailable.
std::unique_ptr<Sink> make_sink(const std::string& destination, const SinkOptions& options = {});

struct ExportRequest {
  std::filesystem::path record;
  Sink* sink = nullptr;        ///< not owned
  bool may_be_absent = false;  ///< true: a job that ends without a record is no failure
  /// Empty: only the present lines are read. Else reads until the run has ended, which is checked after each
  /// `interval`; `wait` waits that long and returns whether to stop early; lines that are there by then are still read.
  std::function<bool(std::chrono::milliseconds)> wait = {};
  std::chrono::milliseconds interval = std::chrono::milliseconds(250);
};

struct ExportSummary {
  std::uint64_t events = 0;
  std::uint64_t superseded = 0;  ///< lines of steps that the run repeated
  std::uint64_t damaged = 0;     ///< lines that are no events
  std::map<std::string, std::uint64_t> unknown =
      {};                    ///< events with names that are not in the schema, whose contents are ignored
  bool without_end = false;  ///< no file says how the run ended: it counts as killed
  RunState state = RunState::Running;
};

/// Feeds the sink. For a run of `cohort run`, job.json beside the record says when the run has ended and how; otherwise
/// an `end` line does, with no line after it for two seconds. Throws as RecordFollower and the sink do; Corrupt if
/// there are lines, but not one event.
ExportSummary export_record(const ExportRequest& request);

}  // namespace cohort::track
