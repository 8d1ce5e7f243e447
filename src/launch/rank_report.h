// State of a rank at one moment, as its agent reads it from the rank's status page and from /proc, and its wording for
// people. Values; `read_status` takes whatever it finds in the page, which another process writes.
#pragma once

#include "launch/processes.h"
#include "telemetry/status_page.h"

#include <cstdint>
#include <string>
#include <vector>

namespace cohort::launch {

/// One communicator of the rank.
struct GroupReport {
  std::uint64_t id = 0;   ///< the same on all its ranks; 0: the rank has left it
  std::int32_t rank = 0;  ///< in it
  std::int32_t size = 0;
  std::uint64_t begun = 0;           ///< number of the collective that it came to last
  std::uint64_t ended = 0;           ///< of the last one that is over
  std::string operation;             ///< of `begun`: "all_reduce(float32[10], sum)"
  bool waiting = false;              ///< the program waits for it, and it for peers
  std::uint64_t waited_ns = 0;       ///< for peers, in collectives so far
  std::uint64_t longest_ns = 0;      ///< of these waits,
  std::uint64_t longest_number = 0;  ///< and its operation
  std::string message;               ///< "recv(float32[4])"; empty if the rank does not wait for a message
  std::int32_t peer = -1;            ///< of the message, in the group
  std::uint64_t message_number = 0;
};

/// Operations by name.
struct NamedReport {
  bool waiting = false;     ///< the program waits for one
  std::string name;         ///< of that
  std::uint64_t ended = 0;  ///< operations that are over
};

/// Time spent in collectives, and the steps it covers: from the end of the first few (start-up) to that of the last.
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

/// Why it failed; the fields are ErrorContext's.
struct CauseReport {
  std::int32_t code = -1;  ///< an ErrorCode; -1: it has not said
  std::int32_t rank = -1;
  std::int32_t peer = -1;
  std::uint64_t sequence = 0;
  std::string host;
  std::string operation;
};

struct RankReport {
  std::int32_t rank = 0;
  std::int32_t pid = 0;            ///< of the process that joined; the worker's own before it has
  bool joined = false;             ///< it has written into its page
  std::int32_t joining = 0;        ///< the size of a world whose ranks it waits for; kToBeMember; 0: none now
  std::uint32_t worlds = 0;        ///< that it has formed so far
  std::int64_t formed_epoch = -1;  ///< of the members who have formed its latest world, in an elastic job; -1: none
  bool has_state = false;          ///< it has what an elastic job has trained: others can have it from this rank
  std::uint8_t state = 0;          ///< /proc/PID/stat's: 'R', 'S', 'T', ...; 0: not known
  std::uint64_t cpu_ms = 0;
  std::uint64_t memory = 0;  ///< resident, in bytes, of the process
  std::int64_t step = 0;
  std::int64_t samples = 0;          ///< in these steps; 0: not known
  std::uint64_t exposed_ns = 0;      ///< in which the program did nothing but wait for collectives
  std::string not_finite;            ///< "train_loss is NaN": the first loss that it logged and that is no number,
  std::int64_t not_finite_step = 0;  ///< and where; empty: none
  bool tells_stacks = false;
  bool saves_when_asked = false;  ///< a signal makes it save and end
  std::int32_t preempted_by = 0;  ///< the signal because of which all ranks do that now; 0: none
  std::vector<GroupReport> groups;
  NamedReport named;
  TimesReport times;
};

/// Use of a GPU of the host, by whomever; -1: its driver does not tell (one that is divided, MIG).
struct GpuUse {
  std::int64_t percent = -1;  ///< of the last moments, in which something ran on it
  std::int64_t memory = -1;   ///< bytes
};

/// The page's part.
RankReport read_status(const status::StatusLayout& page);
/// The program waits for peers, in any of its groups.
bool waits(const RankReport& report);
/// It has left its last world: it is about to end, or to form another.
bool has_left(const RankReport& report);
/// The cause of the rank's end: the Error it died of; without last words, the cause by which its world ended.
CauseReport read_cause(const status::StatusLayout& page);
/// The same for people, as it said it itself; empty if it did not.
std::string last_words(const status::StatusLayout& page);

/// "waiting in all_reduce(float32[10], sum), operation 17", "outside collectives since operation 16", ...
std::string doing(const RankReport& report);
/// ", step 12" or nothing.
std::string at_step(const RankReport& report);
/// A line for each of these texts, which are by process, equal ones folded: "ranks 1-3: waiting in barrier(), operation
/// 2". `without`: a process that is left out.
std::vector<std::string> folded(const std::vector<std::string>& by_process, const Roles& roles, int without = -1);

}  // namespace cohort::launch
