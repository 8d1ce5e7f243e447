// The sub-command of `cohort bench`.
// A measurement of one training: its processes and hosts, and how a step's time was spent. Plain values; any thread.
// Computes a Point from the reports that a job's ranks make at their end. Pure; any thread.
// Verdict: one sentence, computed from the measurements, on why more hosts do or do not make a training faster, and on
// what would make it faster. Pure; any thread.
// The experiment for people: a table, bars, and a picture with the same. Pure; any thread.
#pragma once

#include "base/result.h"
#include "base/terminal.h"
#include "launch/step_costs.h"
#include "shared/child_job.h"

#include <cohort/communicator.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <vector>

namespace cohort::app::training {

/// Adds `training`, and the `trainee` that it starts.
void add_training(CLI::App& bench);

using Shares = launch::StepShares;

/// Origin of `Shares`.
enum class Split {
  Measured,   ///< the program's waits were measured
  Estimated,  ///< the waits are not visible; extra time of a step compared with a single process counts as waiting
  Unknown,    ///< the program counts no steps, or runs no operations in Cohort's worlds
};

struct Point : launch::StepCosts {
  double rate = 0;  ///< samples (or runs) per second, the median over repetitions; other fields are from that
                    ///< repetition
  double run = 0;   ///< seconds of the whole program, including its start
  Split split = Split::Unknown;
  std::vector<double> rates;  ///< rates of all repetitions
};

/// Scaling of a step's work with the number of processes.
enum class Scaling {
  PerRank,  ///< the work of each rank is fixed, so more processes do more work in a step
  PerStep,  ///< the work of all ranks together is fixed, and more processes share it
  Unknown,  ///< the program does not say
};

/// The processes' work in a step, and the unit of rates.
struct Workload {
  std::string unit = "samples";  ///< or "runs"
  Scaling scaling = Scaling::Unknown;
  double batch = 0;                           ///< samples per step, of each rank, or of all ranks together with PerStep
  double parameters_bytes = 0;                ///< bytes of gradients; 0: not known
  int cores = 1;                              ///< cores of a host
  WireFormat wire_format = WireFormat::None;  ///< format in which gradients already travel between hosts
};

nlohmann::ordered_json to_json(const Point& point);

/// Counting of samples.
struct Counting {
  double per_rank = 0;  ///< samples of each rank and step
  double per_step = 0;  ///< or samples of all ranks together; if neither is set, steps or runs are counted
};
Point point_of(const JobOutcome& outcome, int processes, int hosts, const Counting& counting);
/// Returns the unit that a Point of this outcome counts: "samples", "steps" or "runs".
std::string unit_of(const JobOutcome& outcome, const Counting& counting);

/// Returns the repetition with the median rate, and puts the rates of all into it. `points` is not empty.
Point median_of(std::vector<Point> points);

/// Estimates the waiting time if none of the program's waits is visible: the time by which a step exceeds a step of
/// `alone` (with Scaling::PerStep, the share of such a step), divided in proportion to the operations' own times.
void estimate_split(Point& point, const Point& alone, Scaling scaling);

/// Changes that would make `more` (more hosts) faster than `fewer`, if the parts of a step behave as measured: compute
/// grows with the batch and the rest does not; time on the wire is proportional to its bytes. If the work of a step is
/// not known, there are no remedies.
struct Remedies {
  double batch_factor = 0;                ///< a batch at least this many times as large helps; 0: no batch helps
  double link_factor = 0;                 ///< a link at least this many times as fast helps; 0: no link helps
  std::optional<WireFormat> format = {};  ///< the mildest format that is enough, if not already in use
};
Remedies remedies_of(const Point& fewer, const Point& more, const Workload& workload);

/// `points`: the medians of the setups, at least one.
std::string verdict_of(const std::vector<Point>& points, const Workload& workload);

inline std::string bytes_text(double bytes) { return launch::bytes_in_words(bytes); }
inline std::string seconds_text(double seconds) { return launch::seconds_in_words(seconds); }

/// Table of points, with the speed-up over the first one, which has the fewest processes and hosts.
std::string table_of(const std::vector<Point>& points, const Workload& workload);
/// A bar for each point: its length is the speed-up, divided like the time of a step.
std::string bars_of(const std::vector<Point>& points, const sys::TextStyle& style);
/// Picture with the rate over processes (a curve for each number of hosts), and columns of the speed-up and of a step's
/// time, divided into parts.
std::string svg_of(const std::vector<Point>& points, const Workload& workload, const std::string& subtitle);

/// Text with the parts of a step, its time after each change, and the change to make or why there is none.
std::string plan_text(const launch::StepCosts& costs, const launch::PlanFacts& facts);
/// Times of this machine's codecs.
std::vector<launch::FormatCosts> measured_formats();
/// Seconds of the smallest operation between the hosts of `request`; 0 if all are on one host. Runs a job.
double latency_of(JobRequest request, const launch::StepCosts& costs);
/// Runs a rank of that job; rank 0 prints the result.
void tell_latency(Communicator& world);

// One rank of the training that `cohort bench training` measures if no command is given: a network of fully connected
// layers, in plain loops, since this command has no libtorch. It trains on noise, since the digits are not installed
// with the command. In each step, it computes gradients, and averages each layer's over all ranks while it computes the
// next layer's. `cohort run` starts it, as `cohort bench trainee`.
struct TraineeOptions {
  std::vector<int> layers = {784, 1000, 1000, 10};
  int batch = 100;     ///< samples of each rank and step
  double seconds = 3;  ///< duration of the training, which has at least 5 steps
  float rate = 0.02F;
  WireFormat wire_format = WireFormat::None;  ///< format of gradients between hosts, as in AllReduceOptions
};

struct Trained {
  int steps = 0;
  double first_loss = 0, last_loss = 0;  ///< losses of this rank
};

/// Trains. Throws Mismatch if the ranks' weights differ at the end, Internal if they are not finite.
Trained train(Communicator& world, const TraineeOptions& options);

}  // namespace cohort::app::training
