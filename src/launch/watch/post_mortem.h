// Which failure came first, and what a person is told about it. Pure.
#pragma once

#include "launch/messages.h"
#include "launch/roles.h"

#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// How one process ended.
struct Ending {
  int rank = 0;  ///< its number in its role
  std::string host;
  int pid = 0;
  sys::ExitStatus status;
  bool before_stop = true;
  bool out_of_memory = false;
  double after_seconds = 0;
  std::string last_stderr;
  RankReport last = {};    ///< what it was doing
  std::string words = {};  ///< its own last words,
  CauseReport cause = {};  ///< and for programs
  Role role = Role::Worker;
  bool asked = false;            ///< to end, since those before it had ended
  bool spared = false;           ///< a server that the job goes on without
  int restarts = 0;              ///< of a server: how often it had been started again,
  std::string first_cause = {};  ///< and how it had ended the first time

  std::string name() const { return process_name(role, rank); }
};

/// It has saved and wants to be started again (kRequeueStatus): no failure.
bool asks_for_requeue(const Ending& ending);

/// The failure that the others follow from: among those that ended before the job was stopped, one that was killed by a
/// signal comes before one that ended by itself, one that had not lost a peer before one that had, the
/// earlier before the later. nullopt if none failed. (A peer's death is often noticed, and died of, before the kernel
/// has finished the first death; the order of the reports alone would accuse the wrong one.)
std::optional<Ending> first_failure(const std::vector<Ending>& endings);

/// True if this rank failed because another one had: by its cause; of what fails without one of Cohort's errors, by
/// what other libraries write of a lost peer.
bool follows_another(const Ending& ending);

/// It has not failed: it has ended with 0, saved, or died of the signal that it was asked to end by; or the job goes on
/// without it.
bool has_ended_well(const Ending& ending);

/// Of C++, that nothing has caught: its words say so.
bool is_exception(const Ending& ending);

/// As `doing` of its last report; of who is no rank "running, in no world, as servers are".
std::string doing(const Ending& ending);

struct PostMortem {
  Ending first;
  int world_size = 1;
  int ended_well = 0;               ///< ranks that had ended with 0 before
  std::vector<int> missed = {};     ///< of these, the ones without which `first` could not go on
  int running = 0;                  ///< ranks that have not ended yet
  std::vector<std::string> others;  ///< what the others were doing then
  std::string log_folder;
  bool colour = false;
};
/// The block, with "\n" at the end of each line.
std::string to_string(const PostMortem& post_mortem);

}  // namespace cohort::launch
