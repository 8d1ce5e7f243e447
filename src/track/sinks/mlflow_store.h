// A store of MLflow that has no server, a database of SQLite or a folder: Python's mlflow opens it, in a process that
// answers on loopback what MLflow's server would (mlflow_store.py), to this one alone. It ends with the thread that
// made it. One thread.
#pragma once

#include "sys/process.h"
#include "sys/unique_fd.h"

#include <string>

namespace cohort::track {

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
