// `cohort doctor`: what would hinder a job on these hosts, and the command that fixes it.
#include "base/terminal.h"
#include "doctor/examination.h"
#include "launch/start/hosts.h"

#include "shared/program.h"
#include "shared/run_options.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

namespace cohort::app {
namespace {

struct DoctorOptions {
  SharedOptions shared;
  double start_timeout = 10;
  bool json = false;
};

constexpr const char* kDoctorFooter = R"(Examples:
  cohort doctor                       this host, and what the environment would make of a job
  cohort doctor -H a:4,b:4            hosts reached by ssh, as `cohort run -H a:4,b:4` would
  salloc -N 4 cohort doctor           the nodes of an allocation
  cohort doctor -H a,b --network ib0  over this network only

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
  for (const doctor::Finding& finding : findings) {
    if (finding.level == doctor::Level::Failed) exit_status = 1;
  }
  if (std::fflush(stdout) != 0) exit_status = 1;
}

void add_host(CLI::App& app) {
  app.add_subcommand("doctor-host", "Looks at this host (started by `cohort doctor`)")->group("")->callback([] {
    const int status = doctor::run_doctor_host();
    std::fflush(nullptr);
    ::_exit(status);  // its listeners' threads have no other end
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
  command->add_option("--start-timeout", options->start_timeout, "How long agents on other hosts may take to connect")
      ->type_name("SECONDS")
      ->capture_default_str();
  command->add_flag("--json", options->json, "Everything that was found, as JSON");
  command->callback([options, &exit_status] { examine(*options, exit_status); });
  add_host(app);
}

}  // namespace cohort::app

int main(int argc, char** argv) { return cohort::app::program_main(argc, argv, {cohort::app::add_doctor}); }
