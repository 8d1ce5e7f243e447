// A run record as a run of Weights & Biases, through its own client (wandb_run.py), in a process beside this one. The
// record is the queue: it determines the run's id, so that a restarted export continues the same run.
#pragma once

#include "export/export.h"
#include "export/python_child.h"
#include "shared/destination.h"
#include "telemetry/record.h"

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>

namespace cohort::track {

/// The client skips repeated steps, which it already has. A client that ends is an error: another export sends the
/// rest.
class WandbSink final : public Sink {
 public:
  WandbSink(WandbPlace place, std::filesystem::path record, std::function<void(const std::string&)> say)
      : place_(std::move(place)), record_(std::move(record)), say_(std::move(say)) {}

  void take(const SinkLine& line) override;
  void flush() override;
  void finish(RunState state) override;

 private:
  void open_run(const RecordLine& line);
  [[noreturn]] void fail_with(const std::string& said) const;

  WandbPlace place_;
  std::filesystem::path record_;
  std::function<void(const std::string&)> say_;
  std::optional<PythonChild> client_;  ///< set with the first line
  PointReader points_;
  std::string lines_;  ///< not yet sent to the client
};

}  // namespace cohort::track
