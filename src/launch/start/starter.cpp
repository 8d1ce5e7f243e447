#include "launch/start/starter.h"

#include "launch/environment.h"
#include "launch/plan/program.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

struct Pipe {
  sys::UniqueFd read_end;
  sys::UniqueFd write_end;
};

Result<Pipe> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return fail(ErrorCode::Unavailable, "pipe: {}", errno_text(errno));
  return Pipe{sys::UniqueFd(ends[0]), sys::UniqueFd(ends[1])};
}

Result<sys::ChildProcess> spawn(const sys::SpawnOptions& options, const std::string& what) {
  auto pending = sys::spawn(options);
  if (!pending) {
    return fail(ErrorCode::Unavailable, "cannot start {}: {}", what, sys::to_string(pending.error()));
  }
  auto process = std::move(*pending).confirm();
  if (!process) {
    return fail(ErrorCode::Unavailable, "cannot start {}: {}", what, sys::to_string(process.error()));
  }
  return *std::move(process);
}

}  // namespace

Result<AgentProcess> start_local_agent(const PlannedHost& host, const net::Endpoint& supervisor,
                                       const net::Secret& secret, int input_fd) {
  constexpr int kSecretFd = 3;
  constexpr int kInputFd = 4;
  auto secret_file = secret.to_sealed_memfd();
  if (!secret_file) return tl::unexpected(secret_file.error());
  auto executable = sys::own_executable();
  if (!executable) return tl::unexpected(executable.error());
  auto lifeline = make_pipe();
  if (!lifeline) return tl::unexpected(lifeline.error());
  const sys::UniqueFd null_device(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (!null_device) return fail(ErrorCode::Unavailable, "/dev/null: {}", errno_text(errno));

  sys::SpawnOptions options;
  // By the link, since the file may have been replaced by a newer one (an upgrade, a rebuild) while we run.
  options.path = "/proc/self/exe";
  options.arguments = {*executable,    "agent",
                       "--connect",    net::to_string(supervisor.tcp),
                       "--secret-fd",  std::to_string(kSecretFd),
                       "--host-index", std::to_string(host.index)};
  options.environment = Environment::current().assignments();
  options.stdin_fd = lifeline->read_end.get();
  // Not the caller's stdout: who reads it waits for its end, and must not wait for the agent.
  options.stdout_fd = null_device.get();
  options.inherited = {{secret_file->get(), kSecretFd}};
  if (input_fd >= 0) {
    options.inherited.emplace_back(input_fd, kInputFd);
    options.arguments.insert(options.arguments.end(), {"--input-fd", std::to_string(kInputFd)});
  }
  options.group = sys::Group::Session;
  auto process = spawn(options, "the agent " + *executable);
  if (!process) return tl::unexpected(process.error());
  return AgentProcess{*std::move(process), std::move(lifeline->write_end), {}, {}};
}

std::string_view start_method_name(StartMethod method) {
  switch (method) {
    case StartMethod::Ssh: return "ssh";
    case StartMethod::Slurm: return "srun";
    case StartMethod::Mpi: return "mpirun";
    case StartMethod::Hand: return "hand";
    case StartMethod::Launcher: return "its own launcher";
    case StartMethod::Owner: return "the job's owner";
  }
  return "?";
}

std::vector<std::string> remote_command(const RemoteOptions& options, const std::string& host,
                                        const std::string& cohort_path) {
  std::vector<std::string> words;
  switch (options.method) {
    case StartMethod::Ssh:
      words = options.ssh;
      // Nobody can answer a question. Ours to know: a master connection of the user's is used, but we are none, since
      // it would stay behind with our pipes.
      for (const char* option : {"BatchMode=yes", "ConnectTimeout=15", "ControlMaster=no", "ForwardX11=no",
                                 "ForwardAgent=no", "ClearAllForwardings=yes", "RequestTTY=no", "EscapeChar=none"}) {
        words.insert(words.end(), {"-o", option});
      }
      words.insert(words.end(), {"--", host});
      // One word for the login shell there, whichever it is; `exec` so that no shell stands in between.
      words.push_back(fmt::format("exec {} agent --invited", shell_quoted(cohort_path)));
      return words;
    case StartMethod::Slurm:
      // All that the job has on the host, next to other steps; the shell's variables of this task are not the agent's.
      words = {
          "srun",       "--nodes=1",       "--ntasks=1",   "--ntasks-per-node=1",  "--nodelist=" + host, "--overlap",
          "--mpi=none", "--cpu-bind=none", "--unbuffered", "--kill-on-bad-exit=0", "--quit-on-interrupt"};
      if (const auto found = options.components.find(host); found != options.components.end())
        words.push_back(fmt::format("--het-group={}", found->second));
      break;
    case StartMethod::Mpi: words = {"mpirun", "-np", "1", "-host", host}; break;
    case StartMethod::Hand:
      return {cohort_path,         "agent",  "--join", fmt::format("ADDRESS:{}", options.port), "--secret-file",
              options.secret_file, "--name", host};
    case StartMethod::Launcher: return {cohort_path, "run", "..."};
    case StartMethod::Owner: break;
  }
  words.insert(words.end(), {cohort_path, "agent", "--invited"});
  return words;
}

Result<AgentProcess> start_remote_agent(const RemoteOptions& remote, const PlannedHost& host) {
  auto executable = sys::own_executable();
  if (!executable) return tl::unexpected(executable.error());
  const auto words =
      remote_command(remote, host.name, remote.remote_cohort.empty() ? *executable : remote.remote_cohort);
  const Environment environment = Environment::current();
  auto path = find_command(words.front(), environment);
  if (!path) {
    return fail(ErrorCode::Unavailable, "{} is reached by {}: {}", host.name, words.front(), path.error().what());
  }
  auto in = make_pipe(), out = make_pipe(), err = make_pipe();
  for (const auto* pipe : {&in, &out, &err}) {
    if (!*pipe) return tl::unexpected(pipe->error());
  }
  sys::SpawnOptions options;
  options.path = *path;
  options.arguments = words;
  options.environment = environment.assignments();
  options.stdin_fd = in->read_end.get();
  options.stdout_fd = out->write_end.get();
  options.stderr_fd = err->write_end.get();
  // Ctrl-C is ours to pass on; and ssh, which would ask for a password at the terminal, has none.
  options.group = sys::Group::Session;
  // Before it has connected it does not look at its stdin, whose end else says that we are gone.
  options.parent_death_signal = SIGTERM;
  auto process = spawn(options, words.front());
  if (!process) return tl::unexpected(process.error());
  for (const int fd : {out->read_end.get(), err->read_end.get(), in->write_end.get()}) {
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  }
  return AgentProcess{*std::move(process), std::move(in->write_end), std::move(out->read_end),
                      std::move(err->read_end)};
}

std::string shell_quoted(std::string_view word) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string_view::npos) return std::string(word);
  std::string out = "'";
  for (const char c : word) {
    if (c == '\'')
      out += "'\\''";
    else
      out += c;
  }
  return out + "'";
}

}  // namespace cohort::launch
