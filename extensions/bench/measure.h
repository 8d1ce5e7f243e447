// Measurements, and the events by which ranks report them to the process that prints: JSON objects, one per line. Plain
// values; any thread.
// The measurement: all ranks of a world together measure every row of a plan.
// The ranks of a benchmark: a job that this command starts, threads of this process, or the job that it is part of. No
// rank outlives the call, not even after an error. For the main thread.
#pragma once

#include "bench/collective.h"

#include <cohort/communicator.h>

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace cohort::app::bench {

/// The out-of-place or in-place half of a row. Times are microseconds of the slowest rank of each call.
struct Side {
  double time = 0;  ///< median; with `in_a_row`, of consecutive calls
  bool in_a_row = false;
  double p50 = 0, p90 = 0, p99 = 0, p99_9 = 0, max = 0;  ///< percentiles of calls that were timed individually
  int calls = 0;                                         ///< number of such calls
  std::int64_t wrong = -1;                               ///< number of wrong elements on all ranks; -1: not compared
  double algbw = 0, busbw = 0;                           ///< GB/s (10^9)
  double bound = 0;                                      ///< lower bound of the time, in microseconds
};

struct Row {
  std::string collective;
  int ranks = 1;
  std::string memory;
  std::string state;
  std::size_t bytes = 0;
  std::int64_t count = 0;
  std::string type;
  std::string op;          ///< "none" without a reduction
  int root = -1;           ///< -1 without a root
  double memory_rate = 0;  ///< GB/s that one rank reads and writes while all ranks do so; 0: not measured
  std::optional<Side> out_of_place, in_place;
};

/// The in-place side if there is one. Printed percentiles, and per cent of the bound, are from this side.
const Side& main_side(const Row& row);

nlohmann::json to_json(const Row& row);
/// Inverse of `to_json`.
Row row_from(const nlohmann::json& event);

/// `{"event": "world" | "row", ...}` from rank 0.
using Emit = std::function<void(const nlohmann::json& event)>;

/// Percentile by nearest rank; `sorted` is ascending and not empty.
double percentile(const std::vector<double>& sorted, double share);

/// Throws InvalidArgument if the plan's root is not below `ranks`.
void check_root(const Plan& plan, int ranks);

/// Runs the ranks as processes on this host, each with this command's arguments behind `kAsRank`. Throws what `run_job`
/// does.
void run_on_processes(int ranks, const Emit& emit);
inline constexpr const char* kAsRank = "--as-rank";
/// Runs this process as one of those ranks; rank 0 emits to stdout.
void be_rank(const Plan& plan);
/// Runs the ranks as threads of this process.
void run_on_threads(int ranks, const Plan& plan, const Emit& emit);

/// Returns whether a launcher has started this process as a rank. Throws InvalidArgument if its variables contradict
/// each other.
bool inside_a_job();
/// Forms that job's world. Calls `emit` only on rank 0.
void run_in_job(const Plan& plan, const Emit& emit);

// The printed table, with the columns that nccl-tests made customary, and more. Belongs to the thread that prints.
// The rows of a benchmark as curves. Pure; any thread.
class Table {
 public:
  explicit Table(std::FILE* stream) : stream_(stream) {}

  void header(const nlohmann::json& machine);
  void world(const nlohmann::json& world, const std::string& kind, int cores);
  /// Prints a row, after a new heading if collective, ranks or memory have changed.
  void row(const Row& row);
  /// Prints the use of the machine during the measurement, in cores.
  void footer(double others, double stolen);

 private:
  void heading(const Row& row);
  std::FILE* stream_;
  std::string heading_;
  std::int64_t wrong_ = 0;
};

/// Returns an SVG: for each collective a panel of times over sizes, and with only one collective a panel of bus
/// bandwidths. Both axes are logarithmic; each number of ranks, kind of memory, type and reduction has a curve.
std::string draw(const std::vector<Row>& rows, const nlohmann::json& machine);

}  // namespace cohort::app::bench
