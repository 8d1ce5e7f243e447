// A run record as a run of MLflow, over its REST interface: parameters, metrics with the record's own times, the state
// at the end, record and curves as artifacts. The record is the queue: what the server has is kept in a file beside it,
// so that neither a server that is away nor a sink that is killed loses a point; sent twice, a point is stored once.
#pragma once

#include "export/export.h"
#include "export/mlflow_server.h"
#include "shared/destination.h"
#include "telemetry/record.h"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::track {

struct MlflowSinkOptions {
  std::filesystem::path record;
  MlflowServerOptions server;
  std::chrono::milliseconds interval;  ///< at least that long between two batches that are not full
};

/// A run that it was given (`MlflowPlace::run`) is written into, and its state is left to whose it is.
class MlflowSink final : public Sink {
 public:
  /// Finds the experiment, or makes it. Throws as MlflowServer.
  explicit MlflowSink(MlflowSinkOptions options);

  void take(const SinkLine& line) override;
  /// MLflow keeps what it was told: the older points stay.
  Replay go_back(std::int64_t step, double time) override;
  void flush() override { send_if_due(); }
  void idle() override { send_if_due(); }
  void finish(RunState state) override;

 private:
  using Clock = std::chrono::steady_clock;

  std::string find_experiment();
  void open_run(const RecordLine& line);
  void make_run(const RecordLine& line);
  bool find_made_run();
  void set_status(std::string_view status, std::optional<std::int64_t> end);
  void take_start(const RecordLine& line, bool is_new);
  void set_parameters(const std::vector<std::pair<std::string, std::string>>& parameters);
  void set_tags(const std::vector<std::pair<std::string, std::string>>& tags);
  void add(const MetricPoint& point);
  const std::string& key_of(const MetricPoint& point);
  void send_if_due();
  void send();
  bool send_artifacts();  ///< false: some were refused, which has been told
  void tell_where() const;
  std::string shown_run() const;

  MlflowSinkOptions options_;
  MlflowServer server_;
  const bool own_run_;
  std::string experiment_;
  std::optional<MlflowState> state_;  // once there is a line
  PointReader points_;
  std::map<std::string, std::string> parameters_;  // of the record's first start
  int starts_ = 0;
  std::int64_t last_time_ = 0;
  std::map<std::pair<std::string, std::optional<int>>, std::string> keys_;  // in JSON
  std::string batch_;
  std::size_t in_batch_ = 0;
  std::uint64_t batch_end_ = 0;  // of the last line that is in it as a whole
  Clock::time_point sent_ = Clock::time_point::min();
};

}  // namespace cohort::track
