// From a run record to a sink, once or for as long as the run goes on. One thread.
#pragma once

#include "track/sinks/sink.h"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

namespace cohort::track {

struct SinkOptions {
  bool openmetrics = false;           ///< prometheus: OpenMetrics 1.0; otherwise text format 0.0.4
  std::filesystem::path record = {};  ///< mlflow: what is beside it says how far it has got
  /// mlflow: waits, and says whether to stop; default: it only waits.
  std::function<bool(std::chrono::milliseconds)> wait = {};
  /// mlflow: tells where the run is, and of a server that is away.
  std::function<void(const std::string&)> say = {};
  std::chrono::milliseconds patience = std::chrono::minutes(15);  ///< mlflow: with a server that does not answer
};

/// "tensorboard:DIR", "csv:FILE", "prometheus:FILE", "mlflow:URI". Throws InvalidArgument, with those that there are,
/// Io, and Unavailable.
std::unique_ptr<Sink> make_sink(const std::string& destination, const SinkOptions& options = {});
/// Throws what make_sink would throw without looking at files or servers.
void check_destination(const std::string& destination);

struct ExportRequest {
  std::filesystem::path record;
  Sink* sink = nullptr;  ///< not owned
  /// Empty: what is there. Else until the run has ended, which is asked after each `interval`; it waits for that long
  /// and says whether to stop before: what is there by then is still read.
  std::function<bool(std::chrono::milliseconds)> wait = {};
  std::chrono::milliseconds interval = std::chrono::milliseconds(250);
};

struct ExportSummary {
  std::uint64_t events = 0;
  std::uint64_t superseded = 0;  ///< of these: of steps that the run did again
  std::uint64_t damaged = 0;     ///< lines that are no events
  RunState state = RunState::Running;
};

/// Feeds the sink. Where the run is one of `cohort run`, job.json beside the record says when it has ended and how;
/// else its `end` line does, with nothing after it for two seconds. Throws as RecordFollower and the sink do; Corrupt
/// if there are lines, but not one event.
ExportSummary export_record(const ExportRequest& request);

}  // namespace cohort::track
