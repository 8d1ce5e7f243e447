#include "launch/start/starter.h"

#include "base/log.h"
#include "base/process.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "launch/plan/program.h"
#include "launch/processes.h"
#include "net/http.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <utility>

namespace cohort::launch {
namespace {

constexpr std::size_t kMostText = std::size_t{1} << 20;
constexpr std::size_t kMostInPipe = std::size_t{1} << 20;  // largest capacity that a pipe can be set to
constexpr std::size_t kPiece = 16384;

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

namespace {

/// Runs $1. The first line starts a process that waits for the end of descriptor 3, which comes when the process that
/// started this ends, and then kills the process group.
constexpr const char* kShellScript = R"({ read -r x; kill -KILL 0; } <&3 >/dev/null 2>&1 &
exec 3<&-
(eval "$1")
)";

}  // namespace

SideCommand::SideCommand(Loop& loop, Options options) : options_(std::move(options)) {
  sys::SpawnOptions& spawn = options_.spawn;
  sys::UniqueFd their_end;
  if (!options_.shell.empty()) {
    Pipe pipe = value_or_throw(make_pipe());
    their_end = std::move(pipe.read_end);
    lifeline_ = std::move(pipe.write_end);
    spawn.path = "/bin/sh";
    spawn.arguments = {"sh", "-c", kShellScript, "sh", options_.shell};
    spawn.inherited.emplace_back(their_end.get(), 3);
  }
  sys::UniqueFd theirs;
  if (options_.output != Options::Output::None) {
    Pipe pipe = value_or_throw(make_pipe());
    output_ = std::move(pipe.read_end);
    theirs = std::move(pipe.write_end);
    set_nonblocking(output_.get());
    if (options_.output != Options::Output::Results) spawn.stderr_fd = theirs.get();
    if (options_.output != Options::Output::Errors) spawn.stdout_fd = theirs.get();
  }
  const sys::UniqueFd nowhere(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (spawn.stdout_fd < 0) spawn.stdout_fd = nowhere.get();
  if (spawn.stderr_fd < 0) spawn.stderr_fd = nowhere.get();
  process_ = value_or_throw(launch::spawn(spawn, spawn.path));
  if (output_) {
    output_watch_ = Watch(loop, output_.get());
    output_watch_.on_readable([this] { read(); });
  }
  process_watch_ = Watch(loop, process_.pidfd.get());
  process_watch_.on_readable([this] { end(); });
}

SideCommand::Options SideCommand::cohort(std::vector<std::string> arguments, int parent_death_signal) {
  Options options;
  options.spawn.path = value_or_throw(own_command());
  options.spawn.arguments = std::move(arguments);
  options.spawn.arguments.insert(options.spawn.arguments.begin(), "cohort");
  options.spawn.environment = Environment::current().assignments();
  options.spawn.group = sys::Group::Session;
  options.spawn.parent_death_signal = parent_death_signal;
  return options;
}

// Reads no more at a time than a pipe holds: processes that the command left may write for ever.
void SideCommand::read() {
  for (std::size_t all = 0; all <= kMostInPipe;) {
    const auto piece = read_piece(output_.get(), kPiece);
    if (!piece) output_watch_ = Watch();
    if (!piece || piece->empty()) return;
    all += piece->size();
    options_.on_output(*piece);
  }
}

void SideCommand::end() {
  process_watch_ = Watch();
  if (output_watch_) read();
  const auto status = sys::peek_exit_status(process_.pid);
  const auto told = options_.on_ended;  // a copy: the call may destroy this
  if (told) told(status.value_or(sys::ExitStatus{}));
}

bool SideCommand::wait(net::Deadline deadline) {
  while (true) {
    pollfd waiting{process_.pidfd.get(), POLLIN, 0};
    if (::poll(&waiting, 1, net::poll_timeout(deadline)) > 0) return true;
    if (net::passed(deadline)) return false;
  }
}

SideCommand::~SideCommand() {
  if (output_watch_) read();
  // (If the whole job has ended, the process may have been reaped already, and its pid reused.)
  if (::syscall(SYS_pidfd_send_signal, process_.pidfd.get(), SIGKILL, nullptr, 0) != 0) return;
  ::kill(-process_.pid, SIGKILL);  // kills the background processes that it has left
  while (::waitpid(process_.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

Result<Captured> capture(const std::vector<std::string>& command, std::chrono::milliseconds limit, int interrupt) {
  ProgramRequest request;
  request.program = command.front();
  request.arguments.assign(command.begin() + 1, command.end());
  request.python = ProgramRequest::Python::Never;
  const Environment environment = Environment::current();
  auto program = resolve_program(request, environment);
  if (!program) return tl::unexpected(program.error());
  Loop loop;
  Captured captured;
  bool ended = false, interrupted = false;
  SideCommand::Options options;
  options.spawn.path = program->path;
  options.spawn.arguments = program->arguments;
  options.spawn.environment = environment.assignments();
  options.spawn.group = sys::Group::Own;
  options.spawn.parent_death_signal = SIGKILL;
  options.output = SideCommand::Options::Output::All;
  options.on_output = [&captured](std::string_view bytes) {
    if (captured.text.size() < kMostText) captured.text.append(bytes);
  };
  // Waits for the process and not for the pipe's end: its children may hold the pipe open.
  options.on_ended = [&](const sys::ExitStatus& status) {
    captured.status = status.shell_status();
    ended = true;
    loop.stop();
  };
  const Timer late(loop, limit, [&loop] { loop.stop(); });
  Watch watched;
  if (interrupt >= 0) {
    watched = Watch(loop, interrupt);
    watched.on_readable([&] {
      interrupted = true;
      loop.stop();
    });
  }
  try {
    const SideCommand child(loop, std::move(options));
    loop.run();
  } catch (const Error& error) {
    return tl::unexpected(error);
  }
  if (ended) return captured;
  if (interrupted) return fail(ErrorCode::Aborted, "{} was interrupted", command.front());
  return fail(ErrorCode::Timeout, "{} has not ended within {:g} s", command.front(),
              std::chrono::duration<double>(limit).count());
}

namespace {

bool beside_command = false;

}  // namespace

void set_beside_command() noexcept { beside_command = true; }

Result<std::string> own_command() {
  auto own = sys::own_executable();
  if (!own || !beside_command) return own;
  return (std::filesystem::path(*own).parent_path() / "cohort").string();
}

Result<AgentProcess> start_local_agent(const PlannedHost& host, const net::Endpoint& supervisor,
                                       const net::Secret& secret, int input_fd, int held_fd) {
  constexpr int kSecretFd = 3;
  constexpr int kInputFd = 4;
  constexpr int kHeldFd = 5;
  auto secret_file = secret.to_sealed_memfd();
  if (!secret_file) return tl::unexpected(secret_file.error());
  auto executable = own_command();
  if (!executable) return tl::unexpected(executable.error());
  auto lifeline = make_pipe();
  if (!lifeline) return tl::unexpected(lifeline.error());
  const sys::UniqueFd null_device(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (!null_device) return fail(ErrorCode::Unavailable, "/dev/null: {}", errno_text(errno));

  sys::SpawnOptions options;
  // Uses the link, since the file may have been replaced by a newer one (an upgrade, a rebuild) meanwhile.
  options.path = *executable == sys::own_executable().value_or("") ? "/proc/self/exe" : *executable;
  options.arguments = {*executable,    "agent",
                       "--connect",    net::to_string(supervisor.tcp),
                       "--secret-fd",  std::to_string(kSecretFd),
                       "--host-index", std::to_string(host.index)};
  options.environment = Environment::current().assignments();
  options.stdin_fd = lifeline->read_end.get();
  // Leaves out the caller's stdout, since its reader waits for its end and must not wait for the agent.
  options.stdout_fd = null_device.get();
  options.inherited = {{secret_file->get(), kSecretFd}};
  if (input_fd >= 0) {
    options.inherited.emplace_back(input_fd, kInputFd);
    options.arguments.insert(options.arguments.end(), {"--input-fd", std::to_string(kInputFd)});
  }
  if (held_fd >= 0) options.inherited.emplace_back(held_fd, kHeldFd);
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

std::string remote_cohort(const JobSpec& spec) {
  return spec.remote_cohort.empty() ? value_or_throw(own_command()) : spec.remote_cohort;
}

std::vector<std::string> ssh_command(const JobSpec& spec) {
  std::vector<std::string> words = spec.ssh;
  // BatchMode: no one can answer a question. ControlMaster: uses a master connection of the user, but does not make
  // this ssh a master, which would outlive us and keep our pipes.
  for (const char* option : {"BatchMode=yes", "ConnectTimeout=15", "ControlMaster=no", "ForwardX11=no",
                             "ForwardAgent=no", "ClearAllForwardings=yes", "RequestTTY=no", "EscapeChar=none"}) {
    words.insert(words.end(), {"-o", option});
  }
  return words;
}

std::vector<std::string> remote_command(const JobSpec& spec, StartMethod method, const PlannedHost& host) {
  const std::string cohort_path = remote_cohort(spec);
  std::vector<std::string> words;
  switch (method) {
    case StartMethod::Ssh:
      words = ssh_command(spec);
      words.insert(words.end(), {"--", host.name});
      // Makes one word for the login shell there, of any kind; `exec` so that no shell stays in between.
      words.push_back(fmt::format("exec {} agent --invited", shell_quoted(cohort_path)));
      return words;
    case StartMethod::Slurm:
      // The step gets all that the job has on the host, even beside other steps; variables of this task must not apply.
      words = {"srun",
               "--nodes=1",
               "--ntasks=1",
               "--ntasks-per-node=1",
               "--nodelist=" + host.name,
               "--overlap",
               "--mpi=none",
               "--cpu-bind=none",
               "--unbuffered",
               "--kill-on-bad-exit=0",
               "--quit-on-interrupt"};
      if (host.component >= 0) words.push_back(fmt::format("--het-group={}", host.component));
      break;
    case StartMethod::Mpi: words = {"mpirun", "-np", "1", "-host", host.name}; break;
    case StartMethod::Hand:
      return {cohort_path,     "agent",          "--join", fmt::format("ADDRESS:{}", spec.listen),
              "--secret-file", spec.secret_file, "--name", host.name};
    case StartMethod::Launcher: return {cohort_path, "run", "..."};
    case StartMethod::Owner: break;
  }
  words.insert(words.end(), {cohort_path, "agent", "--invited"});
  return words;
}

Result<AgentProcess> start_remote_agent(const JobSpec& spec, StartMethod method, const PlannedHost& host) {
  const auto words = remote_command(spec, method, host);
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
  // A session without a terminal: this process passes on Ctrl-C, and ssh cannot ask for a password.
  options.group = sys::Group::Session;
  // Before ssh has connected, it does not read its stdin, so it would not notice that we are gone.
  options.parent_death_signal = SIGTERM;
  auto process = spawn(options, words.front());
  if (!process) return tl::unexpected(process.error());
  for (const int fd : {out->read_end.get(), err->read_end.get(), in->write_end.get()}) set_nonblocking(fd);
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

namespace {

constexpr std::size_t kMostKept = 2000;
constexpr std::size_t kLongestSshLine = 8000;

/// Keeps the last bytes, which explain the most.
void keep(std::string& text, std::string_view more) {
  text += more;
  if (text.size() > 2 * kMostKept) text.erase(0, text.size() - kMostKept);
}

}  // namespace

RemoteStart::RemoteStart(Loop& loop, AgentProcess& process, Events events)
    : process_(process), events_(std::move(events)), out_(loop, process.out.get()), err_(loop, process.err.get()) {
  out_.on_readable([this] { read_out(); });
  err_.on_readable([this] { read_err(); });
}

void RemoteStart::drain() {
  while (process_.err && read_err()) {
  }
  while (process_.out && read_out()) {
  }
}

bool RemoteStart::read_out() {
  const auto piece = read_piece(process_.out.get(), kPiece);
  if (!piece) {
    out_ = Watch();
    process_.out.reset();
    if (!announced_) keep(noise_, std::exchange(line_, {}));
    return false;
  }
  std::string_view rest = *piece;
  while (!announced_ && !rest.empty()) {
    const auto end = rest.find('\n');
    line_ += rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    if (end != std::string_view::npos || line_.size() > kLongestSshLine) take_line(std::exchange(line_, {}));
  }
  return !piece->empty();
}

void RemoteStart::take_line(std::string_view line) {
  const auto announcement = parse_announcement(line);
  if (!announcement) return keep(noise_, std::string(line) + "\n");
  announced_ = true;
  if (const std::string why = difference(own_announcement(), *announcement); !why.empty()) {
    return events_.on_unfit(why);
  }
  events_.on_announced();
}

void RemoteStart::invite(const Invitation& invitation) {
  // A pipe of 4 KiB takes the text in one write; if it does not, the agent reports that its invitation has not come.
  std::string text = to_text(invitation);
  const net::Wiping wiping(text);
  const ssize_t put = ::write(process_.lifeline.get(), text.data(), text.size());
  if (put != static_cast<ssize_t>(text.size())) log::info("launch", "the invitation of an agent was not taken");
}

bool RemoteStart::read_err() {
  const auto piece = read_piece(process_.err.get(), kPiece);
  if (!piece) {
    err_ = Watch();
    process_.err.reset();
    return false;
  }
  if (!joined_) {
    keep(complaints_, *piece);
    return !piece->empty();
  }
  error_line_ += *piece;
  for (auto end = error_line_.find('\n'); end != std::string::npos; end = error_line_.find('\n')) {
    const std::string line = net::as_line(error_line_.substr(0, end), kLongestSshLine);
    error_line_.erase(0, end + 1);
    if (!line.empty()) events_.on_complaint(line);
  }
  if (error_line_.size() > kLongestSshLine)
    events_.on_complaint(net::as_line(std::exchange(error_line_, {}), kLongestSshLine));
  return !piece->empty();
}

namespace {

struct SshSign {
  std::string_view text;
  std::string_view kind;
  std::string_view why;
  std::string_view advice;  ///< {0}: the host, {1}: the ssh command
};

/// Messages of ssh, as OpenSSH writes them.
constexpr std::array kSshSigns = {
    SshSign{"REMOTE HOST IDENTIFICATION HAS CHANGED", "ssh-key-changed", "its host key is not the one that is known",
            "if it was set up anew: `ssh-keygen -R {0}`, then `{1} {0}` once by hand"},
    SshSign{"Host key verification failed", "ssh-host-key",
            "its host key is not known here, and nobody can answer ssh's question",
            "`{1} {0}` once by hand and answer yes"},
    SshSign{
        "Permission denied", "ssh-login", "ssh cannot log in without a password",
        "make a key and copy it there: `ssh-keygen`, `ssh-copy-id {0}`; `{1} -o BatchMode=yes {0} true` has to work"},
    SshSign{"Too many authentication failures", "ssh-login", "ssh cannot log in without a password",
            "name the one key to use in ~/.ssh/config (IdentityFile, IdentitiesOnly yes)"},
    SshSign{"Could not resolve hostname", "ssh-name", "its name does not resolve here",
            "check its spelling, /etc/hosts and DNS, or give HostName in ~/.ssh/config"},
    SshSign{"Connection refused", "ssh-reach", "no sshd listens there",
            "start sshd on {0}; where it has another port, give Port in ~/.ssh/config"},
    SshSign{"No route to host", "ssh-reach", "there is no route to it",
            "is it up (`ping {0}`), and does no firewall reject what goes to its sshd?"},
    SshSign{"Network is unreachable", "ssh-reach", "there is no route to it", "check the network of this host"},
    SshSign{"timed out", "ssh-reach", "it does not answer",
            "is it up, and does no firewall on the way drop what goes to its sshd? `{1} {0} true`"},
    SshSign{"Bad configuration option", "ssh-config", "ssh's configuration is wrong", "`{1} {0} true` shows the line"},
    SshSign{"Bad owner or permissions", "ssh-config", "ssh refuses its configuration",
            "`chmod 600` the file that it names"},
};

/// Open MPI's mpiruns of one user share a folder in TMPDIR. One may remove it while another makes its own folder in it
/// (open-mpi/ompi#8510). Releases before 5 print this message.
constexpr std::string_view kNoSessionFolder = "orte_session_dir failed";

/// Fills in {0}, the host, and {1}, the ssh command.
std::string filled(std::string_view advice, const FailedStart& failed) {
  std::string out;
  for (std::size_t at = 0; at < advice.size(); ++at) {
    const std::string_view rest = advice.substr(at);
    const bool host = rest.starts_with("{0}");
    if (host || rest.starts_with("{1}")) {
      out += host ? failed.host : failed.ssh;
      at += 2;
    } else {
      out += advice[at];
    }
  }
  return out;
}

}  // namespace

std::string last_of(std::string_view text) { return net::as_line(text, 600, net::Kept::End); }

Diagnosis diagnose(const FailedStart& failed) {
  Diagnosis out;
  const std::string said = last_of(failed.complaints);
  const std::string printed = last_of(failed.noise);
  if (!said.empty()) out.said = fmt::format(" -- it said: {}", said);
  if (!printed.empty()) out.said += fmt::format(" -- stdout had: {}", printed);
  const auto is = [&](std::string_view kind, std::string why, std::string_view advice) {
    out.kind = kind;
    out.why = std::move(why);
    out.advice = filled(advice, failed);
    return out;
  };
  if (failed.announced) {
    return is("control",
              failed.status ? fmt::format("the agent began and ended ({})", sys::to_string(*failed.status))
                            : std::string("the agent began, and has not connected"),
              "can {0} open connections to this host (a firewall)?");
  }
  if (!failed.status) {
    if (failed.method == StartMethod::Ssh)
      return is("silent", "no sign of life",
                "`{1} -o BatchMode=yes {0} true` has to end by itself; does a firewall drop what goes to its sshd, or "
                "a start-up file of the shell there (.bashrc, .profile) wait for something?");
    return is("silent", "no sign of life",
              failed.method == StartMethod::Slurm ? "is there room for a step? `squeue -s`, `sinfo -N`" : "");
  }
  const int code = failed.status->shell_status();
  if (failed.method == StartMethod::Ssh && code == 255) {
    for (const SshSign& sign : kSshSigns) {
      if (failed.complaints.find(sign.text) != std::string::npos)
        return is(sign.kind, std::string(sign.why), sign.advice);
    }
    return is("ssh-reach", "ssh failed", "`{1} -o BatchMode=yes {0} true` has to work");
  }
  if (code == 126 || code == 127) {
    return is("command", fmt::format("{} cannot be started there (status {})", failed.command, code),
              "install Cohort at the same path on every host, or give its path there with --remote-cohort");
  }
  if (failed.method == StartMethod::Ssh) {
    return is("shell-exits", fmt::format("the shell there ended with status {} before the agent began", code),
              "a start-up file of the shell (.bashrc, .profile, .cshrc) ends it: what is not for logins without a "
              "terminal has to stand behind `case $- in *i*) ;; *) return;; esac`");
  }
  return is("starter", fmt::format("{} ended ({})", start_method_name(failed.method), sys::to_string(*failed.status)),
            is_transient(failed) ? "it could not make its folder in TMPDIR (else /tmp): may you write there?" : "");
}

bool is_transient(const FailedStart& failed) {
  return failed.method == StartMethod::Mpi && !failed.announced && failed.status && !failed.status->success() &&
         failed.complaints.find(kNoSessionFolder) != std::string::npos;
}

std::string explain(const FailedStart& failed) {
  const Diagnosis found = diagnose(failed);
  std::string out = fmt::format("no agent on {} -- by {}: {}{}", failed.host, start_method_name(failed.method),
                                found.why, found.said);
  if (!found.advice.empty()) out += " -- " + found.advice;
  return out;
}

}  // namespace cohort::launch
