// What was measured of one training: so many processes on so many hosts, and where a step's time went. Values; any
// thread.
#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace cohort::app::training {

/// Seconds of a step, as the program sees it.
struct Shares {
  double compute = 0;  ///< everything that is not the rest
  double waiting = 0;  ///< for slower ranks to come to an operation
  double local = 0;    ///< reductions on the host
  double wire = 0;     ///< for bytes of other hosts
  double step() const noexcept { return compute + waiting + local + wire; }
};

/// How `Shares` were found.
enum class Split {
  Measured,   ///< the program's waits were measured
  Estimated,  ///< the program waits where it cannot be seen: what a step takes longer than alone is taken for it
  Unknown,    ///< it counts no steps, or does nothing in Cohort's worlds
};

struct Point {
  int processes = 1;
  int hosts = 1;
  double rate = 0;     ///< samples (or runs) per second: the median of the repetitions; the rest is of that one
  double steps = 0;    ///< measured ones
  double seconds = 0;  ///< that these took, or the whole program
  double run = 0;      ///< seconds of the whole program, its start included
  Split split = Split::Unknown;
  Shares step;            ///< mean over the ranks
  double busy_wire = 0;   ///< seconds of a step in which an operation waited for the wire, seen by the program or not
  double wire_bytes = 0;  ///< that a host sends in a step, the most of all hosts
  double slowest_compute = 0;  ///< seconds of a step of the rank that computes longest,
  double median_compute = 0;   ///< and of most
  int slowest_rank = -1;
  std::string slowest_host;
  std::vector<double> rates;  ///< of all repetitions
};

/// How the work of a step goes with the number of processes.
enum class Scaling {
  PerRank,  ///< each rank has as much, however many there are: more processes do more of it
  PerStep,  ///< all together have as much: more processes share it
  Unknown,  ///< the program does not say
};

/// What the processes do in a step, and in which unit rates are.
struct Workload {
  std::string unit = "samples";  ///< or "runs"
  Scaling scaling = Scaling::Unknown;
  double batch = 0;             ///< samples of a step: of each rank, or with PerStep of all together
  double parameters_bytes = 0;  ///< of gradients; 0: not known
  int cores = 1;                ///< of a host
  bool bf16_wire = false;       ///< gradients travel between hosts in 16 bits already
};

nlohmann::ordered_json to_json(const Point& point);

}  // namespace cohort::app::training
