// `cohort doctor` finds what would hinder a job on these hosts, and the command that fixes it. With --run, it becomes
// the program that tries the hosts (bench/trial).
#include "base/process.h"
#include "base/result.h"
#include "base/terminal.h"
#include "launch/plan/program.h"
#include "launch/start/hosts.h"
#include "launch/step_costs.h"
#include "observe/doctor/build.h"
#include "observe/doctor/examination.h"
#include "shared/child_job.h"
#include "shared/program.h"
#include "shared/run_options.h"

#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace cohort::app {
namespace {

struct DoctorOptions {
  SharedOptions shared;
  double start_timeout = 10;
  bool json = false, build = false, run = false;
  std::vector<std::string> horovod, torchrun;
};

constexpr const char* kDoctorFooter = R"(Examples:
  cohort doctor                       this host, and what the environment would make of a job
  cohort doctor -H a:4,b:4            hosts reached by ssh, as `cohort run -H a:4,b:4` would
  salloc -N 4 cohort doctor           the nodes of an allocation
  cohort doctor -H a,b --network ib0  over this network only
  cohort doctor --run -H a:4,b:4      then a job on them for a minute: collectives with bits checked, a training
  cohort doctor --build               what this build, Python and this machine have, or why not
  cohort doctor --horovod train.py    what this program uses of Horovod, whether it is here, and what differs

Options that have no value here are taken from the variables of `cohort run` (COHORT_RUN_HOSTS, COHORT_RUN_SSH, ...).
Each row is explained in docs/reference/doctor.md. Exit status: 0, also with warnings; 1 if something failed.)";

doctor::ExaminationOptions request_of(const DoctorOptions& options) {
  if (!(options.start_timeout >= 1 && options.start_timeout <= 600))
    raise(ErrorCode::InvalidArgument, "--start-timeout {}: from 1 to 600 seconds", options.start_timeout);
  const launch::JobSpec& spec = options.shared.spec;
  narrow_networks(spec.network);
  launch::Plan choice = hosts_of(spec);
  doctor::ExaminationOptions request{spec, choice.method, std::move(choice.hosts)};
  const std::chrono::milliseconds longer(static_cast<std::int64_t>(options.start_timeout * 1000));
  request.whole_limit += longer - request.start_limit;
  request.start_limit = longer;
  return request;
}

/// Replaces this process by the job that tries the hosts.
[[noreturn]] void try_hosts(const SharedOptions& shared) {
  std::vector<std::string> words = {"doctor-run"};
  for (const auto& [name, value] : shared.given) words.insert(words.end(), {name, value});
  const CommandProgram* const program = program_of("doctor-run");
  if (program == nullptr)
    raise(ErrorCode::Unavailable, "--run: this build of Cohort is without the extension bench, which has the trial");
  run_program(*program, words);
}

/// Advice that would shorten the steps of the last run on these hosts; empty if unknown, or if nothing would.
std::string advice_of_last_run(const doctor::Checkup& checkup) {
  const char* const kLast = "runs/latest";
  const auto run = costs_of_run(kLast);
  if (!run || run->costs.hosts < 2) return {};
  const bool here = std::ranges::all_of(run->hosts, [&](const std::string& host) {
    return std::ranges::any_of(checkup.hosts, [&](const doctor::HostState& one) { return one.name == host; });
  });
  const std::string advice = here ? launch::advice_of(run->costs, {}) : std::string();
  return advice.empty() ? advice : fmt::format("The last run on these hosts ({}): {}.\n", kLast, advice);
}

void examine(const DoctorOptions& options, int& exit_status) {
  const doctor::Examined examined = doctor::examine(request_of(options));
  if (examined.signal != 0) {
    exit_status = 128 + examined.signal;
    return;
  }
  const auto findings = doctor::judge(examined.checkup);
  const std::string text =
      options.json ? doctor::to_json_report(examined.checkup, findings)
                   : doctor::to_table(examined.checkup, findings,
                                      sys::wants_colour(STDOUT_FILENO) ? doctor::Colour::Yes : doctor::Colour::No);
  std::fputs(text.c_str(), stdout);
  if (!options.json) std::fputs(advice_of_last_run(examined.checkup).c_str(), stdout);
  for (const doctor::Finding& finding : findings) {
    if (finding.level == doctor::Level::Failed) exit_status = 1;
  }
  if (std::fflush(stdout) != 0) exit_status = 1;
}

constexpr const char* kReader = R"(import sys
sys.path = [one for one in sys.path if one]  # not the folder in which it is started, whose json.py is the user's
try:
    from cohort._launch import coming_from as _coming_from
except ImportError as error:
    sys.exit(f"cohort: {sys.executable} has no package cohort that it can use -- {error} -- install Cohort's wheel for it")
sys.exit(_coming_from.main()))";

/// Replaces this process by the Python that `cohort run` would use; that Python reads the programs.
[[noreturn]] void read_programs(const std::string& kind, const std::vector<std::string>& programs, bool json) {
  const std::filesystem::path own = value_or_throw(sys::own_executable()), prefix = own.parent_path().parent_path();
  const launch::Environment environment = launch::Environment::current();
  const std::string python = value_or_throw(launch::active_python(environment));
  std::error_code error;
  if (std::filesystem::exists(prefix / "python/cohort", error)) {  // this is a build folder
    const std::string others = environment.find("PYTHONPATH").value_or("");
    ::setenv("PYTHONPATH", ((prefix / "python").string() + (others.empty() ? "" : ":" + others)).c_str(), 1);
  }
  std::vector<std::string> words = {python, "-c", kReader, kind, "--cohort", prefix / "bin/cohort"};
  if (json) words.push_back("--json");
  std::ranges::copy_if(programs, std::back_inserter(words), [](const std::string& one) { return !one.empty(); });
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(python.c_str(), arguments.data());
  raise(ErrorCode::Unavailable, "cannot start {}: {}", python, errno_text(errno));
}

void add_host(CLI::App& app) {
  app.add_subcommand("doctor-host", "Looks at this host (started by `cohort doctor`)")->group("")->callback([] {
    const int status = doctor::run_doctor_host();
    std::fflush(nullptr);
    ::_exit(status);  // ends the listeners' threads
  });
}

}  // namespace

static void add_doctor(CLI::App& app, int& exit_status) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App* command = app.add_subcommand("doctor", std::string(program_of("doctor")->about));
  command->footer(kDoctorFooter);
  add_shared_options(
      *command,
      {"--hosts", "--hostfile", "--nodes", "--per-node", "--starter", "--ssh", "--remote-cohort", "--network"},
      options->shared);
  CLI::Option* start = command->add_option("--start-timeout", options->start_timeout,
                                           "How long agents on other hosts may take to connect");
  start->type_name("SECONDS")->capture_default_str();
  CLI::Option* json = command->add_flag("--json", options->json, "Everything that was found, as JSON");
  CLI::Option* run =
      command->add_flag("--run", options->run,
                        "Then try the hosts, for at most a minute: collectives whose bits are checked, and a training");
  run->excludes(start, json);
  CLI::Option* build =
      command->add_flag("--build", options->build, "Print what this build and this machine have, or why not");
  build->excludes(start, json, run);
  const auto reads = [command](const char* name, std::vector<std::string>& programs, const char* about) {
    return command->add_option(name, programs, about)->type_name("PROGRAM...")->expected(0, 100000);
  };
  CLI::Option* horovod = reads("--horovod", options->horovod,
                               "Read programs, scripts of a shell's and folders of them, and say what they use of "
                               "Horovod, whether it is here and what differs; without any: all that differs");
  CLI::Option* torchrun = reads("--torchrun", options->torchrun, "The same of torch.distributed and torchrun");
  horovod->excludes(run, build, torchrun);
  torchrun->excludes(run, build);
  command->callback([=, &exit_status] {
    if (options->build) return print_build();
    if (options->run) try_hosts(options->shared);
    if (*horovod) read_programs("horovod", options->horovod, options->json);
    if (*torchrun) read_programs("torchrun", options->torchrun, options->json);
    examine(*options, exit_status);
  });
  add_host(app);
}

}  // namespace cohort::app

int main(int argc, char** argv) { return cohort::app::program_main(argc, argv, {cohort::app::add_doctor}); }
