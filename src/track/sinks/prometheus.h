// A run record as metrics of Prometheus: a text file for node-exporter's textfile collector, or for a web server.
#pragma once

#include "track/points.h"
#include "track/sinks/sink.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace cohort::track {

enum class PrometheusFormat {
  Text,         ///< 0.0.4, which node-exporter reads
  OpenMetrics,  ///< 1.0.0
};

/// Holds the latest values and the totals, and replaces the file as a whole. Values that the run logged are
/// cohort_metric{name="..."}; labels never hold a step.
class PrometheusSink final : public Sink {
 public:
  PrometheusSink(std::filesystem::path file, PrometheusFormat format);

  void take(const SinkLine& line) override;
  Replay go_back(std::int64_t step, double time) override;
  void flush() override;
  void finish(RunState state) override;

  /// What `flush` writes.
  std::string text() const;

 private:
  struct Operation {
    double count = 0, bytes = 0, seconds = 0, waited = 0, failed = 0;
  };
  struct Totals {
    double samples = 0, steps = 0, step_seconds = 0, exposed_seconds = 0, restarts = 0;
    std::map<std::string, Operation, std::less<>> operations;
  };
  void add_communication(const RecordLine& line);

  std::filesystem::path file_;
  PrometheusFormat format_;
  PointReader points_;
  std::string job_, program_, host_;
  bool started_ = false;
  RunState state_ = RunState::Running;
  std::optional<double> step_, epoch_, world_size_, checkpoint_step_, checkpoint_time_;
  std::map<std::pair<std::string, std::optional<int>>, double> values_;
  Totals totals_;
};

}  // namespace cohort::track
