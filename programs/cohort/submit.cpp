// `cohort submit`: makes a batch script for Slurm from a template; the script starts `cohort run`. Hands it to sbatch,
// and follows its output until the job ends.
#include "base/files.h"
#include "base/json.h"
#include "base/parse.h"
#include "base/process.h"
#include "base/result.h"
#include "base/signals.h"
#include "cohort/commands.h"
#include "cohort/job_state.h"
#include "launch/output/job_record.h"
#include "launch/output/run_folder.h"
#include "launch/plan/program.h"
#include "launch/processes.h"
#include "launch/start/starter.h"
#include "launch/supervise/supervisor.h"
#include "shared/run_options.h"
#include "shared/words.h"
#include "submit_template.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace cohort::app {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

struct SubmitOptions {
  int nodes = 1;
  std::optional<int> tasks, tasks_per_node, cpus_per_task, gpus_per_node;
  std::string time, partition, account, template_file, run_folder, job;
  std::vector<std::string> sbatch;
  bool dry_run = false, no_follow = false;
  std::vector<std::string> run_options;  ///< arguments for `cohort run`
};

// Questions to Slurm, and its answers.

using Answer = Result<launch::Captured>;

Answer ask(const std::vector<std::string>& command, int interrupt) {
  return launch::capture(command, std::chrono::seconds(30), interrupt);
}

/// Error for a command that does not answer. That says nothing about the job, so the command is run again later.
tl::unexpected<Error> no_answer(const Answer& said) {
  return said ? fail(ErrorCode::Io, "{}", launch::last_of(said->text)) : tl::unexpected(said.error());
}

JobState gone() { return {"gone", true, {}}; }

/// Parts of sbatch's notation for a job of another cluster: "4711;b" is job 4711 of cluster b.
struct SlurmJob {
  std::string number;
  std::vector<std::string> cluster = {};  ///< arguments for Slurm's commands
};

SlurmJob slurm_job(const std::string& job) {
  const auto end = job.find(';');
  if (end == std::string::npos) return {job};
  return {job.substr(0, end), {"-M", job.substr(end + 1)}};
}

/// Returns a Slurm command for the job's cluster.
std::vector<std::string> of_cluster(std::string command, const SlurmJob& job, const std::vector<std::string>& words) {
  std::vector<std::string> all = {std::move(command)};
  all.insert(all.end(), job.cluster.begin(), job.cluster.end());
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

/// Fails if Slurm does not answer now: with Aborted if the descriptor becomes readable, with Unavailable if Slurm's
/// command is missing here.
Result<JobState> ask_state(const std::string& name, int interrupt) {
  const SlurmJob job = slurm_job(name);
  const Answer live = ask(of_cluster("scontrol", job, {"-o", "show", "job", job.number}), interrupt);
  if (live && live->status == 0) return state_by_scontrol(live->text);
  if (!live || live->text.find("Invalid job id") == std::string::npos) return no_answer(live);
  // Slurm has forgotten the job, but its accounting may still know it.
  const Answer kept =
      ask(of_cluster("sacct", job, {"-X", "-n", "-P", "-o", "State,ExitCode", "-j", job.number}), interrupt);
  if (!kept && kept.error().code() == ErrorCode::Aborted) return tl::unexpected(kept.error());
  return kept && kept->status == 0 ? state_by_sacct(kept->text).value_or(gone()) : gone();
}

// The next functions make the script.

/// Seconds of a time in sbatch's forms: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]].
long seconds_of(const std::string& text) {
  static const std::regex form(R"((?:(\d{1,3})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?)");
  std::smatch found;
  if (!std::regex_match(text, found, form))
    raise(ErrorCode::InvalidArgument, "--time {}: minutes, hours:minutes:seconds or days-hours are wanted", text);
  const auto number = [&found](std::size_t part) { return found[part].matched ? std::stol(found[part]) : 0; };
  const bool from_hours = found[1].matched || found[4].matched;
  return from_hours ? number(1) * 86400 + number(2) * 3600 + number(3) * 60 + number(4) : number(2) * 60 + number(3);
}

/// Least time limit of a job for which Slurm is asked to send a signal before the end. In shorter jobs, the signal
/// would come right after the beginning.
constexpr int kLeastForSignal = 600;
constexpr const char* kSignal = "B:USR1@120";

using Values = std::map<std::string, std::vector<std::string>>;

/// Replaces the @names@ of each line. Drops lines whose name has no value, and repeats a line for each value of a list.
std::string filled(std::string_view script, const Values& values, const std::string& whose) {
  static const std::regex name("@([a-z_]+)@");
  std::string text;
  for (const std::string& line : split(script, '\n')) {
    std::vector<std::string> lines = {""};
    std::size_t done = 0;
    for (std::sregex_iterator found(line.begin(), line.end(), name), end; found != end; ++found) {
      const auto value = values.find((*found)[1]);
      if (value == values.end()) {
        std::vector<std::string> names;
        for (const auto& [each, ignored] : values) names.push_back(each);
        raise(ErrorCode::InvalidArgument, "{}: there is no {}; there are {}", whose, found->str(),
              fmt::join(names, ", "));
      }
      const auto at = static_cast<std::size_t>(found->position());
      std::vector<std::string> longer;
      for (const std::string& begun : lines) {
        for (const std::string& each : value->second) {
          // The second line of a value would become a command.
          if (line.starts_with('#') && each.find('\n') != std::string::npos)
            raise(ErrorCode::InvalidArgument, "{} stands in one line of the script: no line break may be in it: {}",
                  found->str(), each);
          longer.push_back(begun + line.substr(done, at - done) + each);
        }
      }
      lines = std::move(longer);
      done = at + static_cast<std::size_t>(found->length());
    }
    for (const std::string& each : lines) text += each + line.substr(done) + "\n";
  }
  if (text.ends_with("\n\n")) text.pop_back();
  return text;
}

std::string command_text(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + launch::shell_quoted(word);
  return text;
}

std::string name_of(const std::string& program) {
  std::string name = fs::path(program).stem().string();
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '_'; }, '_');
  return name;
}

/// True if one of sbatch's own options gives the number of tasks or nodes.
bool sbatch_says_how_many(const SubmitOptions& options) {
  static const std::regex theirs("(-n|-N|--ntasks|--ntasks-per-node|--ntasks-per-gpu|--nodes)([= \\d].*)?");
  return std::ranges::any_of(options.sbatch, [](const std::string& each) { return std::regex_match(each, theirs); });
}

/// Options of sbatch that would undo what the script does, and how else to say it.
struct Undoing {
  std::string_view name;
  char letter;
  std::string_view instead;
};

constexpr Undoing kUndoing[] = {
    {"--output", 'o', "the output is followed in the run's folder: --run-dir DIR"},
    {"--error", 'e', "stderr is followed with the output, in output.txt of the run's folder"},
    {"--open-mode", '\0', "a job that is queued again goes on with its output, which is followed"},
    {"--array", 'a', "its jobs would share the run's folder: submit each by itself"},
    {"--wait", 'W', "leave it out: the job is followed until it ends"},
    {"--time", 't', "give --time without --sbatch: it also says whether the job is sent a signal before the end"},
};

/// Throws InvalidArgument for a word that is no option of sbatch, or undoes what the script does.
void check_sbatch(const std::string& option) {
  const auto refuse = [&option](std::string_view why) {
    raise(ErrorCode::InvalidArgument, "--sbatch {}: {}", option, why);
  };
  if (option.size() < 2 || option[0] != '-') refuse("options of sbatch begin with -, as in --sbatch=--mem=0");
  const std::string_view name = std::string_view(option).substr(0, option.find_first_of("= "));
  const bool is_long = name.starts_with("--");
  for (const Undoing& one : kUndoing) {  // sbatch takes a long name that is cut short, too
    if (is_long ? name.size() > 3 && one.name.starts_with(name) : name[1] == one.letter) refuse(one.instead);
  }
  if (name.size() < 4 || !std::string_view("--signal").starts_with(name)) return;
  const std::string_view value = std::string_view(option).substr(std::min(name.size() + 1, option.size()));
  if (value.substr(0, std::min(value.find(':'), value.size())).find('B') == std::string_view::npos)
    refuse("--signal=B:SIGNAL@SECONDS is wanted, since the script has to get it");
}

Values values_of(const SubmitOptions& options, const std::string& run_folder, const std::vector<std::string>& program) {
  const long seconds = options.time.empty() ? 0 : seconds_of(options.time);
  const auto given = [](const auto& value) {
    return value ? std::vector{std::to_string(*value)} : std::vector<std::string>();
  };
  const auto text = [](const std::string& value) {
    return value.empty() ? std::vector<std::string>() : std::vector{value};
  };
  std::vector<std::string> command = {value_or_throw(launch::own_command()), "run", "--run-dir", run_folder};
  // With several nodes, Slurm divides the tasks among them. With one, `cohort run` needs -np, as on any host.
  if (options.nodes == 1 && !sbatch_says_how_many(options))
    command.insert(command.end(), {"-np", std::to_string(options.tasks.value_or(options.tasks_per_node.value_or(1)))});
  command.insert(command.end(), options.run_options.begin(), options.run_options.end());
  Values values;
  values["name"] = {name_of(program.front())};
  values["folder"] = {launch::shell_quoted(fs::current_path().string())};
  values["run_dir"] = {launch::shell_quoted(run_folder)};
  // sbatch would replace patterns such as %j, so each % is doubled.
  values["output"] = {std::regex_replace(launch::shell_quoted(run_folder + "/output.txt"), std::regex("%"), "%%")};
  values["command_with"] = {command_text(command)};
  values["program"] = {command_text(program)};
  values["command"] = {values["command_with"].front() + " -- " + values["program"].front()};
  values["nodes"] = {std::to_string(options.nodes)};
  values["ntasks"] = given(options.tasks);
  values["ntasks_per_node"] = given(options.tasks_per_node);
  values["cpus_per_task"] = given(options.cpus_per_task);
  values["gpus_per_node"] = given(options.gpus_per_node);
  values["time"] = text(options.time);
  const auto word = [&text](const std::string& value) {
    return text(value.empty() ? "" : launch::shell_quoted(value));
  };
  values["partition"] = word(options.partition);
  values["account"] = word(options.account);
  values["signal"] = text(seconds == 0 || seconds >= kLeastForSignal ? kSignal : "");
  for (const std::string& each : options.sbatch) check_sbatch(each);
  values["sbatch"] = options.sbatch;
  return values;
}

// The next functions follow the job.

struct Submitted {
  std::string job, folder;  ///< the run's folder
  std::string output() const { return folder + "/output.txt"; }
};

/// The job's name without the cluster.
std::string shown_job(const Submitted& job) { return slurm_job(job.job).number; }

/// Prints the new part of the file, which may appear late on a network file system.
void print_new(const std::string& path, std::streamoff& at) {
  std::ifstream file(path, std::ios::binary);
  if (!file || !file.seekg(at)) return;
  std::array<char, 65536> bytes;
  while (file.read(bytes.data(), static_cast<std::streamsize>(bytes.size())), file.gcount() > 0) {
    std::fwrite(bytes.data(), 1, static_cast<std::size_t>(file.gcount()), stdout);
    at += file.gcount();
  }
  std::fflush(stdout);
}

std::streamoff size_of(const std::string& path) {
  std::error_code none;
  const std::uintmax_t size = fs::file_size(path, none);
  return none ? 0 : static_cast<std::streamoff>(size);
}

/// Exit status in the run's own record, for a job that the scheduler has forgotten.
std::optional<int> recorded_status(const std::string& folder) {
  const auto record = parse_json_or_discard(sys::read_text(folder + "/job.json").value_or(std::string()));
  if (!record.is_object()) return std::nullopt;
  const auto status = number_in(record, "exit_status");
  return status ? std::optional(static_cast<int>(std::clamp(*status, 0.0, 255.0))) : std::nullopt;
}

/// Prints the output from `at` on until the job is over, and returns its status; 130 after Ctrl-C, when `interrupt` is
/// readable.
int follow(const Submitted& job, std::streamoff at, int interrupt) {
  constexpr auto kPause = std::chrono::milliseconds(500), kAskEvery = std::chrono::milliseconds(2000);
  std::string last;
  Clock::time_point asked;
  while (true) {
    print_new(job.output(), at);
    pollfd interrupted{interrupt, POLLIN, 0};
    if (::poll(&interrupted, 1, asked == Clock::time_point() ? 0 : static_cast<int>(kPause.count())) > 0) {
      fmt::print(stderr,
                 "\ncohort: not followed any more; the job goes on\n  to come back:   cohort submit --follow {}\n"
                 "  to end the job: {}\n",
                 shown_job(job), fmt::join(of_cluster("scancel", slurm_job(job.job), {shown_job(job)}), " "));
      return 128 + SIGINT;
    }
    if (Clock::now() - asked < kAskEvery) continue;
    asked = Clock::now();
    const auto state = ask_state(job.job, interrupt);
    if (!state && state.error().code() == ErrorCode::Aborted) continue;
    if (!state && state.error().code() == ErrorCode::Unavailable)
      raise(ErrorCode::Unavailable, "job {} cannot be followed here, and goes on: {}", shown_job(job),
            state.error().what());
    const std::string word = state ? state->word : fmt::format("state is not known now: {}", state.error().what());
    if (std::exchange(last, word) != word) fmt::print(stderr, "cohort: job {}: {}\n", shown_job(job), word);
    if (!state || !state->over) continue;
    ::poll(&interrupted, 1, static_cast<int>(kPause.count()));
    print_new(job.output(), at);
    const auto status = state->status ? state->status : recorded_status(job.folder);
    if (!status)
      raise(ErrorCode::Unavailable, "job {} is over, and Slurm does not say how it ended; its output: {}",
            shown_job(job), job.output());
    if (*status != 0)
      fmt::print(stderr, "cohort: job {} ended with status {} ({})\n", shown_job(job), *status, job.folder);
    return *status;
  }
}

constexpr const char* kRecord = "submit.json";

Submitted submitted_as(const std::string& wanted) {
  std::vector<fs::path> folders = {wanted};
  std::error_code error;
  for (fs::directory_iterator entry("runs", error), end; !error && entry != end; entry.increment(error)) {
    if (!entry->is_symlink(error)) folders.push_back(entry->path());
  }
  for (const fs::path& folder : folders) {
    const auto record = parse_json_or_discard(sys::read_text(folder / kRecord).value_or(std::string()));
    if (!record.is_object()) continue;
    const std::string job = text_in(record, "job");
    if (folder != wanted && job != wanted && slurm_job(job).number != wanted) continue;
    return {job, fs::absolute(folder).string()};
  }
  raise(
      ErrorCode::InvalidArgument,
      "--follow {}: no run in ./runs was submitted as this job -- go to the folder in which it was, or give the run's "
      "folder",
      wanted);
}

int follow_again(const std::string& wanted) {
  const Submitted job = submitted_as(wanted);
  constexpr std::streamoff kShown = 16384;
  std::streamoff at = std::max<std::streamoff>(size_of(job.output()) - kShown, 0);
  if (at > 0) {
    std::ifstream file(job.output(), std::ios::binary);
    file.seekg(at);
    std::string line;
    if (std::getline(file, line)) at += static_cast<std::streamoff>(line.size()) + 1;
    fmt::print(stderr, "cohort: what stands before is in {}\n", job.output());
  }
  const sys::SignalFd interrupt = value_or_throw(sys::SignalFd::create({SIGINT}));
  return follow(job, at, interrupt.fd());
}

/// Hands the script to sbatch; returns the job's number in sbatch's notation. Raises if there is no job. Returns
/// nullopt, prints a message and sets the command's `status`, if the job may still be queued.
std::optional<std::string> submit_script(const std::string& path, int interrupt, int& status) {
  const auto said = launch::capture({"sbatch", "--parsable", path}, std::chrono::minutes(2), interrupt);
  std::string answer = said ? said->text : said.error().what();
  while (answer.ends_with('\n')) answer.pop_back();
  if (!said && said.error().code() != ErrorCode::Unavailable) {
    fmt::print(stderr, "cohort: {}: the job may be queued all the same; the script is {}\n", answer, path);
    status = said.error().code() == ErrorCode::Aborted ? 128 + SIGINT : 1;
    return std::nullopt;
  }
  if (!said || said->status != 0) {
    raise(ErrorCode::Unavailable,
          "sbatch refuses the job: {} -- partitions that there are: `sinfo -s`; the script is {}", answer, path);
  }
  // sbatch may print remarks before and after the number.
  std::string number;
  const std::regex form(R"(\d+(;\S+)?)");
  for (std::string& line : split(answer, '\n')) {
    if (std::regex_match(line, form))
      number = std::move(line);
    else
      fmt::print(stderr, "{}\n", line);
  }
  if (number.empty()) raise(ErrorCode::Unavailable, "sbatch does not say the job's number; the script is {}", path);
  return number;
}

int submit_job(const SubmitOptions& options, const std::vector<std::string>& program) {
  if (!options.job.empty()) return follow_again(options.job);
  if (program.empty()) raise(ErrorCode::InvalidArgument, "no program; for example: cohort submit --nodes 2 -- ./train");
  std::string script(kSlurmScript);
  if (!options.template_file.empty())
    script = std::string(value_or_throw(sys::read_file(options.template_file)).text());
  const std::string whose = options.template_file.empty() ? "slurm.sh" : options.template_file;
  if (options.dry_run) {
    const std::string folder = options.run_folder.empty() ? "runs/NAME" : options.run_folder;
    const Values values = values_of(options, launch::absolute_path(folder), program);
    std::fputs(filled(script, values, whose).c_str(), stdout);
    fmt::print(stderr, "cohort: not submitted; it would be: sbatch --parsable {}/submit.sh\n", folder);
    return 0;
  }
  // Errors in the options are reported before a folder is made.
  (void)filled(script, values_of(options, "/", program), whose);
  if (!launch::find_command("sbatch", launch::Environment::current()))
    raise(ErrorCode::Unavailable,
          "there is no sbatch in PATH -- submit on a login node of a cluster with Slurm; to see the script: --dry-run; "
          "another scheduler: docs/reference/submit.md; hosts without a scheduler: `cohort run -H a,b`");
  launch::RunFolder folder =
      value_or_throw(launch::make_run_folder({options.run_folder, name_of(program.front()), sys::random_hex(6)}));
  const std::string path = folder.path + "/submit.sh";
  const std::string text = filled(script, values_of(options, folder.path, program), whose);
  value_or_throw(launch::replace_file(folder, "submit.sh", text));
  fmt::print(stderr, "{}\ncohort: sbatch --parsable {}\n", text, path);
  folder.lock.reset();  // the job needs the lock, and may begin before we know
  const std::streamoff begin = size_of(folder.path + "/output.txt");  // left by an earlier job
  const sys::SignalFd interrupt = value_or_throw(sys::SignalFd::create({SIGINT}));
  int status = 0;
  const auto number = submit_script(path, interrupt.fd(), status);
  if (!number) return status;
  Submitted job{*number, folder.path};
  fmt::print(stderr, "cohort: job {}; its output: {}\n", shown_job(job), job.output());
  const nlohmann::ordered_json record = {{"job", job.job}, {"submitted", launch::utc_now()}};
  value_or_throw(sys::write_file_atomically(folder.path + "/" + kRecord, json_text(record) + "\n"));
  return options.no_follow ? 0 : follow(job, begin, interrupt.fd());
}

// The next functions read the arguments.

/// Options of `cohort run`, except those for where a job runs or how it is started, since Slurm decides that.
std::vector<RunPart> taken_options() {
  constexpr std::string_view kTheirs =
      ",--np,--hosts,--hostfile,--nodes,--per-node,--starter,--ssh,--remote-cohort,--sync,--sync-exclude,--secret-file,"
      "--listen,--nnodes,--node-rank,--master-addr,--master-port,--rdzv-endpoint,--rdzv-backend,--rdzv-id,"
      "--standalone,--nproc-per-node,--host-discovery-script,--slots-per-host,--run-dir,--dry-run,";
  RunPart taken;
  for (const RunOption& option : run_options()) {
    if (!option.only_on_command_line() && kTheirs.find("," + option.name() + ",") == std::string_view::npos)
      taken.options.push_back(&option);
  }
  return {taken};
}

constexpr const char* kSubmitFooter =
    R"(Options of `cohort run` that say how the job runs (--max-restarts, --env, --config, ...) are taken, too.
Examples:
  cohort submit --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 --time 4:00:00 -- python train.py
  cohort submit --nodes 2 --dry-run -- ./train          the script alone
  cohort submit --follow 4711                           its output, again

Ctrl-C ends the following, not the job. Exit status: the job's. See docs/reference/submit.md.)";

void add_submit_options(CLI::App& command, SubmitOptions& options) {
  const auto positive = CLI::Range(1, 1'000'000);
  const auto text = [&command](const char* name, std::string& to, const char* type, const char* help) {
    return command.add_option(name, to, help)->type_name(type);
  };
  const auto number = [&](const char* name, auto& to, const char* help) {
    return command.add_option(name, to, help)->type_name("N")->check(positive);
  };
  number("-N,--nodes", options.nodes, "Nodes")->capture_default_str();
  number("-n,--np,--ntasks", options.tasks, "Ranks, altogether (also -np N) [one per node]");
  number("--ntasks-per-node", options.tasks_per_node, "Ranks on each node");
  number("-c,--cpus-per-task", options.cpus_per_task, "Cores of each rank [1]");
  number("--gpus-per-node", options.gpus_per_node, "GPUs of each node");
  text("-t,--time", options.time, "TIME", "Limit: minutes, hours:minutes:seconds, days-hours [the partition's]");
  text("-p,--partition", options.partition, "NAME", "Partition, or queue");
  text("-A,--account", options.account, "NAME", "Whose time it is");
  command.add_option("--sbatch", "An option of sbatch: --sbatch=--constraint=a100; repeatable")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("OPTION");
  text("--template", options.template_file, "FILE", "A script of the site's own, with @nodes@ and the like");
  text("--run-dir", options.run_folder, "DIR", "The run's folder [runs/<UTC time>-<program>-<id>]");
  command.add_flag("--dry-run", options.dry_run, "Print the script, and submit nothing");
  command.add_flag("--no-follow", options.no_follow, "End once it is submitted");
  text("--follow", options.job, "JOB", "Follow a job that was submitted: its number, or the run's folder");
  add_options(command, taken_options());
}

}  // namespace

void add_submit(CLI::App& app, int&) {
  static SubmitOptions none;  // for the help and the completion; `submit` reads the words
  CLI::App* command = app.add_subcommand("submit", "Submit a job to Slurm, and follow its output");
  add_submit_options(*command, none);
  command->add_option("PROGRAM", "Program or .py file, and its arguments")->type_name("...");
  command->footer(kSubmitFooter);
}

void submit(const std::vector<std::string>& typed, int& exit_status) {
  SubmitOptions options;
  CLI::App parser("", "submit");
  add_submit_options(parser, options);
  const Words words = read_words(parser, taken_options(), typed, "sbatch's own: --sbatch=OPTION");
  options.sbatch = parser.get_option("--sbatch")->results();
  for (const auto& [option, values] : words.given) {
    for (const std::string& value : values) {
      launch::JobSpec checked;
      set_option(*option, value, checked);
      options.run_options.push_back(option->name());
      if (!option->is_flag())
        options.run_options.push_back(value);
      else if (value != "true")
        options.run_options.back() += "=" + value;
    }
  }
  exit_status = submit_job(options, words.program);
}

}  // namespace cohort::app
