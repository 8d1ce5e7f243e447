#include "shared/run_options.h"

#include "base/env.h"
#include "base/parse.h"
#include "base/process.h"
#include "base/result.h"
#include "launch/start/starter.h"
#include "net/interfaces.h"
#include "shared/destination.h"

#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <utility>

namespace cohort::app {
namespace {

/// The words of a command (--ssh, --evaluator), divided like in a shell: at blanks outside of '' and "" and not behind
/// a backslash. Nothing is expanded. Throws InvalidArgument for an empty command, and one that ends within quotes.
std::vector<std::string> words_of_command(const std::string& text) {
  std::vector<std::string> words;
  char quote = 0;
  bool within = false;  // a word, which may be empty: ''
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    const bool escapes = quote != '\'' && c == '\\' && at + 1 < text.size() &&
                         (quote == 0 || text[at + 1] == '"' || text[at + 1] == '\\');
    if (quote == 0 && std::isspace(static_cast<unsigned char>(c)) != 0) {
      within = false;
      continue;
    }
    if (!std::exchange(within, true)) words.emplace_back();
    if (escapes)
      words.back() += text[++at];
    else if (c == quote)
      quote = 0;
    else if (quote == 0 && (c == '\'' || c == '"'))
      quote = c;
    else
      words.back() += c;
  }
  if (quote != 0) raise(ErrorCode::InvalidArgument, "it ends within quotes ({})", quote);
  if (words.empty() || words.front().empty()) raise(ErrorCode::InvalidArgument, "a command is wanted");
  return words;
}

using launch::ProgramRequest;
using Kind = RunOption::Kind;
using C = launch::JobSpec;
using Text = const std::string&;

std::chrono::milliseconds milliseconds_of(Text text) {
  double seconds = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || !(seconds >= 0 && seconds <= 1e9))
    raise(ErrorCode::InvalidArgument, "a number of seconds from 0 to 1e9 is wanted");
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

/// Parses a limit, and rounds it up to whole seconds, since it is checked once a second.
std::chrono::seconds seconds_of(Text text) { return std::chrono::ceil<std::chrono::seconds>(milliseconds_of(text)); }

int number_of(Text text, int least, int most) {
  const auto number = parse_integer<int>(text);
  if (!number || *number < least || *number > most)
    raise(ErrorCode::InvalidArgument, "a number from {} to {} is wanted", least, most);
  return *number;
}

int servers_of(Text text) {
  const auto number = parse_integer<int>(text);
  if (!number || *number < 0 || *number > launch::kMostProcesses)
    raise(ErrorCode::InvalidArgument, "a number from 0 to {}, or 'colocated', is wanted", launch::kMostProcesses);
  return *number;
}

/// A .py file runs with the active Python, like PROGRAM.
ProgramRequest program_request(Text text) {
  std::vector<std::string> words = words_of_command(text);
  ProgramRequest request;
  request.program = words.front() == "cohort" ? value_or_throw(launch::own_command()) : words.front();
  request.arguments.assign(words.begin() + 1, words.end());
  return request;
}

bool truth(Text text) { return text == "true"; }

std::chrono::milliseconds host_timeout_of(Text text) {
  const auto timeout = milliseconds_of(text);
  if (timeout < std::chrono::seconds(1) || timeout > std::chrono::hours(1))
    raise(ErrorCode::InvalidArgument, "from 1 s, since hosts are asked once a second, to 3600 s");
  return timeout;
}

std::pair<std::chrono::seconds, std::chrono::seconds> cooldown_of(Text text) {
  const auto numbers = numbers_in(text, 3600);
  if (!numbers || numbers->size() != 2 || numbers->front() > numbers->back())
    raise(ErrorCode::InvalidArgument, "two numbers of seconds from 1 to 3600 are wanted, LOW,HIGH");
  return {std::chrono::seconds(numbers->front()), std::chrono::seconds(numbers->back())};
}

std::string assignment_of(Text wish) {
  const auto equals = wish.find('=');
  if (equals == 0 || wish.empty()) raise(ErrorCode::InvalidArgument, "NAME=VALUE or NAME is wanted");
  if (equals != std::string::npos) return wish;
  if (const char* value = std::getenv(wish.c_str())) return wish + "=" + value;
  raise(ErrorCode::InvalidArgument, "it is not set here; give a value with --env {}=VALUE", wish);
}

// Names in the order of their enums.
constexpr std::string_view kStarters = "auto,ssh,slurm,mpirun,hand,local", kPrefixes = "none,rank,full",
                           kCollapses = "auto,always,never";
template <class Enum>
Enum one_of(std::string_view names, Text text) {
  const auto all = split(names);
  return static_cast<Enum>(std::ranges::find(all, text) - all.begin());
}

/// Marks an option that `--help` shows; `--help-all` shows all.
constexpr RunOption common(RunOption option) {
  option.common = true;
  return option;
}

/// {names, type, default, help, set[, kind[, choices]]}, in the order of the help. A default that is no value is in
/// brackets after the help.
const RunOption kOptions[] = {
    common({"-n,--np,--nproc", "N", "auto",
            "How many processes (also -np N); auto: one per usable core, by affinity and the control group's quota",
            [](C& c, Text v) { c.processes = launch::parse_processes(v); }}),
    common({"-H,--hosts", "A:4,B:4", "", "Hosts and their slots; the first are filled first [this one]",
            [](C& c, Text v) { c.hosts = v; }}),
    {"--hostfile", "FILE", "", "A file of them: lines of HOST, HOST:N or HOST slots=N, with # comments",
     [](C& c, Text v) { c.host_file = v; }},
    {"--nodes", "N", "", "Use only the first N hosts [all]",
     [](C& c, Text v) { c.nodes = number_of(v, 0, launch::kMostProcesses); }},
    {"--per-node", "N", "", "Slots of each host [as the list says, else 1]",
     [](C& c, Text v) { c.per_node = number_of(v, 0, launch::kMostProcesses); }},
    {"--starter", "HOW", "auto",
     "How other hosts are reached: auto (srun within a Slurm allocation, else ssh), ssh, slurm, mpirun; hand: `cohort "
     "agent --join` is run there; local: every host is this one, to try",
     [](C& c, Text v) { c.starter = one_of<launch::Starter>(kStarters, v); }, Kind::Value, kStarters},
    {"--ssh", "COMMAND", "ssh",
     "The ssh command and its options: \"ssh -p 2222\"; split as by a shell, without expansion",
     [](C& c, Text v) { c.ssh = words_of_command(v); }},
    {"--remote-cohort", "PATH", "", "Path of `cohort` on other hosts [as here]",
     [](C& c, Text v) { c.remote_cohort = v; }},
    {"--sync", "", "",
     "Before the start, copy the working folder and the active virtual environment to the other hosts, by rsync over "
     "ssh; what git ignores is left out, and nothing is removed there",
     [](C& c, Text v) { c.sync = truth(v); }, Kind::Flag},
    {"--sync-exclude", "PATTERN", "", "With --sync: leave out what fits this pattern of rsync's; repeatable",
     [](C& c, Text v) { c.sync_excludes.push_back(v); }, Kind::Repeatable},
    {"--network", "NAME or CIDR[,...]", "",
     "Networks that hosts use with each other, for ranks and for the job's own connections: names of interfaces, or "
     "networks as 10.0.0.0/8; sets COHORT_NETWORK, and `cohort doctor` shows which there are [all]",
     [](C& c, Text v) { c.network = v; }},
    {"--secret-file", "FILE", "",
     "With --nnodes and --starter hand: the secret that all have; `cohort secret FILE` makes one [COHORT_SECRET_FILE]",
     [](C& c, Text v) { c.secret_file = v; }},
    {"--listen", "PORT", "", "With --starter hand: the port that agents come to [any]",
     [](C& c, Text v) { c.listen = static_cast<std::uint16_t>(number_of(v, 0, 65535)); }},
    {"--host-timeout", "SECONDS", "3",
     "Treat a host, and so the job, as lost after this long without a message; at least 1",
     [](C& c, Text v) { c.host_timeout = host_timeout_of(v); }},
    {"--bind", "HOW", "none",
     "core: pin each rank to its share of the host's cores, adjacent and whole where there are enough (--dry-run says "
     "which); or none",
     [](C& c, Text v) { c.bind = v == "core" ? launch::Binding::Core : launch::Binding::None; }, Kind::Value,
     "core,none"},
    {"--shares", "measured or N,N,...", "",
     "Parts of each step's samples: measured (each rank as many as it computes in the time of the others), or a number "
     "for each host, or each rank. Sets COHORT_SHARES, which DistributedSampler follows where "
     "DistributedDataParallel is given it [all the same]",
     [](C& c, Text v) { c.shares = v; }},
    common({"--servers", "N or colocated", "0",
            "Parameter servers beside the ranks, spread over the hosts; colocated: one on each host. They are no ranks "
            "and take no slots; they run PROGRAM, which asks for its role, or --server-program, and end with the ranks",
            [](C& c, Text v) {
              c.colocated = v == "colocated";
              c.servers = c.colocated ? 0 : servers_of(v);
            }}),
    {"--server-hosts", "A:2,B", "",
     "Hosts of the servers, and how many on each; without --servers N all that they take. Nodes of a Slurm allocation "
     "that are named have no ranks; \"component N\": those of a component of a heterogeneous job [those of the ranks]",
     [](C& c, Text v) { c.server_hosts = v; }},
    common({"--nnodes", "N or MIN:MAX", "",
            "This command is started on each of N hosts, and they form one job: with --node-rank, --master-addr and "
            "--secret-file; -np counts on each. Not needed in an srun step with one task per node. MIN:MAX: an elastic "
            "job, which begins 30 s after MIN have come and goes on with the ranks of MIN",
            [](C& c, Text v) { c.nnodes = v; }}),
    {"--node-rank", "R", "", "Which of the --nnodes hosts this is; 0 supervises, and shows the output of all",
     [](C& c, Text v) { c.node_rank = v; }},
    {"--master-addr", "HOST", "", "The host of node rank 0; the same on all", [](C& c, Text v) { c.master_addr = v; }},
    {"--master-port", "PORT", "", "Where it listens there; the same on all [29500]",
     [](C& c, Text v) { c.master_port = v; }},
    {"--rdzv-endpoint", "HOST[:PORT]", "",
     "As --master-addr, for launchers without --node-rank: the one on HOST is 0, the others are numbered in the order "
     "in which they connect; counts before --master-addr [port 29400]",
     [](C& c, Text v) { c.rdzv_endpoint = v; }},
    {"--rdzv-backend", "NAME", "", "c10d or static, as with torchrun: has no effect; another one is refused",
     [](C& c, Text v) { c.rdzv_backend = v; }},
    {"--rdzv-id", "ID", "", "A name of the job: a launcher with another one is refused",
     [](C& c, Text v) { c.rdzv_id = v; }},
    {"--standalone", "", "", "The job is on this host alone, also in a step or an allocation of several",
     [](C& c, Text v) { c.standalone = truth(v); }, Kind::Flag},
    {"--nproc-per-node", "N", "",
     "Processes on each host: as -np with --nnodes and on one host; cpu: one per usable core; gpu: one per GPU "
     "(CUDA_VISIBLE_DEVICES, else the device files of NVIDIA and AMD); auto: that, or cpu where there is none",
     [](C& c, Text v) {
       if (v != "cpu" && v != "gpu") (void)launch::parse_processes(v);
       c.nproc_per_node = v;
     }},
    {"-m,--module", "", "", "PROGRAM is a Python module",
     [](C& c, Text v) { c.program.python = truth(v) ? ProgramRequest::Python::Module : ProgramRequest::Python::Auto; },
     Kind::Flag},
    {"--no-python", "", "", "Execute PROGRAM itself, also if it ends in .py",
     [](C& c, Text v) {
       if (truth(v)) c.program.python = ProgramRequest::Python::Never;
     },
     Kind::Flag},
    common({"--as-horovod", "", "", "`import horovod.torch` is Cohort's, and HOROVOD_RANK, HOROVOD_SIZE, ... are set",
            [](C& c, Text v) { c.as_horovod = truth(v); }, Kind::Flag}),
    common({"--tf-config", "", "",
            "Set TF_CONFIG, for programs of tf.distribute: each rank is a worker, with a free port of its host; with "
            "--servers rank 0 is the chief, and servers are ps",
            [](C& c, Text v) { c.tf_config = truth(v); }, Kind::Flag}),
    {"--server-program", "COMMAND", "",
     "What servers run, split as by a shell, without expansion; `cohort` is this command [PROGRAM]",
     [](C& c, Text v) { c.server_program = program_request(v); }},
    {"--evaluator", "COMMAND", "",
     "A process beside the ranks, on the first host, that evaluates the training's checkpoints; split as "
     "--server-program. It gets SIGTERM when the ranks have ended [none]",
     [](C& c, Text v) { c.evaluator = program_request(v); }},
    common({"--env", "NAME[=VALUE]", "", "Set a variable for the workers, or insist that it is set; repeatable",
            [](C& c, Text v) { c.environment.push_back(assignment_of(v)); }, Kind::Repeatable}),
    {"--prefix", "STYLE", "rank",
     "What stands before each line: none, rank (host:rank), full (time, host:rank, stream)",
     [](C& c, Text v) { c.prefix = one_of<launch::PrefixStyle>(kPrefixes, v); }, Kind::Value, kPrefixes},
    {"--ranks", "0,3-5", "", "Show only these ranks' output; the logs have all [all]",
     [](C& c, Text v) { c.shown_ranks = v; }},
    {"--collapse", "WHEN", "auto",
     "Show a line that several ranks print within 0.2 s once, as [0-3] | LINE: auto (on a terminal), always, never",
     [](C& c, Text v) { c.collapse = one_of<launch::Collapse>(kCollapses, v); }, Kind::Value, kCollapses},
    {"--page", "", "",
     "Serve a page for browsers as long as the job runs, and print its address (`cohort watch --page`)",
     [](C& c, Text v) { c.page = truth(v); }, Kind::Flag},
    common({"-q,--quiet", "", "", "Print only what the ranks print, and failures",
            [](C& c, Text v) { c.quiet = truth(v); }, Kind::Flag}),
    {"--json", "", "",
     "Write everything to stdout as JSON, one event a line: start, output, notice, warning, rank_ended, process_ended, "
     "members, members_formed, failure, restart, end",
     [](C& c, Text v) { c.json = truth(v); }, Kind::Flag},
    {"--run-dir", "DIR", "",
     "The run's folder: job.json, logs/rank-N.out and .err, and what the program adds. It and the folder above it have "
     "to be yours or root's [runs/<UTC time>-<program>-<id>]",
     [](C& c, Text v) { c.run_folder = v; }},
    {"--no-logs", "", "", "Keep no logs of the ranks' output", [](C& c, Text v) { c.keep_logs = !truth(v); },
     Kind::Flag},
    common({"--track", "SINK", "",
            "Take the run record elsewhere while the job runs: mlflow:URI, wandb:PROJECT, tensorboard:DIR, csv:FILE, "
            "prometheus:FILE, "
            "prometheus:[HOST]:PORT or kubeflow (the default where its variables are set), as `cohort export --to`; "
            "repeatable",
            [](C& c, Text v) {
              track::check_destination(v, env::get(env::kMetricsTokenFile).has_value());
              c.track.push_back(v);
            },
            Kind::Repeatable}),
    common({"--trace", "", "",
            "Record what each rank does, event by event, in trace.json in the run's folder; see `cohort trace --help`",
            [](C& c, Text v) { c.trace = truth(v); }, Kind::Flag}),
    {"--timeout", "SECONDS", "", "End the job after this long, restarts included, with exit status 124 [never]",
     [](C& c, Text v) {
       const auto limit = milliseconds_of(v);
       if (limit.count() > 0) c.timeout = limit;
     }},
    {"--start-timeout", "SECONDS", "30", "How long it may take until all ranks run; 300 with --nnodes",
     [](C& c, Text v) { c.start_timeout = milliseconds_of(v); }},
    {"--grace", "SECONDS", "5", "Time between the first signal that asks ranks to end and the next, stronger one",
     [](C& c, Text v) { c.grace = milliseconds_of(v); }},
    {"--preempt-grace", "SECONDS", "30",
     "Instead of --grace, for ranks that save when SIGTERM asks them to (cohort::Preemption), and for the others to "
     "end once a rank has saved and ended",
     [](C& c, Text v) { c.preempt_grace = milliseconds_of(v); }},
    {"--evaluator-grace", "SECONDS", "300",
     "How long the evaluator may take to end once it has been asked; it may still evaluate the last checkpoint",
     [](C& c, Text v) { c.evaluator_grace = milliseconds_of(v); }},
    {"--stall-timeout", "SECONDS", "1800",
     "End the job when ranks have waited this long for a rank outside collectives; 0: never",
     [](C& c, Text v) { c.health.stall = seconds_of(v); }},
    {"--deadlock-timeout", "SECONDS", "10",
     "End the job when ranks have waited only for each other this long; 0: never",
     [](C& c, Text v) { c.health.deadlock = seconds_of(v); }},
    {"--stopped-timeout", "SECONDS", "60", "End the job when a rank has been stopped (SIGSTOP) this long; 0: never",
     [](C& c, Text v) { c.health.stopped_end = seconds_of(v); }},
    {"--warn-no-step", "SECONDS", "600", "Warn when ranks that took steps have taken none for this long; 0: never",
     [](C& c, Text v) { c.steps.no_step = seconds_of(v); }},
    {"--on-warning", "COMMAND", "",
     "Run this shell command for each warning, with COHORT_WARNING_TEXT, and JSON (kind, rank, step) on its stdin; "
     "what it prints goes to on-warning.log in the run's folder",
     [](C& c, Text v) { c.on_warning = v; }},
    {"--server-restarts", "N", "0",
     "Restart a server that dies, alone, at most N times in the job: for servers with replicas or a journal",
     [](C& c, Text v) { c.server_restarts = number_of(v, 0, 1'000'000); }},
    {"--lost-servers", "N", "0", "Go on when a server dies, at most N times: others have its rows",
     [](C& c, Text v) { c.lost_servers = number_of(v, 0, 1024); }},
    common({"--max-restarts", "N", "0", "Restart all ranks when one fails, at most N times",
            [](C& c, Text v) { c.max_restarts = number_of(v, 0, 1'000'000); }}),
    common({"--min-np,--min-num-proc", "N", "",
            "The job is elastic: when ranks fail, the others go on as long as there are N of them, for programs that "
            "form their world again (`elastic.run`) [a rank that fails ends the job]",
            [](C& c, Text v) { c.elastic.least = number_of(v, 1, launch::kMostProcesses); }}),
    {"--max-np,--max-num-proc", "N", "", "With --min-np: never more ranks than these [as many as the hosts take]",
     [](C& c, Text v) { c.elastic.most = number_of(v, 1, launch::kMostProcesses); }},
    {"--reset-limit", "N", "", "With --min-np: end the job when its ranks would change more than N times [no limit]",
     [](C& c, Text v) { c.elastic.most_changes = number_of(v, 0, 1'000'000); }},
    {"--spares", "N", "0",
     "With --min-np: N more than -np (or --max-np) are started, and wait to take the place of ranks that are lost",
     [](C& c, Text v) { c.elastic.spares = number_of(v, 0, launch::kMostProcesses); }},
    {"--elastic-timeout", "SECONDS", "600",
     "With --min-np: how long a job with too few ranks waits for hosts, where others may come",
     [](C& c, Text v) { c.elastic.timeout = seconds_of(v); }},
    {"--host-discovery-script", "COMMAND", "",
     "With --min-np, in place of -H: this shell command, which is run each second, prints the hosts that there are, as "
     "--hostfile has them; ranks are started on those that come, and leave those that go",
     [](C& c, Text v) { c.elastic.script = v; }},
    {"--slots-per-host", "N", "1", "Ranks of each host of --host-discovery-script that is printed without a number",
     [](C& c, Text v) { c.elastic.slots_per_host = number_of(v, 1, launch::kMostProcesses); }},
    {"--blacklist-cooldown-range", "LOW,HIGH", "",
     "Use a host on which a rank has failed again after LOW seconds, then after twice as long each time, up to HIGH "
     "(also in two words) [never]",
     [](C& c, Text v) { c.elastic.cooldown = cooldown_of(v); }},
    {"--config", "FILE", "", "Take options from the table [run] of this TOML file", [](C&, Text) {}},
    {"--show-config", "", "", "Print the value of each option and where it is from, and end",
     [](C& c, Text v) { c.show_config = truth(v); }, Kind::CommandFlag},
    common({"--dry-run", "", "", "Print the plan, the command and the environment of each rank; start nothing",
            [](C& c, Text v) { c.dry_run = truth(v); }, Kind::Flag}),
    {"--owner", "PID[,DIR]", "",
     "The first option: end the job when the process PID, which has started this command, ends. DIR: a private folder "
     "(0700) of this owner, removed if the owner has ended before it could do so. The files of its folder to-ranks are "
     "brought to the ranks through the job's store, and what ranks leave there comes into from-ranks",
     [](C& c, Text v) {
       const std::size_t comma = std::min(v.find(','), v.size());
       c.owner_pid = number_of(v.substr(0, comma), 1, std::numeric_limits<int>::max());
       c.owner_folder = v.substr(std::min(comma + 1, v.size()));
     },
     Kind::CommandValue},
    {"--agents", "N,FD", "",
     "Wait for N `cohort agent --invited --ranks R`, which the owner starts with what the inherited pipe FD brings it: "
     "a line about this command, and an invitation",
     [](C& c, Text v) {
       const std::vector<std::string> parts = split(v);
       if (parts.size() != 2) raise(ErrorCode::InvalidArgument, "two numbers are wanted, N,FD");
       c.agents = number_of(parts[0], 1, launch::kMostProcesses);
       c.invitation_fd = number_of(parts[1], 3, std::numeric_limits<int>::max());
     },
     Kind::CommandValue},
};

/// The topics of the help, each with its first option. The last has options that programs give and people do not.
constexpr std::pair<std::string_view, std::string_view> kParts[] = {
    {"--np", "Processes and hosts"},
    {"--nnodes", "A launcher on each node, as torchrun is started"},
    {"--module", "The program"},
    {"--prefix", "Output and what is kept"},
    {"--timeout", "Limits and restarts"},
    {"--min-np", "Elastic training"},
    {"--config", "Configuration and dry runs"},
    {"--owner", ""},
};

}  // namespace

std::vector<std::string> RunOption::all_names() const { return split(names); }
std::vector<std::string> RunOption::allowed() const {
  return choices.empty() ? std::vector<std::string>() : split(choices);
}
std::string RunOption::shown_type() const {
  return std::string(type) + (choices.empty() ? "" : fmt::format(":{{{}}}", choices));
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

std::span<const RunOption> run_options() noexcept { return kOptions; }

std::vector<RunPart> run_parts() {
  std::vector<RunPart> parts;
  for (const RunOption& option : kOptions) {
    const auto begins =
        std::ranges::find_if(kParts, [&option](const auto& part) { return part.first == option.name(); });
    if (begins != std::end(kParts)) parts.push_back({begins->second, {}});
    parts.back().options.push_back(&option);
  }
  return parts;
}

const RunOption* run_option(std::string_view name) noexcept {
  for (const RunOption& option : kOptions) {
    const auto names = option.all_names();
    if (std::ranges::find(names, name) != names.end()) return &option;
  }
  return nullptr;
}

void set_option(const RunOption& option, const std::string& value, launch::JobSpec& spec) {
  const auto allowed = option.allowed();
  try {
    if (!allowed.empty() && std::ranges::find(allowed, value) == allowed.end())
      raise(ErrorCode::InvalidArgument, "one of {} is wanted", fmt::join(allowed, ", "));
    option.set(spec, value);
  } catch (const Error& error) {
    const std::string name = option.name() == "--np" ? "-np" : option.name();  // as it is usually called
    throw Error(error.code(), fmt::format("{} {}: {}", name, value, error.what()));
  }
}

void add_shared_options(CLI::App& command, std::initializer_list<std::string_view> names, SharedOptions& shared) {
  for (const std::string_view name : names) {
    const RunOption& option = *run_option(name);
    command
        .add_option_function<std::string>(
            std::string(name.starts_with("--") ? option.names : name),
            [&option, &shared](const std::string& value) {
              set_option(option, value, shared.spec);
              shared.given[option.name()] = value;
            },
            std::string(option.help))
        ->type_name(option.shown_type())
        ->default_str(std::string(option.standard))
        ->envname(option.variable());
  }
}

launch::Plan hosts_of(const launch::JobSpec& spec) {
  if (spec.starter == launch::Starter::Hand)
    raise(ErrorCode::InvalidArgument, "--starter hand is for `cohort run` alone");
  return launch::choose_hosts(spec, launch::Environment::current());
}

void narrow_networks(const std::string& networks) {
  if (networks.empty()) return;
  const auto filters = net::parse_networks(networks);
  auto all = value_or_throw(net::interface_addresses());
  std::string there;
  for (const net::InterfaceAddress& address : all) {
    if (!address.loopback)
      there += fmt::format("{}{} ({})", there.empty() ? "" : ", ", address.text, address.interface);
  }
  if (there.empty()) there = "none";
  if (!filters || filters->empty()) {
    raise(ErrorCode::InvalidArgument,
          "--network {}: names of interfaces are wanted, or networks as 10.0.0.0/8 -- this host has {}", networks,
          there);
  }
  if (!net::choose(std::move(all), *filters)) {
    raise(ErrorCode::InvalidArgument, "--network {}: it fits no address of this host, which has {}", networks, there);
  }
  // All code reads the networks from the environment, here and on other hosts.
  if (::setenv(std::string(env::kNetwork).c_str(), networks.c_str(), 1) != 0)
    raise(ErrorCode::Unavailable, "setenv: {}", errno_text(errno));
}

}  // namespace cohort::app
