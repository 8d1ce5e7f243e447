// How far a record has got into an MLflow server, in a file beside the record: a sink that was killed goes on there.
// One process at a time has it (it is locked). One thread.
#pragma once

#include "base/unique_fd.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace cohort::track {

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

}  // namespace cohort::track
