// live.json has the state of a run, rank by rank. The launcher writes it while the run goes on, and viewers read it.
// Plain data, converted to text and back; docs/reference/run-record.md has the fields. The text may have been written
// by another build, so unknown fields are ignored, missing ones have their defaults. The ranks' figures are pure: they
// take reports and the time, on one thread. LiveFile writes the file on a thread of its own.
#pragma once

#include "base/result.h"
#include "launch/output/run_folder.h"
#include "launch/rank_report.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace cohort::launch {

struct RankFigures {
  std::string state = "starting";  ///< "running", "waiting", "saving", "stopped", "ended" or "failed"
  std::string doing;               ///< "waiting in all_reduce(float32[10], sum), operation 17"
  std::int64_t step = 0;           ///< optimizer steps so far
  std::int64_t samples = 0;        ///< samples in these steps; 0: not known
  double steps_per_second = 0;
  double samples_per_second = 0;
  double exposed = 0;        ///< share of time in which the program did nothing but wait for collectives
  double waited = 0;         ///< share in which it waited for other ranks to reach collectives
  double waited_for = 0;     ///< share in which others waited for this rank
  std::uint64_t memory = 0;  ///< resident, in bytes
  double cpu = 0;            ///< number of cores kept busy
};

/// Progress of each rank in figures for people: steps and samples per second, its waits, the ranks that others wait
/// for, its memory. Computed from the ranks' own reports of the last seconds. The figures are valid numbers, whatever a
/// rank has written into its page.
///
/// Late ranks are found without comparing clocks. Ranks that meet wait for the last of them, so the others wait for the
/// rank that waits least, and the difference of the waits is its delay.
class Figures {
 public:
  using Clock = std::chrono::steady_clock;
  /// Period of shares and rates, if ranks take steps that often.
  static constexpr std::chrono::seconds kWindow{10};

  /// `others`: number of processes behind the ranks; their roles wait for nobody.
  explicit Figures(int ranks, int others = 0)
      : workers_(static_cast<std::size_t>(ranks)), ranks_(static_cast<std::size_t>(ranks + others)) {}

  /// Sets the number of ranks; the job has no other processes.
  void grow(int ranks) { ranks_.resize(workers_ = static_cast<std::size_t>(ranks)); }
  void report(const RankReport& report, Clock::time_point now);
  /// Called when another process is started in place of the rank's.
  void begins_anew(int rank);
  /// `how`: exit status, as text.
  void ended(int rank, bool well, std::string how);
  /// Returns the figures by process.
  std::vector<RankFigures> look(Clock::time_point now) const;

 private:
  struct Waits {
    Clock::time_point at{};
    std::uint64_t waited_ns = 0;
    std::uint64_t exposed_ns = 0;
    std::uint64_t cpu_ms = 0;
  };
  struct Steps {
    Clock::time_point at{};
    std::int64_t step = 0;
    std::int64_t samples = 0;
  };
  struct Rank {
    RankFigures figures;
    bool known = false;
    bool gone = false;
    std::uint64_t operation = 0;             ///< number of the operation that the rank waits in
    std::optional<Clock::time_point> since;  ///< when this wait was first seen; nullopt: it does not wait
    std::deque<Waits> waits;                 ///< about one a second, and the latest
    std::deque<Steps> steps;                 ///< when a step was first seen, about one a second, and the latest
  };
  static void add_waits(Rank& rank, const RankReport& report, Clock::time_point now);
  static void add_steps(Rank& rank, const RankReport& report, Clock::time_point now);

  std::size_t workers_;
  std::vector<Rank> ranks_;
};

inline constexpr const char* kLiveFile = "live.json";

struct LiveHost {
  std::string name;
  int first_rank = 0;
  int ranks = 0;
  // The host's GPUs, used by any process; filled if the agent has found a driver.
  int gpus = 0;
  double gpu = -1;               ///< mean use, 0 to 1, of the GPUs whose driver reports it; -1: none
  std::int64_t gpu_memory = -1;  ///< memory in use on these GPUs, in bytes
};

void describe_gpus(const std::vector<GpuUse>& gpus, LiveHost& host);

struct LiveRank {
  RankFigures figures;
  std::string line;  ///< the last line that it printed
};

/// A process of another role than the ranks'.
struct LiveOther {
  std::string name;  ///< "server 0", "evaluator"
  std::string host;
  std::string state;  ///< as RankFigures::state
  std::uint64_t memory = 0;
  std::string line;
  int restarts = 0;  ///< how often this process alone has been started again
};

/// Members of an elastic job.
struct LiveMembers {
  std::uint64_t epoch = 0;
  int size = 0;
  std::string workers;  ///< numbers of the workers, by rank: "0,2-3"
  std::string cause;    ///< why the members last changed
  double since = 0;
  std::int64_t form_ms = -1;  ///< time that they took to form a world; -1: not yet
};

/// A message of the launcher.
struct LiveNotice {
  double time = 0;
  std::string text;
};

/// Times are seconds since 1970.
struct LiveRun {
  double time = 0;  ///< time of this state
  std::string job;
  std::string program;
  std::string state = "starting";  ///< "running", "ending", "ended"
  double start = 0;                ///< start of the ranks; 0: not yet
  std::optional<int> exit_status;
  std::string reason;  ///< why the run was ended; empty: it ended by itself
  int restarts = 0;    ///< restarts so far
  std::string logs;    ///< folder of the logs; empty: none
  std::vector<LiveHost> hosts;
  std::vector<LiveNotice> notices;  ///< the last few
  std::vector<LiveRank> ranks;
  int first_rank = 0;  ///< rank of the first of `ranks`, if these are only a part
  std::vector<LiveOther> others;
  std::optional<LiveMembers> members;  ///< set if the job is elastic
};

std::string to_json(const LiveRun& run);
/// Returns a line of usage.jsonl: an event `metric` of the resources that processes and GPUs use, by host.
std::string usage_line(const LiveRun& run, const std::map<std::string, std::vector<GpuUse>>& gpus);
/// Fails with Corrupt on a text that is not of this kind.
Result<LiveRun> parse_live_run(std::string_view text);

/// Returns seconds since 1970.
double seconds_now();

/// Writes live.json into a run's folder, on a thread of its own, since the folder may be on a slow network file system,
/// and the launcher waits for no viewer. Methods belong to one thread.
class LiveFile {
 public:
  /// `folder` outlives this.
  explicit LiveFile(const RunFolder& folder) : folder_(folder) {}
  /// Writes the latest run that it got.
  ~LiveFile();
  LiveFile(const LiveFile&) = delete;
  LiveFile& operator=(const LiveFile&) = delete;

  /// Returns true once the last LiveRun is written and some time has passed, so that the next may be written.
  bool due() const noexcept { return due_.load(std::memory_order_relaxed); }
  void write(LiveRun run);
  /// Returns why the file cannot be written, once for each reason.
  std::optional<std::string> complaint();

 private:
  void work();

  const RunFolder& folder_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<LiveRun> next_;
  bool closing_ = false;
  std::optional<std::string> complaint_;
  bool complained_ = false;
  std::atomic<bool> due_{true};
  std::thread thread_;
};

}  // namespace cohort::launch
