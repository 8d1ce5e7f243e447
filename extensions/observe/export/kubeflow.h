// Reports a run's progress to Kubeflow's trainer (KEP-2779). If the trainer has put the address of its status server
// into the environment, posts progress, remaining time and the latest values there every few seconds. A server that is
// unreachable, or refuses, is reported once; the run goes on. One thread.
#pragma once

#include "observe/export/export.h"
#include "shared/destination.h"
#include "telemetry/record.h"

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace cohort::track {

/// The body of a request. `now`: seconds since 1970.
std::string kubeflow_status(const RunProgress& progress, double now);

class KubeflowSink final : public Sink {
 public:
  KubeflowSink(KubeflowPlace place, std::function<void(const std::string&)> say,
               std::chrono::milliseconds interval = std::chrono::seconds(5));
  ~KubeflowSink() override;

  void take(const SinkLine& line) override;
  void flush() override;
  void idle() override { flush(); }
  void finish(RunState state) override;

 private:
  struct Client;
  void post();

  std::function<void(const std::string&)> say_;
  std::chrono::milliseconds interval_;
  std::unique_ptr<Client> client_;
  RunProgress progress_;
  bool news_ = false, complained_ = false;
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace cohort::track
