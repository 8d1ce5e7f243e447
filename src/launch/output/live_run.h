// live.json: how far a run is, rank by rank, as the launcher writes it while the run goes on and whoever shows the run
// reads it. Plain data and its two directions; docs/reference/run-record.md has the fields. What is read was written by
// another process, maybe of another build: unknown fields are passed over, missing ones have their defaults. The ranks'
// figures are pure: they take reports and the time, on one thread. LiveFile writes the file on a thread of its own.
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
  std::int64_t samples = 0;        ///< in these; 0: not known
  double steps_per_second = 0;
  double samples_per_second = 0;
  double exposed = 0;        ///< share of the time in which the program did nothing but wait for collectives
  double waited = 0;         ///< share in which it waited for ranks to come to them
  double waited_for = 0;     ///< share in which others waited for this one
  std::uint64_t memory = 0;  ///< resident, in bytes
  double cpu = 0;            ///< cores that it has kept busy
};

/// How each rank gets on, in figures that people look at: steps and samples per second, what it waits, who the others
/// wait for, its memory. Made of what the ranks report about themselves, over the last seconds. Whatever a rank has
/// written into its page, the figures are numbers.
///
/// Late ranks are known without clocks: ranks that meet wait for the last of them, so the one that waits less than the
/// others is the one they wait for, by the difference.
class Figures {
 public:
  using Clock = std::chrono::steady_clock;
  /// Time that shares and rates refer to, if ranks take a step as often as that.
  static constexpr std::chrono::seconds kWindow{10};

  /// `others`: processes behind the ranks, of roles that wait for nobody.
  explicit Figures(int ranks, int others = 0)
      : workers_(static_cast<std::size_t>(ranks)), ranks_(static_cast<std::size_t>(ranks + others)) {}

  /// More ranks; there are no other processes.
  void grow(int ranks) { ranks_.resize(workers_ = static_cast<std::size_t>(ranks)); }
  void report(const RankReport& report, Clock::time_point now);
  /// Another process is started in its place.
  void begins_anew(int rank);
  /// `how`: its status, as text.
  void ended(int rank, bool well, std::string how);
  /// By process.
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
    std::uint64_t operation = 0;             ///< what it waits in,
    std::optional<Clock::time_point> since;  ///< and when it was first seen to; or it does not
    std::deque<Waits> waits;                 ///< about one a second, and the last
    std::deque<Steps> steps;                 ///< when a step was first seen, about one a second, and the last
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
  // The host's GPUs, whoever uses them; filled if the agent has found a driver.
  int gpus = 0;
  double gpu = -1;               ///< the mean use, 0 to 1, of those whose driver tells it; -1: of none
  std::int64_t gpu_memory = -1;  ///< of these, in bytes
};

void describe_gpus(const std::vector<GpuUse>& gpus, LiveHost& host);

struct LiveRank {
  RankFigures figures;
  std::string line;  ///< the last that it printed
};

/// A process of another role than the ranks'.
struct LiveOther {
  std::string name;  ///< "server 0", "evaluator"
  std::string host;
  std::string state;  ///< as a rank's
  std::uint64_t memory = 0;
  std::string line;
  int restarts = 0;  ///< how often it has been started again, alone
};

/// Members of an elastic job.
struct LiveMembers {
  std::uint64_t epoch = 0;
  int size = 0;
  std::string workers;  ///< their numbers, by rank: "0,2-3"
  std::string cause;    ///< of the last change
  double since = 0;
  std::int64_t form_ms = -1;  ///< that they took to form a world; -1: they have not
};

/// Something that the launcher has said.
struct LiveNotice {
  double time = 0;
  std::string text;
};

/// Times are seconds since 1970.
struct LiveRun {
  double time = 0;  ///< when this was so
  std::string job;
  std::string program;
  std::string state = "starting";  ///< "running", "ending", "ended"
  double start = 0;                ///< of the ranks; 0: not yet
  std::optional<int> exit_status;
  std::string reason;  ///< why it ended, if not by itself
  int restarts = 0;    ///< that there have been
  std::string logs;    ///< folder; empty: none
  std::vector<LiveHost> hosts;
  std::vector<LiveNotice> notices;  ///< the last few
  std::vector<LiveRank> ranks;
  int first_rank = 0;  ///< of these: where they are a part
  std::vector<LiveOther> others;
  std::optional<LiveMembers> members;  ///< the job is elastic
};

std::string to_json(const LiveRun& run);
/// A line of usage.jsonl: an event `metric` of what processes and GPUs use, by host.
std::string usage_line(const LiveRun& run, const std::map<std::string, std::vector<GpuUse>>& gpus);
/// Corrupt for what is no such text.
Result<LiveRun> parse_live_run(std::string_view text);

/// Seconds since 1970.
double seconds_now();

/// Writes live.json into a run's folder, on a thread of its own: the folder may be on a file system of the network that
/// takes its time, and the launcher waits for no viewer. Methods belong to one thread.
class LiveFile {
 public:
  /// `folder` outlives this.
  explicit LiveFile(const RunFolder& folder) : folder_(folder) {}
  /// Writes what it was given last.
  ~LiveFile();
  LiveFile(const LiveFile&) = delete;
  LiveFile& operator=(const LiveFile&) = delete;

  /// The last one is written, and some time has passed since: it is worth the effort to make another.
  bool due() const noexcept { return due_.load(std::memory_order_relaxed); }
  void write(LiveRun run);
  /// Why it cannot be written; once.
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
