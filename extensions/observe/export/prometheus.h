// Exports a run record as metrics of Prometheus: a text file for node-exporter's textfile collector, or a port to
// scrape.
#pragma once

#include "net/address.h"
#include "observe/export/export.h"
#include "telemetry/record.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace cohort::track {

enum class PrometheusFormat {
  Text,         ///< 0.0.4, which node-exporter reads
  OpenMetrics,  ///< 1.0.0
};

/// Holds the latest values and the totals. Values logged by the run are cohort_metric{name="..."}; labels never contain
/// a step.
class PrometheusSink : public Sink {
 public:
  void take(const SinkLine& line) override;
  void flush() final;
  void idle() final;
  void finish(RunState state) override;

  /// Sets the file of the launcher's warnings (warnings.jsonl), which may not exist yet.
  void count_warnings_of(std::filesystem::path file) { warnings_file_ = std::move(file); }
  std::string text(PrometheusFormat format) const;

 protected:
  /// Makes the result of `text` visible to others.
  virtual void publish() = 0;

 private:
  struct Operation {
    double count = 0, bytes = 0, seconds = 0, waited = 0, failed = 0;
  };
  struct Totals {
    double samples = 0, steps = 0, step_seconds = 0, exposed_seconds = 0, restarts = 0;
    std::map<std::string, Operation, std::less<>> operations;
  };
  void add_communication(const RecordLine& line);
  /// Counts warnings; returns whether there are new ones.
  bool count_warnings();

  PointReader points_;
  std::string job_, program_, host_;
  bool started_ = false;
  RunState state_ = RunState::Running;
  std::optional<double> step_, epoch_, world_size_, checkpoint_step_, checkpoint_time_;
  std::map<std::pair<std::string, std::optional<int>>, double> values_;
  Totals totals_;
  std::filesystem::path warnings_file_;
  std::map<std::string, double> warnings_;  // by kind
};

/// Replaces the file as a whole.
class PrometheusFile final : public PrometheusSink {
 public:
  PrometheusFile(std::filesystem::path file, PrometheusFormat format);

 private:
  void publish() override;

  std::filesystem::path file_;
  PrometheusFormat format_;
};

/// Serves /metrics, in the format that the client asks for, until destruction.
class PrometheusPort final : public PrometheusSink {
 public:
  /// Throws what net::HttpServer throws.
  PrometheusPort(const net::Address& at, std::string token);
  ~PrometheusPort() override;
  /// Address with the port that the system has chosen.
  const net::Address& address() const noexcept;

 private:
  void publish() override;

  struct Page;
  std::unique_ptr<Page> page_;
};

}  // namespace cohort::track
