// Talks to an MLflow server, or to a store of its without one, and goes on trying while it is away. One thread. Never
// shows what lets it in.
// A store of MLflow that has no server, a database of SQLite or a folder: Python's mlflow opens it, in a process that
// answers on loopback what MLflow's server would (mlflow_store.py), to this one alone. It ends with the thread that
// made it. One thread.
#pragma once

#include "base/process.h"
#include "base/unique_fd.h"
#include "shared/destination.h"

#include <nlohmann/json_fwd.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace cohort::track {

// How far a record has got into an MLflow server, in a file beside the record: a sink that was killed goes on there.
// One process at a time has it (it is locked). One thread.

/// A name that MLflow takes for a metric or a parameter: other characters are '_', and it has at most 250 bytes.
std::string mlflow_key(std::string_view name);

struct MlflowProgress {
  std::string to;      ///< server, experiment and run, as they were asked for
  std::string record;  ///< which one: a digest of its first line
  std::string intent;  ///< a tag of the run that is about to be made
  std::string run, experiment;
  std::uint64_t offset = 0;  ///< what is before it in the record is there
  bool ended = false;        ///< the run has its state
  bool artifacts = false;    ///< and its files

  /// Nothing of what it was, if `text` is no such file's.
  static MlflowProgress read(std::string_view text);
  std::string text() const;
};

class MlflowState {
 public:
  /// mlflow-*.state beside `record`, one for each `to`. Throws Io; Unavailable where another process has it.
  MlflowState(const std::filesystem::path& record, const std::string& to);

  /// Of the same record; otherwise empty but for `to` and `record`.
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
  /// Waits; true: whoever called wants to stop.
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

  /// `path` below /api/2.0/. A server that does not answer, or is in trouble (5xx, 429), is asked again; what is
  /// returned is good, or a refusal (4xx). Throws Unavailable where patience, or the caller's wish to go on, has ended,
  /// and where nobody is let in (401, 403).
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
  ~MlflowStore();
  MlflowStore(const MlflowStore&) = delete;
  MlflowStore& operator=(const MlflowStore&) = delete;

  const std::string& server() const noexcept { return server_; }  ///< "http://127.0.0.1:PORT"
  const std::string& token() const noexcept { return token_; }
  bool has_ended() const;

 private:
  void end() const;

  std::string server_, token_;
  sys::ChildProcess process_;
};

}  // namespace cohort::track
