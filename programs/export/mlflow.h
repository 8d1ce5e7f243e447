// A run record as a run of MLflow, over its REST interface: parameters, metrics with the record's own times, the state
// at the end, record and curves as artifacts. The record is the queue: a file beside it says what the server has, so
// that no point is lost if the server does not answer or the sink is killed. A point sent twice is stored once.
#pragma once

#include "base/unique_fd.h"
#include "export/export.h"
#include "export/python_child.h"
#include "shared/destination.h"
#include "telemetry/record.h"

#include <nlohmann/json_fwd.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::track {

// Talks to an MLflow server, or to an MLflow store without one, and retries while there is no answer. One thread. Never
// shows credentials. A store without a server is a SQLite database or a folder: a process with Python's mlflow
// (mlflow_store.py) opens it, and answers this process alone on loopback, as MLflow's server would. That process ends
// with the thread that made it.

// Position up to which a record has been sent to an MLflow server, in a file beside the record: a restarted sink
// continues there. One process at a time has it (it is locked). One thread.

/// Cuts `text` to at most `most` bytes, and whole characters.
std::string shortened(std::string text, std::size_t most);
/// A name that MLflow accepts for a metric or a parameter: other characters become '_', and it has at most 250 bytes.
std::string mlflow_key(std::string_view name);

struct MlflowProgress {
  std::string to;      ///< server, experiment and run, as requested
  std::string record;  ///< identifies the record: a digest of its first line
  std::string intent;  ///< a tag of the run to be created next
  std::string run, experiment;
  std::uint64_t offset = 0;  ///< the record's bytes before this offset have been sent
  bool ended = false;        ///< the run's final state has been sent
  bool artifacts = false;    ///< the run's files have been sent

  /// Parses a file's text; empty progress if `text` is invalid.
  static MlflowProgress read(std::string_view text);
  std::string text() const;
};

class MlflowState {
 public:
  /// mlflow-*.state beside `record`, one for each `to`. Throws Io; Unavailable if another process uses it.
  MlflowState(const std::filesystem::path& record, const std::string& to);

  /// Progress of this record; if the file is of another record, empty except `to` and `record`.
  MlflowProgress progress;
  /// Throws Io.
  void save();
  const std::filesystem::path& file() const noexcept { return file_; }

 private:
  std::filesystem::path file_;
  sys::UniqueFd fd_;
};

struct MlflowServerOptions {
  MlflowPlace place;
  /// Waits; returns true if the caller wants to stop.
  std::function<bool(std::chrono::milliseconds)> wait;
  /// Reports to people that the server does not answer, and that it answers again.
  std::function<void(const std::string&)> say;
  std::chrono::milliseconds patience;  ///< how long to retry without an answer; a 15th if the server has never answered
  std::chrono::milliseconds first_wait = std::chrono::milliseconds(500);  ///< before the second try; doubled for each
                                                                          ///< further try
};

class MlflowServer {
 public:
  /// Throws as MlflowStore.
  explicit MlflowServer(MlflowServerOptions options);
  ~MlflowServer();
  MlflowServer(const MlflowServer&) = delete;
  MlflowServer& operator=(const MlflowServer&) = delete;

  struct Answer {
    int status = 0;
    std::string code;     ///< MLflow's, as RESOURCE_DOES_NOT_EXIST
    std::string message;  ///< MLflow's explanation
    std::string body;

    bool good() const noexcept { return status >= 200 && status < 300; }
  };

  /// Gets `path` below /api/2.0/. Retries if the server does not answer, or has an error (5xx, 429); returns a success
  /// or a refusal (4xx). Throws Unavailable after the timeout, when the caller wants to stop, and if access is denied
  /// (401, 403).
  Answer get(const std::string& path);
  /// Before each retry, `done_already` tells whether an earlier try has arrived after all; then nothing more is sent.
  Answer post(const std::string& path, const std::string& body, const std::function<bool()>& done_already = {});
  /// Tries three times: files often lie on another server, which may refuse what this one accepts.
  Answer put_file(const std::string& path, const std::filesystem::path& file);

  /// Throws Unavailable with what the server said: "WHAT failed -- SERVER -- MESSAGE".
  [[noreturn]] void refused(const std::string& what, const Answer& answer) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The answer's body as JSON; an empty object if it is not an object.
nlohmann::json body_of(const MlflowServer::Answer& answer);

class MlflowStore {
 public:
  /// Waits until the store answers. Throws Unavailable, with the process's message and a remedy, if there is no python3
  /// in PATH with MLflow, or no such store.
  explicit MlflowStore(const std::string& uri);

  const std::string& server() const noexcept { return server_; }  ///< "http://127.0.0.1:PORT"
  const std::string& token() const noexcept { return token_; }
  bool has_ended() const { return child_.has_ended(); }

 private:
  std::string server_, token_;
  PythonChild child_;  // whatever it has acknowledged is in the store
};

struct MlflowSinkOptions {
  std::filesystem::path record;
  MlflowServerOptions server;
  std::chrono::milliseconds interval;  ///< least time between two batches that are not full
};

/// When a run goes back to an earlier step, MLflow keeps what was sent. The sink writes into a given run
/// (`MlflowPlace::run`), and leaves the run's state to its owner.
class MlflowSink final : public Sink {
 public:
  /// Finds the experiment, or creates it. Throws as MlflowServer.
  explicit MlflowSink(MlflowSinkOptions options);

  void take(const SinkLine& line) override;
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
  bool send_artifacts();  ///< false: some were refused, as already reported
  void tell_where() const;
  std::string shown_run() const;

  MlflowSinkOptions options_;
  MlflowServer server_;
  const bool own_run_;
  std::string experiment_;
  std::optional<MlflowState> state_;  // set with the first line
  PointReader points_;
  std::map<std::string, std::string> parameters_;  // those of the record's first `start` line
  int starts_ = 0;
  std::int64_t last_time_ = 0;
  std::map<std::pair<std::string, std::optional<int>>, std::string> keys_;  // in JSON
  std::string batch_;
  std::size_t in_batch_ = 0;
  std::uint64_t batch_end_ = 0;  // offset of the last line that is wholly in the batch
  Clock::time_point sent_ = Clock::time_point::min();
};

}  // namespace cohort::track
