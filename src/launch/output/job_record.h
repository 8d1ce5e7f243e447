// RunState is everything that the supervisor knows of a run; job.json, live.json, events and the status line are made
// from it. job.json says what was run, where, by what, at which commit, and how it ended; secrets are left out. Reads
// files (the repository's, too), runs nothing. Any thread.
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

/// The commit of a folder, read from the files of the repository around it.
struct GitRevision {
  std::string commit;  ///< hexadecimal
  std::string branch;  ///< empty: no branch is checked out
};

/// Returns nullopt if the folder is in no repository, or in one without a commit.
std::optional<GitRevision> git_revision(const std::string& folder);

/// Returns true for names that mark a value as secret: API_KEY, hf-token, SLURM_JWT, db_pass, ...
bool looks_private(std::string_view name);

/// Returns true if an environment variable may be written into a file: it is in the list of variables that change how a
/// job runs, and neither its name nor its value looks private.
bool is_recorded(std::string_view name, std::string_view value);

/// Returns a command line without the secrets in its arguments: --api-key=X, TOKEN=X, --env=TOKEN=X, --password X.
std::vector<std::string> without_secrets(const std::vector<std::string>& words);

/// Explains `"contained": false` in the record.
inline constexpr std::string_view kNotContained =
    "cohort run places jobs in no cgroup and no PID namespace: if supervisor, guard, agent and ranks are all killed at "
    "once (SIGKILL), processes that ranks have started themselves can outlive them";

/// One start of a job's ranks, and its end.
struct Attempt {
  std::string start;  ///< UTC
  std::string end;    ///< empty while the attempt runs
  std::optional<int> exit_status;
  std::string reason;       ///< why the attempt was ended; empty: it ended by itself
  std::string output_lost;  ///< output that could not be shown, and why; empty: none
  std::string log_folder;   ///< empty: no logs
  std::vector<int> pids;    ///< by process
  std::optional<Ending> failure;
  std::vector<Ending> trained;  ///< ranks that ended well and whose steps were timed
};

/// A change of an elastic job's members.
struct MembersChange {
  std::string time;  ///< UTC
  rendezvous::Membership now;
  std::optional<std::int64_t> form_ms = {};  ///< time from the change until all were in a world of this epoch
};

/// The supervisor's knowledge of a run, with its latest attempt.
struct RunState : Attempt {
  std::string job_id;
  std::vector<std::string> command_line;
  Program program;
  Plan plan;
  int threads = 0;
  int master_port = 0;
  std::vector<Ending> server_failures;  ///< failures of servers that were started again
  int max_restarts = 0;
  std::vector<Attempt> attempts;       ///< the attempts that have ended
  std::vector<MembersChange> members;  ///< members of an elastic job, at the start and after each change
  // For viewers of the run.
  std::string stage = "starting";  ///< "running", "ending", "ended"
  double running_since = 0;        ///< start of the ranks, in seconds since 1970; 0: not yet
  int restarts = 0;                ///< restarts so far
  double members_since = 0;        ///< time of the latest `members`, in seconds since 1970; 0: unchanged
  std::vector<LiveNotice> notices;

  void note(const std::string& text);
};

/// Returns the object of the event `rank_ended`.
nlohmann::ordered_json to_json(const TimesReport& times);
/// Adds "rank", or "role" and "number".
void add_process(nlohmann::ordered_json& out, Role role, int number);
/// Returns the numbers of the members, by rank.
std::vector<int> workers_of(const rendezvous::Membership& membership);
/// Adds the fields that say which process has ended, where, and how.
void add_ending(nlohmann::ordered_json& out, const Ending& ending);
/// Returns the hosts of a plan as in files and events.
nlohmann::ordered_json host_entries(const Plan& plan);
/// Adds "pids" of ranks, by rank; "server_pids" and "evaluator_pid" if there are any.
void add_pids(nlohmann::ordered_json& out, const Roles& roles, const std::vector<int>& pids);

/// Returns job.json; takes the rest (folder, user, host, recorded environment variables, versions) from this process.
nlohmann::ordered_json to_json(const RunState& state);

}  // namespace cohort::launch
