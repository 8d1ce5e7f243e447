// The sub-command of `cohort bench`.
// A measurement of one training: its processes and hosts, and where a step's time went. Values; any thread.
// Computes a Point from the reports of a job's ranks at their end. Pure; any thread.
// Verdict on why more hosts do, or do not, make a training faster, and what would: one sentence, computed from the
// measurements. Pure; any thread.
// The experiment as a person reads it: a table, bars, and the same as a picture. Pure; any thread.
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

/// Adds `training`, and `trainee`, which it starts.
void add_training(CLI::App& bench);

using Shares = launch::StepShares;

/// Origin of `Shares`.
enum class Split {
  Measured,   ///< the program's waits were measured
  Estimated,  ///< the program's waits are not visible: a step's extra time over that of one process alone counts as
              ///< waiting
  Unknown,    ///< the program counts no steps, or runs no operations in Cohort's worlds
};

struct Point : launch::StepCosts {
  double rate = 0;  ///< samples (or runs) per second: the median over repetitions; the other fields are of that
                    ///< repetition
  double run = 0;   ///< seconds of the whole program, its start included
  Split split = Split::Unknown;
  std::vector<double> rates;  ///< of all repetitions
};

/// Scaling of a step's work with the number of processes.
enum class Scaling {
  PerRank,  ///< the work of each rank is fixed: more processes do more work in a step
  PerStep,  ///< the work of all ranks together is fixed: more processes share it
  Unknown,  ///< the program does not say
};

/// The processes' work in a step, and the unit of rates.
struct Workload {
  std::string unit = "samples";  ///< or "runs"
  Scaling scaling = Scaling::Unknown;
  double batch = 0;                           ///< samples per step: of each rank, or with PerStep of all ranks together
  double parameters_bytes = 0;                ///< of gradients; 0: not known
  int cores = 1;                              ///< of a host
  WireFormat wire_format = WireFormat::None;  ///< format in which gradients already travel between hosts
};

nlohmann::ordered_json to_json(const Point& point);

/// Counting of samples.
struct Counting {
  double per_rank = 0;  ///< samples of each rank and step
  double per_step = 0;  ///< or samples of all ranks together; if neither is set, steps or runs are counted
};
Point point_of(const JobOutcome& outcome, int processes, int hosts, const Counting& counting);
/// "samples", "steps", "runs": what a Point of this outcome counts.
std::string unit_of(const JobOutcome& outcome, const Counting& counting);

/// The repetition with the median rate, with the rates of all. `points` is not empty.
Point median_of(std::vector<Point> points);

/// Estimates the waiting time if none of the program's waits is visible: the time by which a step exceeds that of
/// `alone` (with Scaling::PerStep: the step's share of that), divided in proportion to the operations' own times.
void estimate_split(Point& point, const Point& alone, Scaling scaling);

/// Changes that would make `more` (more hosts) faster than `fewer`, if the parts of a step behave as they were
/// measured: compute grows with the batch, the rest does not; time on the wire goes with its bytes. If the work of a
/// step is not known, there are none.
struct Remedies {
  double batch_factor = 0;                ///< helps from this many times the batch on; 0: no batch helps
  double link_factor = 0;                 ///< helps on a link this many times as fast; 0: no link helps
  std::optional<WireFormat> format = {};  ///< the mildest format that is enough, if not already in use
};
Remedies remedies_of(const Point& fewer, const Point& more, const Workload& workload);

/// `points`: the medians, at least one.
std::string verdict_of(const std::vector<Point>& points, const Workload& workload);

inline std::string bytes_text(double bytes) { return launch::bytes_in_words(bytes); }
inline std::string seconds_text(double seconds) { return launch::seconds_in_words(seconds); }

/// Points with the speed-up over the first, which has the fewest processes and hosts.
std::string table_of(const std::vector<Point>& points, const Workload& workload);
/// A bar for each point: its length is the speed-up, divided like the time of a step.
std::string bars_of(const std::vector<Point>& points, const sys::TextStyle& style);
/// The rate over processes, a curve for each number of hosts; and columns of the speed-up and of a step's time,
/// divided.
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
// layers in plain loops, since this command has no libtorch, on noise, since the digits are not installed with it.
// Computes gradients, averages each layer's over all ranks while computing the next layer's, and steps. `cohort run`
// starts it, as `cohort bench trainee`.
struct TraineeOptions {
  std::vector<int> layers = {784, 1000, 1000, 10};
  int batch = 100;     ///< samples of each rank and step
  double seconds = 3;  ///< duration of the training, which has at least 5 steps
  float rate = 0.02F;
  WireFormat wire_format = WireFormat::None;  ///< for gradients between hosts, as in AllReduceOptions
};

struct Trained {
  int steps = 0;
  double first_loss = 0, last_loss = 0;  ///< of this rank
};

/// Trains. Throws Mismatch if the ranks' weights differ at the end, Internal if they are not finite.
Trained train(Communicator& world, const TraineeOptions& options);

}  // namespace cohort::app::training
