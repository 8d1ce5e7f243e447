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
  Estimated,  ///< the program's waits are not visible: the extra time of a step over one alone counts as waiting
  Unknown,    ///< it counts no steps, or does nothing in Cohort's worlds
};

struct Point : launch::StepCosts {
  double rate = 0;  ///< samples (or runs) per second: the median of the repetitions; the rest is of that one
  double run = 0;   ///< seconds of the whole program, its start included
  Split split = Split::Unknown;
  std::vector<double> rates;  ///< of all repetitions
};

/// Scaling of a step's work with the number of processes.
enum class Scaling {
  PerRank,  ///< each rank has as much, however many there are: more processes do more of it
  PerStep,  ///< all together have as much: more processes share it
  Unknown,  ///< the program does not say
};

/// The processes' work in a step, and the unit of rates.
struct Workload {
  std::string unit = "samples";  ///< or "runs"
  Scaling scaling = Scaling::Unknown;
  double batch = 0;                           ///< samples of a step: of each rank, or with PerStep of all together
  double parameters_bytes = 0;                ///< of gradients; 0: not known
  int cores = 1;                              ///< of a host
  WireFormat wire_format = WireFormat::None;  ///< as which gradients travel between hosts already
};

nlohmann::ordered_json to_json(const Point& point);

/// Counting of samples.
struct Counting {
  double per_rank = 0;  ///< samples of each rank and step
  double per_step = 0;  ///< or of all together; neither: steps are counted, or runs
};
Point point_of(const JobOutcome& outcome, int processes, int hosts, const Counting& counting);
/// "samples", "steps", "runs": what a Point of this outcome counts.
std::string unit_of(const JobOutcome& outcome, const Counting& counting);

/// The repetition with the median rate, with the rates of all. `points` is not empty.
Point median_of(std::vector<Point> points);

/// Estimates the waiting time when none of the program's waits could be seen: the time by which its step exceeds that
/// of `alone` (with Scaling::PerStep: its share of that), divided as the operations' own time.
void estimate_split(Point& point, const Point& alone, Scaling scaling);

/// Changes that would make `more` (more hosts) faster than `fewer`, if the parts of a step behave as they were
/// measured: compute grows with the batch, the rest does not; time on the wire goes with its bytes. If the work of a
/// step is not known, nothing follows.
struct Remedies {
  double batch_factor = 0;                ///< from this many times the batch on; 0: no batch helps
  double link_factor = 0;                 ///< on a link this many times as fast; 0: no link helps
  std::optional<WireFormat> format = {};  ///< in this one, the mildest that is enough, if it is not used already
};
Remedies remedies_of(const Point& fewer, const Point& more, const Workload& workload);

/// `points`: the medians, at least one.
std::string verdict_of(const std::vector<Point>& points, const Workload& workload);

inline std::string bytes_text(double bytes) { return launch::bytes_in_words(bytes); }
inline std::string seconds_text(double seconds) { return launch::seconds_in_words(seconds); }

/// Points with the speed-up over the first, which has the fewest processes and hosts.
std::string table_of(const std::vector<Point>& points, const Workload& workload);
/// A bar for each point: as long as its speed-up, divided as a step of it is.
std::string bars_of(const std::vector<Point>& points, const sys::TextStyle& style);
/// The rate over processes, a curve for each number of hosts; and columns of the speed-up and of a step's time,
/// divided.
std::string svg_of(const std::vector<Point>& points, const Workload& workload, const std::string& subtitle);

/// Text with the parts of a step, its time after each change, and the change to make or why there is none.
std::string plan_text(const launch::StepCosts& costs, const launch::PlanFacts& facts);
/// Times of this machine's codecs.
std::vector<launch::FormatCosts> measured_formats();
/// Seconds of an operation between the hosts of `request`, however small; 0 if there is no wire. Runs a job.
double latency_of(JobRequest request, const launch::StepCosts& costs);
/// The part of a rank of that job: rank 0 prints it.
void tell_latency(Communicator& world);

// One rank of the training that `cohort bench training` measures where it is given no command: a network of fully
// connected layers in plain loops, since this command has no libtorch, on noise, since the digits are not
// installed with it. Computes gradients, has each layer's averaged over all ranks while it goes on with the next, and
// steps. `cohort run` starts it, as `cohort bench trainee`.
struct TraineeOptions {
  std::vector<int> layers = {784, 1000, 1000, 10};
  int batch = 100;     ///< samples of each rank and step
  double seconds = 3;  ///< to train; at least 5 steps
  float rate = 0.02F;
  WireFormat wire_format = WireFormat::None;  ///< of gradients between hosts, as of AllReduceOptions
};

struct Trained {
  int steps = 0;
  double first_loss = 0, last_loss = 0;  ///< of this rank
};

/// Trains, and makes sure that all ranks have the same weights at the end: throws Mismatch if not, Internal if they are
/// no numbers.
Trained train(Communicator& world, const TraineeOptions& options);

}  // namespace cohort::app::training
