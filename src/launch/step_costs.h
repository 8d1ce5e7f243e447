// Breaks down the time of a job's steps, from what its ranks said at their end, and estimates a step with fewer bytes
// between hosts, fewer synchronisations or other shares of the samples. Pure; any thread.
#pragma once

#include "launch/rank_report.h"

#include <cohort/dtype.h>

#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// A rank at its end: `times` of the event `rank_ended`.
struct RankTimes {
  int rank = 0;
  std::string host;
  double steps = 0, seconds = 0;
  double operations = 0, bytes = 0;                    ///< of its collectives; of this rank's payload
  double busy = 0, waited = 0, wire = 0, exposed = 0;  ///< seconds
  double wire_bytes = 0;
};
RankTimes times_of(int rank, const std::string& host, const TimesReport& report);

/// Seconds of a step, as the program sees it.
struct StepShares {
  double compute = 0;  ///< everything that is not the rest
  double waiting = 0;  ///< for slower ranks to come to an operation
  double local = 0;    ///< reductions on the host
  double wire = 0;     ///< for bytes of other hosts
  double step() const noexcept { return compute + waiting + local + wire; }
};

struct StepCosts {
  int processes = 1;
  int hosts = 1;
  double steps = 0;       ///< measured ones
  double seconds = 0;     ///< that these took, or the whole program
  StepShares step;        ///< mean over the ranks
  double operations = 0;  ///< of a rank in a step
  double bytes = 0;       ///< of a rank's collectives in a step
  double busy_wire = 0;   ///< seconds of a step in which an operation waited for the wire, seen by the program or not
  double wire_bytes = 0;  ///< that a host sends in a step, the most of all hosts
  double slowest_compute = 0;   ///< seconds of a step of the rank that computes longest,
  double median_compute = 0;    ///< and of most,
  double balanced_compute = 0;  ///< and of all, if each had samples by its speed
  int slowest_rank = -1;
  std::string slowest_host;
  bool waits_seen = true;  ///< false: no rank's waits were, so the program waits where it cannot be seen
};

/// False where some rank took no steps that are timed: then nothing is known.
bool takes_steps(const std::vector<RankTimes>& ranks);
/// Costs of ranks that take steps; `hosts`: number of hosts of the job.
StepCosts costs_of(const std::vector<RankTimes>& ranks, int hosts);

/// Costs of a wire format.
struct FormatCosts {
  WireFormat format = WireFormat::None;
  double ratio = 1;                     ///< bytes on the wire for a byte of float32
  double encode_ns = 0, decode_ns = 0;  ///< of a byte of float32, on one core
};
/// Bytes that a host sends for those of its sums as float32: below 1 in another format; 0: they are no sums over all
/// ranks, or nothing goes to other hosts.
double present_ratio(const StepCosts& costs) noexcept;
/// Bytes on the wire for a byte of float32.
double ratio_of(WireFormat format) noexcept;
/// bfloat16, int8, int4, with what codecs took on the development machine.
std::vector<FormatCosts> usual_formats();

/// Further facts that an estimate needs.
struct PlanFacts {
  std::vector<FormatCosts> formats = usual_formats();
  double latency = 0;  ///< seconds of an operation between these hosts, however small; 0: not measured
};

struct Change {
  enum class Kind { Shares, Format, Buckets, LocalSteps, FewerRanks };
  Kind kind;
  std::string what;  ///< "int8 on the wire"
  double step = 0;   ///< seconds that one would take
  double wire = 0;   ///< of that
};

/// The changes that are possible, whatever they bring. What is on the wire in fewer bytes already is found by comparing
/// these with what the program gave to its collectives.
std::vector<Change> changes_of(const StepCosts& costs, const PlanFacts& facts);

/// The one to make, if any pays: the mildest of those that bring within 5 % of the best; fewer
/// synchronisations, which change what is trained, where the wire would still take a third of a step.
std::optional<Change> best_of(const std::vector<Change>& changes, const StepCosts& costs);

/// "62 % of each step (118 ms of 190 ms) is waiting for the wire (...): int8 on the wire would make a step 98 ms, 1.94
/// times as fast"; empty where the steps are not known or nothing pays.
std::string advice_of(const StepCosts& costs, const PlanFacts& facts);
/// Why nothing pays, in words: "the wire is hidden behind computing: ...".
std::string no_advice_of(const StepCosts& costs);

/// "12.5 MB", "98 MB": three digits, powers of 1000.
std::string bytes_in_words(double bytes);
/// "8.20 s", "41.3 ms".
std::string seconds_in_words(double seconds);
/// 98.0, 9.80: three digits.
std::string three_digits(double value);

}  // namespace cohort::launch
