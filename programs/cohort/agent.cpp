#include "launch/agent/agent.h"

#include "launch/plan/plan.h"
#include "launch/start/invitation.h"
#include "net/socket.h"

#include "cohort/commands.h"
#include "shared/run_options.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <utility>

namespace cohort::app {
namespace {

/// Longest wait, after the announcement, for the invitation. It is less than a job's default wait for its agents (30
/// s), so that an agent to which nothing comes any more, not even an end of file, ends before the job gives up.
constexpr auto kInvitationLimit = std::chrono::seconds(20);
constexpr std::size_t kLongestInvitation = 8000;

/// Reads the invitation from stdin, and not a byte more, since the end of input that follows belongs to the lifeline.
launch::Invitation read_invitation() {
  const net::Deadline deadline = net::deadline_in(kInvitationLimit);
  std::string text;
  text.reserve(kLongestInvitation);  // so that it stays in one place
  while (!text.ends_with("\n" + std::string(launch::kInvitationEnd))) {
    if (!value_or_throw(net::wait_ready(0, POLLIN, deadline)))
      raise(ErrorCode::Timeout, "no invitation from `cohort run`");
    char byte = 0;
    const ssize_t got = ::read(0, &byte, 1);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got < 0) raise(ErrorCode::Io, "stdin: {}", errno_text(errno));
    if (got == 0 || text.size() == kLongestInvitation) {
      raise(ErrorCode::Unavailable, "`cohort agent` is started by `cohort run`; it was not invited");
    }
    text += byte;
  }
  auto invitation = value_or_throw(launch::parse_invitation(text));
  net::wipe(text);
  return invitation;
}

/// Runs behind a command such as ssh: announces the agent, and receives the invitation.
void be_invited(launch::AgentOptions& agent) {
  // Begins a new line, since other programs may have printed before.
  fmt::print("\n{}\n", launch::to_line(launch::own_announcement()));
  std::fflush(stdout);
  launch::Invitation invitation = read_invitation();
  agent.supervisor = std::move(invitation.supervisor);
  agent.router = std::move(invitation.router);
  agent.routes = invitation.routes;
  agent.secret = invitation.secret;
  agent.host_index = invitation.host_index;
  agent.elsewhere = true;
  agent.host_timeout = invitation.host_timeout;
  const sys::UniqueFd null_device(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (null_device) ::dup2(null_device.get(), 1);
}

/// For an agent started by hand: the command line has the job's address and secret.
void join_by_hand(launch::AgentOptions& agent, const std::string& places, const std::string& secret_file,
                  double timeout, double host_timeout) {
  if (secret_file.empty()) raise(ErrorCode::InvalidArgument, "--join: --secret-file FILE is wanted");
  for (const std::string& place : split(places))
    agent.supervisor.push_back({value_or_throw(net::parse_address(place)), {}});
  const auto milliseconds = [](double seconds, const char* option) {
    if (!(seconds >= 1 && seconds <= 1e6))
      raise(ErrorCode::InvalidArgument, "{} {}: from 1 to 1e6 seconds", option, seconds);
    return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
  };
  agent.secret = value_or_throw(net::Secret::from_file(secret_file));
  agent.host_index = -1;
  agent.elsewhere = true;
  agent.patient = true;
  agent.connect_timeout = milliseconds(timeout, "--timeout");
  agent.host_timeout = milliseconds(host_timeout, "--host-timeout");
}

}  // namespace

void add_agent(CLI::App& app, int& exit_status) {
  struct Options {
    std::string connect;
    int secret_fd = -1;
    bool invited = false;
    std::string join;
    std::string secret_file;
    double timeout = 60;
    double host_timeout = 3;
    std::string devices;
    launch::AgentOptions agent;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("agent", "Runs the part of a job that is on this host (started by `cohort run`, or by hand)")
          ->group("");
  auto* invited = command->add_flag("--invited", options->invited);
  command->add_option("--connect", options->connect)->excludes(invited);
  command->add_option("--secret-fd", options->secret_fd)->excludes(invited);
  command->add_option("--host-index", options->agent.host_index)->excludes(invited);
  command->add_option("--input-fd", options->agent.input_fd)->excludes(invited);
  command->add_option("--join", options->join, "By hand: where `cohort run --starter hand` waits")
      ->type_name("HOST:PORT[,HOST:PORT...]")
      ->excludes(invited);
  command->add_option("--secret-file", options->secret_file, "The job's secret")->type_name("FILE");
  command->add_option("--name", options->agent.host_name, "This host, as `cohort run` names it [the system's name]")
      ->type_name("HOST");
  command
      ->add_option("--ranks", options->agent.ranks,
                   "How many ranks it starts, in this environment and folder, for `run --agents`")
      ->type_name("N")
      ->check(CLI::Range(1, launch::kMostProcesses))
      ->needs(invited);
  command->add_option("--devices", options->devices, "With --ranks: GPUs that it brings, as CUDA_VISIBLE_DEVICES")
      ->type_name("LIST");
  command->add_option("--timeout", options->timeout, "How long to wait for the job")
      ->type_name("SECONDS")
      ->capture_default_str();
  command
      ->add_option("--host-timeout", options->host_timeout,
                   "Treat a job as lost after this long without a message from its host")
      ->type_name("SECONDS")
      ->capture_default_str();
  command->callback([options, &exit_status] {
    if (!options->devices.empty()) options->agent.devices = split(options->devices);
    if (!options->join.empty()) {
      join_by_hand(options->agent, options->join, options->secret_file, options->timeout, options->host_timeout);
      options->agent.lifeline_fd = -1;  // stdin need not be a lifeline
      exit_status = launch::run_agent(options->agent);
      return;
    }
    if (options->invited) {
      be_invited(options->agent);
    } else {
      options->agent.supervisor = {{value_or_throw(net::parse_address(options->connect)), {}}};
      options->agent.secret = value_or_throw(net::Secret::from_sealed_memfd(options->secret_fd));
    }
    exit_status = launch::run_agent(options->agent);
  });
}

}  // namespace cohort::app
