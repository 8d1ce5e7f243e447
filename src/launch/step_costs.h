// Breaks down the time of a job's steps, from the figures that the ranks report when they end, and estimates the step
// time with fewer bytes between hosts, fewer synchronisations or another distribution of the samples. Pure; any thread.
#pragma once

#include "launch/rank_report.h"

#include <cohort/dtype.h>

#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// Figures that a rank reports when it ends: `times` of the event `rank_ended`.
struct RankTimes {
  int rank = 0;
  std::string host;
  double steps = 0, seconds = 0;
  double operations = 0, bytes = 0;                    ///< number of its collectives; bytes of this rank's payload
  double busy = 0, waited = 0, wire = 0, exposed = 0;  ///< seconds
  double wire_bytes = 0;
};
RankTimes times_of(int rank, const std::string& host, const TimesReport& report);

/// Shares of a step in seconds, as the program sees it.
struct StepShares {
  double compute = 0;  ///< the rest of the step
  double waiting = 0;  ///< waiting for slower ranks to reach an operation
  double local = 0;    ///< reductions on the host
  double wire = 0;     ///< waiting for bytes of other hosts
  double step() const noexcept { return compute + waiting + local + wire; }
};

struct StepCosts {
  int processes = 1;
  int hosts = 1;
  double steps = 0;             ///< number of measured steps
  double seconds = 0;           ///< duration of these steps, or of the whole program
  StepShares step;              ///< mean over the ranks
  double operations = 0;        ///< operations of a rank in a step
  double bytes = 0;             ///< bytes of a rank's collectives in a step
  double busy_wire = 0;         ///< seconds of a step in which operations waited for the wire, hidden or not
  double wire_bytes = 0;        ///< bytes that a host sends in a step; the maximum over the hosts
  double slowest_compute = 0;   ///< compute seconds per step of the slowest rank
  double median_compute = 0;    ///< median of the compute seconds per step
  double balanced_compute = 0;  ///< compute seconds if each rank had samples according to its speed
  int slowest_rank = -1;
  std::string slowest_host;
  bool waits_seen = true;  ///< false: no rank's waits were seen, so the program waits where it is not measured
};

/// Returns false if some rank took no timed steps: then nothing is known.
bool takes_steps(const std::vector<RankTimes>& ranks);
/// Returns the costs of ranks that take steps; `hosts`: number of hosts of the job.
StepCosts costs_of(const std::vector<RankTimes>& ranks, int hosts);

/// Costs of a wire format.
struct FormatCosts {
  WireFormat format = WireFormat::None;
  double ratio = 1;                     ///< bytes on the wire for a byte of float32
  double encode_ns = 0, decode_ns = 0;  ///< time for a byte of float32, on one core
};
/// Returns the bytes that a host sends, relative to sending its sums as float32: below 1 with another format; 0 if
/// there are no sums over all ranks, or if nothing goes to other hosts.
double present_ratio(const StepCosts& costs) noexcept;
/// Returns the bytes on the wire for a byte of float32.
double ratio_of(WireFormat format) noexcept;
/// Returns bfloat16, int8 and int4, with the codec times measured on the development machine.
std::vector<FormatCosts> usual_formats();

/// Further facts that an estimate needs.
struct PlanFacts {
  std::vector<FormatCosts> formats = usual_formats();
  double latency = 0;  ///< seconds that the smallest operation between these hosts takes; 0: not measured
};

struct Change {
  enum class Kind { Shares, Format, Buckets, LocalSteps, FewerRanks };
  Kind kind;
  std::string what;  ///< "int8 on the wire"
  double step = 0;   ///< estimated seconds of a step
  double wire = 0;   ///< part of `step` spent on the wire
};

/// Returns all possible changes, whether or not they help. Comparing them with the bytes that the program gave to its
/// collectives shows which data already travels in a smaller format.
std::vector<Change> changes_of(const StepCosts& costs, const PlanFacts& facts);

/// Returns the change to make, if any pays: the mildest one within 5 % of the best. Suggests fewer synchronisations,
/// which change the training, only if the wire would still take a third of a step.
std::optional<Change> best_of(const std::vector<Change>& changes, const StepCosts& costs);

/// Returns advice such as "62 % of each step (118 ms of 190 ms) is waiting for the wire (...): int8 on the wire would
/// make a step 98 ms, 1.94 times as fast"; empty if the steps are not known or nothing pays.
std::string advice_of(const StepCosts& costs, const PlanFacts& facts);
/// Returns why nothing pays: "the wire is hidden behind computing: ...".
std::string no_advice_of(const StepCosts& costs);

/// Returns "12.5 MB", "98 MB": three digits, powers of 1000.
std::string bytes_in_words(double bytes);
/// Returns "8.20 s", "41.3 ms".
std::string seconds_in_words(double seconds);
/// Returns 98.0, 9.80: three digits.
std::string three_digits(double value);

}  // namespace cohort::launch
