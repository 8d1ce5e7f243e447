// From a run record to a sink, once or for as long as the run goes on. One thread.
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

// Destinations for the lines of a run record: TensorBoard, a CSV file, Prometheus, MLflow. A Sink is fed by one thread
// of a process of its own, never by the training: the record is the queue, and a slow sink blocks nobody else. Methods
// throw cohort::Error for failures that waiting does not cure.
struct SinkLine {
  const RecordLine& line;
  bool superseded = false;  ///< the run did its step again
  std::uint64_t end = 0;    ///< offset of the line after it
};

enum class RunState { Running, Finished, Failed, Killed };

class Sink {
 public:
  enum class Replay { No, Yes };

  virtual ~Sink() = default;
  virtual void take(const SinkLine& line) = 0;
  /// The run went back to `step` while it was followed: lines of later steps count no more. Yes: the sink has dropped
  /// all that it had, and wants every line again.
  virtual Replay go_back(std::int64_t /*step*/, double /*time*/) { return Replay::No; }
  /// Makes the lines taken so far visible to others.
  virtual void flush() = 0;
  /// Called when there was nothing new for an interval.
  virtual void idle() {}
  /// There will be nothing more.
  virtual void finish(RunState state) = 0;
};

struct SinkOptions {
  bool openmetrics = false;           ///< prometheus:FILE: OpenMetrics 1.0; otherwise text format 0.0.4
  std::string token_file = {};        ///< prometheus:HOST:PORT: what lets a client in; only loopback goes without
  std::filesystem::path record = {};  ///< what is beside it: MLflow's state, warnings
  /// mlflow: waits, and says whether to stop; default: it only waits.
  std::function<bool(std::chrono::milliseconds)> wait = {};
  /// Tells where the run or its metrics are, and of a server that is away.
  std::function<void(const std::string&)> say = {};
  std::chrono::milliseconds patience = std::chrono::minutes(15);  ///< mlflow: with a server that does not answer
};

/// "tensorboard:DIR", "csv:FILE", "prometheus:FILE", "prometheus:HOST:PORT", "mlflow:URI", "wandb:PROJECT", "kubeflow".
/// Throws InvalidArgument, with those that there are, Io, and Unavailable.
std::unique_ptr<Sink> make_sink(const std::string& destination, const SinkOptions& options = {});

struct ExportRequest {
  std::filesystem::path record;
  Sink* sink = nullptr;        ///< not owned
  bool may_be_absent = false;  ///< a job that ends without a record is no failure
  /// Empty: only the present lines are read. Else reads until the run has ended, which is checked after each
  /// `interval`; `wait` waits for that long and says whether to stop early: lines there by then are still read.
  std::function<bool(std::chrono::milliseconds)> wait = {};
  std::chrono::milliseconds interval = std::chrono::milliseconds(250);
};

struct ExportSummary {
  std::uint64_t events = 0;
  std::uint64_t superseded = 0;  ///< of these: of steps that the run did again
  std::uint64_t damaged = 0;     ///< lines that are no events
  std::map<std::string, std::uint64_t> unknown =
      {};                    ///< events of other names than the schema's: their contents are ignored
  bool without_end = false;  ///< nothing says how the run ended: it is taken for killed
  RunState state = RunState::Running;
};

/// Feeds the sink. For a run of `cohort run`, job.json beside the record says when it has ended and how; else its `end`
/// line does, with nothing after it for two seconds. Throws as RecordFollower and the sink do; Corrupt if there are
/// lines, but not one event.
ExportSummary export_record(const ExportRequest& request);

}  // namespace cohort::track
