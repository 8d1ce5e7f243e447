// `cohort doctor`: what would hinder a job on these hosts, and the command that mends it.
#include "doctor/examination.h"
#include "doctor/host.h"
#include "doctor/report.h"
#include "launch/start/hosts.h"
#include "sys/terminal.h"

#include "commands.h"
#include "host_options.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

namespace cohort::app {
namespace {

struct Options {
  launch::HostWishes hosts;
  std::string starter = "auto";
  std::string ssh = "ssh";
  std::string remote_cohort;
  std::string network;
  double start_timeout = 10;
  bool json = false;
};

constexpr const char* kFooter = R"(Examples:
  cohort doctor                       this host, and what the environment would make of a job
  cohort doctor -H a:4,b:4            hosts reached by ssh, as `cohort run -H a:4,b:4` would
  salloc -N 4 cohort doctor           the nodes of an allocation
  cohort doctor -H a,b --network ib0  over this network only

Options that have no value here are taken from the variables of `cohort run` (COHORT_RUN_HOSTS, COHORT_RUN_SSH, ...).
Each row is explained in docs/reference/doctor.md. Exit status: 0, also with warnings; 1 if something failed.)";

doctor::ExaminationOptions request_of(const Options& options) {
  if (!(options.start_timeout >= 1 && options.start_timeout <= 600))
    raise(ErrorCode::InvalidArgument, "--start-timeout {}: from 1 to 600 seconds", options.start_timeout);
  narrow_networks(options.network);
  launch::HostWishes wishes = options.hosts;
  wishes.starter = starter_of(options.starter);
  launch::HostChoice choice = value_or_throw(launch::choose_hosts(wishes, launch::Environment::current()));
  doctor::ExaminationOptions request;
  request.hosts = std::move(choice.hosts);
  request.remote.way = choice.way;
  request.remote.components = std::move(choice.components);
  request.remote.remote_cohort = options.remote_cohort;
  request.remote.ssh = ssh_command(options.ssh);
  request.all_local = wishes.starter == launch::HostWishes::Starter::Local;
  const std::chrono::milliseconds longer(static_cast<std::int64_t>(options.start_timeout * 1000));
  request.whole_limit += longer - request.start_limit;
  request.start_limit = longer;
  return request;
}

void examine(const Options& options, int& exit_status) {
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

void add_doctor(CLI::App& app, int& exit_status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("doctor", "Look for what would hinder a job, on this host or on several");
  command->footer(kFooter);
  command->add_option("-H,--hosts", options->hosts.list, "Hosts and their slots [this one, or the allocation's]")
      ->type_name("A:4,B:4")
      ->envname("COHORT_RUN_HOSTS");
  command->add_option("--hostfile", options->hosts.file, "A file of them: lines of HOST, HOST:N or HOST slots=N")
      ->type_name("FILE")
      ->envname("COHORT_RUN_HOSTFILE");
  command->add_option("--nodes", options->hosts.nodes, "Only the first so many hosts [all]")
      ->type_name("N")
      ->check(CLI::Range(0, launch::kMostProcesses));
  command
      ->add_option("--per-node", options->hosts.per_node, "Ranks that each host is to run [as the list says, else 1]")
      ->type_name("N")
      ->check(CLI::Range(0, launch::kMostProcesses));
  command
      ->add_option("--starter", options->starter,
                   "How other hosts are reached: auto (srun within a Slurm allocation, else ssh), ssh, slurm, mpirun; "
                   "local: every host is this one, to try")
      ->check(CLI::IsMember({"auto", "ssh", "slurm", "mpirun", "local"}))
      ->capture_default_str()
      ->type_name("HOW")
      ->envname("COHORT_RUN_STARTER");
  command->add_option("--ssh", options->ssh, "The ssh command, with options of yours: \"ssh -p 2222\"")
      ->capture_default_str()
      ->type_name("COMMAND")
      ->envname("COHORT_RUN_SSH");
  command->add_option("--remote-cohort", options->remote_cohort, "Path of `cohort` on other hosts [as here]")
      ->type_name("PATH")
      ->envname("COHORT_RUN_REMOTE_COHORT");
  command
      ->add_option("--network", options->network,
                   "Only over these networks: names of interfaces, or networks as 10.0.0.0/8 [all]")
      ->type_name("NAME or CIDR[,...]")
      ->envname("COHORT_RUN_NETWORK");
  command->add_option("--start-timeout", options->start_timeout, "For agents on other hosts to come")
      ->type_name("SECONDS")
      ->capture_default_str();
  command->add_flag("--json", options->json, "Everything that was found, as JSON");
  command->callback([options, &exit_status] { examine(*options, exit_status); });
  add_host(app);
}

}  // namespace cohort::app
