// Everything known of a run (RunState): the supervisor keeps it; job.json, live.json, events and the status line are
// made of it. job.json: what was run, where, by what, at which commit, and how it ended; it leaves out what nobody may
// see. Reads files (the repository's, too), runs nothing. Any thread.
#pragma once

#include "launch/health/verdict.h"
#include "launch/output/live_run.h"
#include "launch/plan/plan.h"
#include "launch/plan/program.h"
#include "rendezvous/membership.h"

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

/// Which commit a folder is at, by the files of the repository around it.
struct GitRevision {
  std::string commit;  ///< hexadecimal
  std::string branch;  ///< empty where none is checked out
};

/// nullopt where the folder is in no repository, or in one without a commit.
std::optional<GitRevision> git_revision(const std::string& folder);

/// True for names that say that their value is for nobody's eyes: API_KEY, hf-token, SLURM_JWT, db_pass, ...
bool looks_private(std::string_view name);

/// Whether an environment variable may be written into a file: it is on the list of those that change how a job runs,
/// and neither its name nor its value looks private.
bool is_recorded(std::string_view name, std::string_view value);

/// A command line without what its words give away: --api-key=X, TOKEN=X, --env=TOKEN=X, --password X.
std::vector<std::string> without_secrets(const std::vector<std::string>& words);

/// Why the record says `"contained": false`, and what that means for the job.
inline constexpr std::string_view kNotContained =
    "cohort run places jobs in no cgroup and no PID namespace: if supervisor, guard, agent and ranks are all killed at "
    "once (SIGKILL), processes that ranks have started themselves can outlive them";

/// One start of a job's ranks.
struct Attempt {
  std::string start;  ///< UTC
  std::string end;    ///< empty while it runs
  std::optional<int> exit_status;
  std::string reason;       ///< why it ended, if not by itself
  std::string output_lost;  ///< what of the output could not be shown, and why; empty if all could
  std::string log_folder;   ///< empty: none
  std::vector<int> pids;    ///< by process
  std::optional<Ending> failure;
  std::vector<Ending> trained;  ///< ranks that ended well and whose steps were timed
};

/// A change of an elastic job's members.
struct MembersChange {
  std::string time;  ///< UTC
  rendezvous::Membership now;
  std::optional<std::int64_t> form_ms = {};  ///< from then until all were in a world of this epoch
};

/// All that the supervisor knows of a run, with its latest attempt.
struct RunState : Attempt {
  std::string job_id;
  std::vector<std::string> command_line;
  Program program;
  Plan plan;
  int threads = 0;
  int master_port = 0;
  std::vector<Ending> server_failures;  ///< of servers that were started again
  int max_restarts = 0;
  std::vector<Attempt> attempts;       ///< those that have ended
  std::vector<MembersChange> members;  ///< of an elastic job: at the start, and after each change
  // For those who watch it.
  std::string stage = "starting";  ///< "running", "ending", "ended"
  double running_since = 0;        ///< seconds since 1970, of the ranks; 0: not yet
  int restarts = 0;                ///< that there have been
  double members_since = 0;        ///< seconds since 1970, of the latest `members`; 0: they have not changed
  std::vector<LiveNotice> notices;

  void note(const std::string& text);
};

/// As the event `rank_ended` has it.
nlohmann::ordered_json to_json(const TimesReport& times);
/// "rank", or "role" and "number".
void add_process(nlohmann::ordered_json& out, Role role, int number);
/// Numbers of its members, by rank.
std::vector<int> workers_of(const rendezvous::Membership& membership);
/// Adds which process has ended, where, and how.
void add_ending(nlohmann::ordered_json& out, const Ending& ending);
/// The hosts of a plan, as files and events have them.
nlohmann::ordered_json host_entries(const Plan& plan);
/// "pids" of ranks, by rank; "server_pids" and "evaluator_pid" where there are any.
void add_pids(nlohmann::ordered_json& out, const Roles& roles, const std::vector<int>& pids);

/// Takes the rest (folder, user, host, the environment's variables that matter, versions) from this process.
nlohmann::ordered_json to_json(const RunState& state);

}  // namespace cohort::launch
