// The runs in a folder (./runs), which `cohort runs` lists and removes. A run is recognised by the files that `cohort
// run` leaves in its folder; its state and values come from the files that `cohort watch` reads. Main thread.
#pragma once

#include "observe/watch/view.h"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace cohort::watch {

struct RunSummary {
  std::string name;  ///< name of the run's folder
  std::filesystem::path folder;
  /// "running"; "finished" with status 0; "preempted": saved and ended; "stopped" by a signal to its launcher
  /// (Ctrl-C); "failed"; "lost": its launcher is gone without a report of how it ended.
  std::string state;
  bool elsewhere = false;  ///< its launcher is, or was, on another host, so that "lost" is a guess after an hour of
                           ///< silence
  int exit_status = 0;     ///< exit status of an ended run
  double started = 0;      ///< start of the ranks, in seconds since 1970; start of the launcher if there were no ranks
  double ended = 0;        ///< end, in seconds since 1970; for a running run now, for a lost one its last sign of life
  std::size_t ranks = 0;
  std::int64_t step = 0;
  std::vector<Logged> values;  ///< last values
  std::uint64_t bytes = 0;     ///< size of its folder on the disk
};

/// The runs in `folder`, in the order of their starts. Other entries are skipped. Throws Unavailable if there is no
/// such folder.
std::vector<RunSummary> list_runs(const std::filesystem::path& folder);
/// Throws InvalidArgument for a folder that is no run.
RunSummary summary_of(const std::filesystem::path& run);

std::string to_json(const std::vector<RunSummary>& runs);
/// Returns a table for people.
std::string to_table(const std::vector<RunSummary>& runs);

/// Parses "90", "90s", "15m", "12h", "30d", "4w". Throws InvalidArgument.
std::chrono::seconds parse_age(const std::string& text);

/// Throws InvalidArgument for a running run, and if its folder is or contains something else: the folder in which its
/// command was started, the working directory, another run, or files that no run makes.
void require_removable(const RunSummary& run);
/// Removes the run's folder with its contents. A kill in the middle leaves nothing that looks like a run. Throws what
/// require_removable throws, and Io.
void remove_run(const RunSummary& run);

}  // namespace cohort::watch
