// A run record as a run of MLflow, over its REST interface: parameters, metrics with the record's own times, the state
// at the end, record and curves as artifacts. The record is the queue: what the server has is kept in a file beside it,
// so that neither a server that is away nor a sink that is killed loses a point; sent twice, a point is stored once.
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

// Talks to an MLflow server, or to a store of its without one, and goes on trying while it is away. One thread. Never
// shows what lets it in.
// A store of MLflow that has no server, a database of SQLite or a folder: Python's mlflow opens it, in a process that
// answers on loopback what MLflow's server would (mlflow_store.py), to this one alone. It ends with the thread that
// made it. One thread.

// Position up to which a record has been sent to an MLflow server, in a file beside the record: a restarted sink
// continues there. One process at a time has it (it is locked). One thread.

/// Cuts `text` to at most `most` bytes, and whole characters.
std::string shortened(std::string text, std::size_t most);
/// A name that MLflow takes for a metric or a parameter: other characters are '_', and it has at most 250 bytes.
std::string mlflow_key(std::string_view name);

struct MlflowProgress {
  std::string to;      ///< server, experiment and run, as they were asked for
  std::string record;  ///< which one: a digest of its first line
  std::string intent;  ///< a tag of the run that is about to be made
  std::string run, experiment;
  std::uint64_t offset = 0;  ///< the record's bytes before it have been sent
  bool ended = false;        ///< the run has its state
  bool artifacts = false;    ///< and its files

  /// Reads the file's text; empty if `text` is not of such a file.
  static MlflowProgress read(std::string_view text);
  std::string text() const;
};

class MlflowState {
 public:
  /// mlflow-*.state beside `record`, one for each `to`. Throws Io; Unavailable where another process has it.
  MlflowState(const std::filesystem::path& record, const std::string& to);

  /// Progress for the same record; otherwise empty but for `to` and `record`.
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
  /// Waits; true: the caller wants to stop.
  std::function<bool(std::chrono::milliseconds)> wait;
  /// For people: that the server is away, that it is back.
  std::function<void(const std::string&)> say;
  std::chrono::milliseconds patience;  ///< with a server that is away; a 15th of it where none has ever answered
  std::chrono::milliseconds first_wait = std::chrono::milliseconds(500);  ///< before the second try; then twice as long
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
    std::string message;  ///< and why
    std::string body;

    bool good() const noexcept { return status >= 200 && status < 300; }
  };

  /// `path` below /api/2.0/. A server that does not answer, or is in trouble (5xx, 429), is asked again; the answer
  /// returned is good, or a refusal (4xx). Throws Unavailable after the timeout, when the caller wants to stop, and if
  /// access is denied (401, 403).
  Answer get(const std::string& path);
  /// `done_already`: asked before another try whether one before has arrived after all; nothing more is sent then.
  Answer post(const std::string& path, const std::string& body, const std::function<bool()>& done_already = {});
  /// Tried three times: where files lie is often another server, which may refuse what this one takes.
  Answer put_file(const std::string& path, const std::filesystem::path& file);

  /// Throws Unavailable with what the server said: "WHAT failed -- SERVER -- MESSAGE".
  [[noreturn]] void refused(const std::string& what, const Answer& answer) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The body of an answer; an empty object if it is none.
nlohmann::json body_of(const MlflowServer::Answer& answer);

class MlflowStore {
 public:
  /// Waits until it answers. Throws Unavailable where there is no python3 in PATH with MLflow, or no such store, with
  /// what it said and the way out.
  explicit MlflowStore(const std::string& uri);

  const std::string& server() const noexcept { return server_; }  ///< "http://127.0.0.1:PORT"
  const std::string& token() const noexcept { return token_; }
  bool has_ended() const { return child_.has_ended(); }

 private:
  std::string server_, token_;
  PythonChild child_;  // what it has answered is in the store
};

struct MlflowSinkOptions {
  std::filesystem::path record;
  MlflowServerOptions server;
  std::chrono::milliseconds interval;  ///< at least that long between two batches that are not full
};

/// When a run goes back to an earlier step, MLflow keeps what was sent. A given run (`MlflowPlace::run`) is written
/// into, and its state is left to its owner.
class MlflowSink final : public Sink {
 public:
  /// Finds the experiment, or makes it. Throws as MlflowServer.
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
  bool send_artifacts();  ///< false: some were refused, which has been reported
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
