// A run record as a run of MLflow, TensorBoard or Weights & Biases, written by their own Python clients (client_run.py)
// in a process beside this one; that process gets the record's lines in chunks, and answers each. One thread.
#pragma once

#include "observe/export/export.h"
#include "observe/export/python_child.h"
#include "shared/destination.h"
#include "telemetry/record.h"

#include <chrono>
#include <filesystem>
#include <string>

namespace cohort::track {

enum class Client { Mlflow, TensorBoard, Wandb };

struct ClientSinkOptions {
  Client client;
  ClientPlace place;
  std::filesystem::path record;
  std::chrono::milliseconds patience;  ///< MLflow: limit if a server does not answer
};

/// If the client ends, that is an error; another export sends the rest.
class ClientSink final : public Sink {
 public:
  /// Throws Unavailable, with a remedy, if the client is not installed or refuses the destination.
  explicit ClientSink(const ClientSinkOptions& options);

  void take(const SinkLine& line) override;
  Replay go_back(std::int64_t step, double time) override;
  void flush() override;
  void idle() override { flush(); }
  void finish(RunState state) override;

 private:
  /// Ends the chunk, and waits until the client has taken it.
  void ask();

  Client client_;
  std::filesystem::path record_;
  std::chrono::milliseconds limit_;
  PythonChild child_;
  PointReader points_;
  std::string chunk_;
  bool more_ = false;  ///< the client keeps values of the last chunk until the next one
};

}  // namespace cohort::track
