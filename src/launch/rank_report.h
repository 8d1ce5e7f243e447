// State of a rank at one moment, as its agent reads it from the rank's status page and from /proc, and text that
// describes it for people. Plain values; `read_status` accepts any contents of the page, which another process writes.
#pragma once

#include "launch/processes.h"
#include "telemetry/status_page.h"

#include <cstdint>
#include <string>
#include <vector>

namespace cohort::launch {

/// One communicator of the rank.
struct GroupReport {
  std::uint64_t id = 0;   ///< the same on all ranks of the communicator; 0: the rank has left it
  std::int32_t rank = 0;  ///< rank in this communicator
  std::int32_t size = 0;
  std::uint64_t begun = 0;           ///< number of the collective that the rank reached last
  std::uint64_t ended = 0;           ///< number of the last completed collective
  std::string operation;             ///< the collective `begun`: "all_reduce(float32[10], sum)"
  bool waiting = false;              ///< the program waits for the collective, which waits for peers
  std::uint64_t waited_ns = 0;       ///< time spent waiting for peers, in all collectives so far
  std::uint64_t longest_ns = 0;      ///< the longest of these waits
  std::uint64_t longest_number = 0;  ///< the operation of the longest wait
  std::string message;               ///< "recv(float32[4])"; empty if the rank does not wait for a message
  std::int32_t peer = -1;            ///< rank of the message's other end, in this communicator
  std::uint64_t message_number = 0;
};

/// Operations that are matched by name.
struct NamedReport {
  bool waiting = false;     ///< the program waits for such an operation
  std::string name;         ///< name of the operation that it waits for
  std::uint64_t ended = 0;  ///< number of completed operations
};

/// Time spent in collectives, and the steps covered: from the end of the first few (start-up) to the end of the last.
struct TimesReport {
  std::int64_t steps = 0;
  std::uint64_t steps_ns = 0;
  std::uint64_t operations = 0;
  std::uint64_t bytes = 0;
  std::uint64_t busy_ns = 0;
  std::uint64_t waited_ns = 0;
  std::uint64_t wire_ns = 0;
  std::uint64_t wire_bytes = 0;
  std::uint64_t exposed_ns = 0;
};

/// Data that the rank sent to other hosts and that a network dropped.
struct LossReport {
  std::uint64_t segments = 0;     ///< TCP segments sent again
  std::uint64_t timeouts = 0;     ///< retransmission time-outs; 0 where the kernel does not count them
  std::uint64_t timeouts_ms = 0;  ///< time spent in them
  std::string host;               ///< the host to which most were sent; empty if nothing was lost
};

/// Why a rank failed; the fields are ErrorContext's.
struct CauseReport {
  std::int32_t code = -1;  ///< an ErrorCode; -1: the rank has not reported one
  std::int32_t rank = -1;
  std::int32_t peer = -1;
  std::uint64_t sequence = 0;
  std::string host;
  std::string operation;
};

struct RankReport {
  std::int32_t rank = 0;
  std::int32_t pid = 0;            ///< pid of the process that has the page; before that, the worker's pid
  bool has_page = false;           ///< the rank has written into its page
  std::int32_t forming = 0;        ///< size of the world whose ranks it waits for, or kToBeMember; 0: it does not wait
  std::uint32_t worlds = 0;        ///< number of worlds formed so far
  std::int64_t formed_epoch = -1;  ///< elastic job: the epoch of its latest world; -1: none
  bool has_state = false;          ///< has the elastic job's training state, and can give it to others
  std::uint8_t state = 0;          ///< state letter of /proc/PID/stat: 'R', 'S', 'T', ...; 0: not known
  std::uint64_t cpu_ms = 0;
  std::uint64_t memory = 0;  ///< resident memory of the process, in bytes
  std::int64_t step = 0;
  std::int64_t samples = 0;          ///< samples in these steps; 0: not known
  std::uint64_t exposed_ns = 0;      ///< time in which the program did nothing but wait for collectives
  std::string not_finite;            ///< the first logged loss that is no number, "train_loss is NaN"; empty: none
  std::int64_t not_finite_step = 0;  ///< the step of that loss
  bool tells_stacks = false;
  bool saves_when_asked = false;  ///< a signal makes the rank save and end
  std::int32_t preempted_by = 0;  ///< the signal for which all ranks are saving and ending; 0: none
  std::vector<GroupReport> groups;
  NamedReport named;
  TimesReport times;
  LossReport losses;
};

/// Use of one of the host's GPUs by all processes; -1: the driver does not report it (a divided GPU, MIG).
struct GpuUse {
  std::int64_t percent = -1;  ///< how much of the last moments something ran on the GPU
  std::int64_t memory = -1;   ///< bytes
};

/// Reads those fields of the report that the status page has.
RankReport read_status(const status::StatusLayout& page);
/// Returns true if the program waits for peers, in any of its communicators.
bool waits(const RankReport& report);
/// Returns true if the rank has left its last world: it is about to end, or to form another.
bool has_left(const RankReport& report);
/// Returns why the rank ended: the Error that ended it or, without last words, the cause by which its world ended.
CauseReport read_cause(const status::StatusLayout& page);
/// Returns the rank's own last words, for people; empty if it left none.
std::string last_words(const status::StatusLayout& page);

/// Returns "waiting in all_reduce(float32[10], sum), operation 17", "outside collectives since operation 16", ...
std::string doing(const RankReport& report);
/// Returns ", step 12" or nothing.
std::string at_step(const RankReport& report);
/// Returns the processes' texts as lines, with identical texts folded into one: "ranks 1-3: waiting in barrier(),
/// operation 2". `without`: a process that is left out.
std::vector<std::string> folded(const std::vector<std::string>& by_process, const Roles& roles, int without = -1);

}  // namespace cohort::launch
