#include "run_options.h"

#include "base/env.h"
#include "base/parse.h"
#include "base/result.h"

#include "host_options.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <utility>

namespace cohort::app {
namespace {

using launch::ProgramRequest;
using Kind = RunOption::Kind;
using C = RunChoices;
using Text = const std::string&;

std::chrono::milliseconds milliseconds_of(Text text) {
  double seconds = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || !(seconds >= 0 && seconds <= 1e9))
    raise(ErrorCode::InvalidArgument, "a number of seconds from 0 to 1e9 is wanted");
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

/// Of limits that are looked after once a second.
std::chrono::seconds seconds_of(Text text) { return std::chrono::ceil<std::chrono::seconds>(milliseconds_of(text)); }

int number_of(Text text, int least, int most) {
  const auto number = parse_integer<int>(text);
  if (!number || *number < least || *number > most)
    raise(ErrorCode::InvalidArgument, "a number from {} to {} is wanted", least, most);
  return *number;
}

bool truth(Text text) { return text == "true"; }

std::chrono::milliseconds host_timeout_of(Text text) {
  const auto timeout = milliseconds_of(text);
  if (timeout < std::chrono::seconds(1) || timeout > std::chrono::hours(1))
    raise(ErrorCode::InvalidArgument, "from 1 s, since hosts are asked once a second, to 3600 s");
  return timeout;
}

std::string assignment_of(Text wish) {
  const auto equals = wish.find('=');
  if (equals == 0 || wish.empty()) raise(ErrorCode::InvalidArgument, "NAME=VALUE or NAME is wanted");
  if (equals != std::string::npos) return wish;
  if (const char* value = std::getenv(wish.c_str())) return wish + "=" + value;
  raise(ErrorCode::InvalidArgument, "it is not set here; give a value with --env {}=VALUE", wish);
}

launch::PrefixStyle prefix_of(Text text) {
  using launch::PrefixStyle;
  return text == "none" ? PrefixStyle::None : text == "full" ? PrefixStyle::Full : PrefixStyle::Rank;
}

launch::Collapse collapse_of(Text text) {
  using launch::Collapse;
  return text == "always" ? Collapse::Always : text == "never" ? Collapse::Never : Collapse::Auto;
}

const RunOption kOptions[] = {
    {"-n,--np,--nproc", "N", "auto", "Processes (also -np N), or 'auto': one per usable core",
     [](C& c, Text v) { c.processes = processes_of(v); }},
    {"-H,--hosts", "A:4,B:4", "", "Hosts and their slots; the first are filled first [this one]",
     [](C& c, Text v) { c.hosts.list = v; }},
    {"--hostfile", "FILE", "", "A file of them: lines of HOST, HOST:N or HOST slots=N",
     [](C& c, Text v) { c.hosts.file = v; }},
    {"--nodes", "N", "", "Only the first so many hosts [all]",
     [](C& c, Text v) { c.hosts.nodes = number_of(v, 0, launch::kMostProcesses); }},
    {"--nnodes", "N", "",
     "This command is started on each of so many hosts, and they make one job: with --node-rank, --master and "
     "--secret-file; -np counts on each. In a step of srun's with one task per node it is found out",
     [](C& c, Text v) { c.nodes.count = v; }},
    {"--node-rank", "R", "", "Which of them this is; 0 supervises, and shows the output of all",
     [](C& c, Text v) { c.nodes.rank = v; }},
    {"--master", "HOST[:PORT]", "", "The host of node rank 0, and where it listens [port 29500]",
     [](C& c, Text v) { c.nodes.master = v; }},
    {"--master-addr", "HOST", "", "The same, as torchrun has it", [](C& c, Text v) { c.nodes.master_addr = v; }},
    {"--master-port", "PORT", "", "The same, as torchrun has it", [](C& c, Text v) { c.nodes.master_port = v; }},
    {"--rdzv-endpoint", "HOST[:PORT]", "",
     "As --master [port 29400], for launchers that were not told which they are: 0 is the one on HOST, the others are "
     "numbered as they come",
     [](C& c, Text v) { c.nodes.endpoint = v; }},
    {"--rdzv-backend", "NAME", "", "c10d or static, as torchrun has it: without any effect",
     [](C& c, Text v) { c.nodes.backend = v; }},
    {"--rdzv-id", "ID", "", "A name of the job: a launcher with another one is turned away",
     [](C& c, Text v) { c.nodes.id = v; }},
    {"--standalone", "", "", "The job is on this host alone, also in a step or an allocation of several",
     [](C& c, Text v) { c.nodes.standalone = truth(v); }, Kind::Flag},
    {"--nproc-per-node", "N", "",
     "Processes on each host: as -np with --nnodes and on one host; cpu: one per usable core; gpu: one per GPU; auto: "
     "that, or one per core where there is none",
     [](C& c, Text v) {
       if (v != "cpu" && v != "gpu") (void)processes_of(v);
       c.per_node = v;
     }},
    {"--per-node", "N", "", "Slots of each host [as the list says, else 1]",
     [](C& c, Text v) { c.hosts.per_node = number_of(v, 0, launch::kMostProcesses); }},
    {"--starter", "HOW", "auto",
     "How other hosts are reached: auto (srun within a Slurm allocation, else ssh), ssh, slurm, mpirun; hand: `cohort "
     "agent --join` is run there; local: every host is this one, to try",
     [](C& c, Text v) { c.hosts.starter = starter_of(v); }, Kind::Value, "auto,ssh,slurm,mpirun,hand,local"},
    {"--ssh", "COMMAND", "ssh", "The ssh command, with options of yours: \"ssh -p 2222\"",
     [](C& c, Text v) { c.job.remote.ssh = ssh_command(v); }},
    {"--remote-cohort", "PATH", "", "Path of `cohort` on other hosts [as here]",
     [](C& c, Text v) { c.job.remote.remote_cohort = v; }},
    {"--network", "NAME or CIDR[,...]", "",
     "Networks that hosts use with each other: names of interfaces, or networks as 10.0.0.0/8 [all]",
     [](C& c, Text v) { c.network = v; }},
    {"--secret-file", "FILE", "", "With --nnodes and --starter hand: the secret that all have [COHORT_SECRET_FILE]",
     [](C& c, Text v) { c.secret_file = v; }},
    {"--listen", "PORT", "", "With --starter hand: the port that agents come to [any]",
     [](C& c, Text v) { c.listen = static_cast<std::uint16_t>(number_of(v, 0, 65535)); }},
    {"--host-timeout", "SECONDS", "3", "A host from which nothing comes so long is lost, to ranks, too",
     [](C& c, Text v) { c.job.host_timeout = host_timeout_of(v); }},
    {"-m,--module", "", "", "PROGRAM is a Python module",
     [](C& c, Text v) {
       c.job.program.python = truth(v) ? ProgramRequest::Python::Module : ProgramRequest::Python::Auto;
     },
     Kind::Flag},
    {"--no-python", "", "", "Execute PROGRAM itself, also if it ends in .py",
     [](C& c, Text v) {
       if (truth(v)) c.job.program.python = ProgramRequest::Python::Never;
     },
     Kind::Flag},
    {"--as-horovod", "", "", "`import horovod.torch` is Cohort's, and HOROVOD_RANK, HOROVOD_SIZE, ... are set",
     [](C& c, Text v) { c.job.as_horovod = truth(v); }, Kind::Flag},
    {"--run-dir", "DIR", "", "The run's folder [runs/<UTC time>-<program>-<id>]",
     [](C& c, Text v) { c.job.run_folder = v; }},
    {"--env", "NAME[=VALUE]", "", "Set a variable for the workers, or insist that it is set; repeatable",
     [](C& c, Text v) { c.job.environment.push_back(assignment_of(v)); }, Kind::Repeatable},
    {"--bind", "HOW", "none", "Bind each rank to a share of the cores of its host: core, or none",
     [](C& c, Text v) { c.job.bind = v == "core" ? launch::Binding::Core : launch::Binding::None; }, Kind::Value,
     "core,none"},
    {"--prefix", "STYLE", "rank",
     "What stands before each line: none, rank (host:rank), full (time, host:rank, stream)",
     [](C& c, Text v) { c.job.prefix = prefix_of(v); }, Kind::Value, "none,rank,full"},
    {"--ranks", "0,3-5", "", "Show only these ranks' output; the logs have all [all]",
     [](C& c, Text v) { c.job.shown_ranks = v; }},
    {"--collapse", "WHEN", "auto",
     "Show a line that several ranks print within 0.2 s once, as [0-3] | LINE: auto (on a terminal), always, never",
     [](C& c, Text v) { c.job.collapse = collapse_of(v); }, Kind::Value, "auto,always,never"},
    {"--output-dir", "DIR", "", "The folder of the logs [logs in the run's folder]",
     [](C& c, Text v) { c.job.output_folder = v; }},
    {"--max-restarts", "N", "0", "Start all ranks again when one fails, at most so many times",
     [](C& c, Text v) { c.job.max_restarts = number_of(v, 0, 1'000'000); }},
    {"--timeout", "SECONDS", "", "End the job after so many seconds [never]",
     [](C& c, Text v) {
       const auto limit = milliseconds_of(v);
       if (limit.count() > 0) c.job.timeout = limit;
     }},
    {"--start-timeout", "SECONDS", "30", "For all ranks to be running; by --nnodes 300",
     [](C& c, Text v) { c.start_timeout = milliseconds_of(v); }},
    {"--grace", "SECONDS", "5", "Between asking ranks to end and killing them",
     [](C& c, Text v) { c.job.grace = milliseconds_of(v); }},
    {"--preempt-grace", "SECONDS", "30",
     "For ranks that save when SIGTERM asks them to (cohort::Preemption), instead of --grace",
     [](C& c, Text v) { c.job.preempt_grace = milliseconds_of(v); }},
    {"--output-timeout", "SECONDS", "10", "Once the job is over, for a reader that does not read (a pager) to go on",
     [](C& c, Text v) { c.job.output_timeout = milliseconds_of(v); }},
    {"--stall-timeout", "SECONDS", "1800",
     "End the job when ranks have waited so long for one that is elsewhere; 0: never",
     [](C& c, Text v) { c.job.health.stall = seconds_of(v); }},
    {"--deadlock-timeout", "SECONDS", "10", "End the job when ranks have waited only for each other so long; 0: never",
     [](C& c, Text v) { c.job.health.deadlock = seconds_of(v); }},
    {"--stopped-timeout", "SECONDS", "60", "End the job when a rank has been stopped (SIGSTOP) so long; 0: never",
     [](C& c, Text v) { c.job.health.stopped_end = seconds_of(v); }},
    {"--no-logs", "", "", "Keep no logs of the ranks' output in the run's folder",
     [](C& c, Text v) { c.job.keep_logs = !truth(v); }, Kind::Flag},
    {"--owner", "PID", "", "End the job when the process PID, which has started this command, ends",
     [](C& c, Text v) { c.job.owner_pid = number_of(v, 1, std::numeric_limits<int>::max()); }, Kind::CommandValue},
    {"--owner-folder", "DIR", "",
     "A private folder (0700) of the owner, removed if the owner has ended before it could do so",
     [](C& c, Text v) { c.job.owner_folder = v; }, Kind::CommandValue},
    {"--agents", "N", "",
     "Wait for so many `cohort agent --invited --ranks R`, which the owner starts with what --invitation-fd brings it",
     [](C& c, Text v) { c.agents = number_of(v, 1, launch::kMostProcesses); }, Kind::CommandValue},
    {"--invitation-fd", "FD", "",
     "With --agents: an inherited pipe to the owner, for a line about this command and an invitation",
     [](C& c, Text v) { c.job.invitation_fd = number_of(v, 3, std::numeric_limits<int>::max()); }, Kind::CommandValue},
    {"--config", "FILE", "", "Take options from the table [run] of this TOML file", [](C&, Text) {}},
    {"--show-config", "", "", "Print the value of each option and where it is from, and end",
     [](C& c, Text v) { c.show_config = truth(v); }, Kind::CommandFlag},
    {"--check-build", "", "", "Print what this build and this machine have, and end",
     [](C& c, Text v) { c.check_build = truth(v); }, Kind::CommandFlag},
    {"--dry-run", "", "", "Print the plan, the command and the environment of each rank; start nothing",
     [](C& c, Text v) { c.dry_run = truth(v); }, Kind::Flag},
    {"-q,--quiet", "", "", "Print only what the ranks print, and failures",
     [](C& c, Text v) { c.job.quiet = truth(v); }, Kind::Flag},
    {"--json", "", "",
     "Write everything to stdout as JSON, one event a line: start, output, notice, rank_ended, failure, restart, end",
     [](C& c, Text v) { c.job.json = truth(v); }, Kind::Flag},
};

}  // namespace

std::vector<std::string> RunOption::all_names() const {
  std::vector<std::string> all;
  for (std::string_view rest = names; !rest.empty();) {
    const auto comma = std::min(rest.find(','), rest.size());
    all.emplace_back(rest.substr(0, comma));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return all;
}

std::string RunOption::name() const {
  for (std::string& one : all_names()) {
    if (one.starts_with("--")) return std::move(one);
  }
  return std::string(names);
}

std::string RunOption::variable() const {
  std::string out(env::kRunOptionPrefix);
  for (const char c : name().substr(2)) {
    out += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return out;
}

int processes_of(const std::string& text) {
  if (text == "auto") return 0;
  const auto number = parse_integer<long long>(text);
  if (!number) raise(ErrorCode::InvalidArgument, "a number or 'auto' (one process per core) is wanted");
  if (*number < 1) raise(ErrorCode::InvalidArgument, "at least one process is needed");
  if (*number > launch::kMostProcesses)
    raise(ErrorCode::InvalidArgument, "more than {} processes are not started at once", launch::kMostProcesses);
  return static_cast<int>(*number);
}

std::span<const RunOption> run_options() noexcept { return kOptions; }

const RunOption* run_option(std::string_view name) noexcept {
  for (const RunOption& option : kOptions) {
    for (std::string_view rest = option.names; !rest.empty();) {
      const auto comma = std::min(rest.find(','), rest.size());
      if (rest.substr(0, comma) == name) return &option;
      rest.remove_prefix(std::min(comma + 1, rest.size()));
    }
  }
  return nullptr;
}

}  // namespace cohort::app
