#include "launch/supervise/side_command.h"

#include "base/result.h"
#include "launch/processes.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <utility>

namespace cohort::launch {

SideCommand::SideCommand(Loop& loop, Options options) : options_(std::move(options)) {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) raise(ErrorCode::Unavailable, "pipe: {}", errno_text(errno));
  output_.reset(ends[0]);
  const sys::UniqueFd theirs(ends[1]);
  const sys::UniqueFd nowhere(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  (void)::fcntl(output_.get(), F_SETFL, O_NONBLOCK);
  sys::SpawnOptions spawn;
  spawn.path = value_or_throw(sys::own_executable());
  spawn.arguments = {"cohort"};
  spawn.arguments.insert(spawn.arguments.end(), options_.arguments.begin(), options_.arguments.end());
  spawn.environment = Environment::current().assignments();
  spawn.stdout_fd = options_.output == Output::All ? theirs.get() : nowhere.get();
  spawn.stderr_fd = theirs.get();
  spawn.group = sys::Group::Session;
  spawn.parent_death_signal = options_.parent_death_signal;
  auto pending = sys::spawn(spawn);
  auto child = pending ? std::move(*pending).confirm() : tl::unexpected(pending.error());
  if (!child) {
    raise(ErrorCode::Unavailable, "cannot start {}: {}", spawn.path, sys::to_string(child.error()));
  }
  process_ = *std::move(child);
  output_watch_ = Watch(loop, output_.get());
  output_watch_.on_readable([this] { read(); });
  process_watch_ = Watch(loop, process_.pidfd.get());
  process_watch_.on_readable([this] { on_ended(); });
}

void SideCommand::read() {
  char bytes[4096];
  while (true) {
    const ssize_t got = ::read(output_.get(), bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      output_watch_ = Watch();
      return;
    }
    for (const Line& line : lines_.feed({bytes, static_cast<std::size_t>(got)})) options_.say(line.text);
  }
}

void SideCommand::on_ended() {
  process_watch_ = Watch();
  read();
  const auto status = sys::peek_exit_status(process_.pid);
  const auto told = options_.on_ended;  // a copy: it may destroy this
  if (told) told(status.value_or(sys::ExitStatus{}));
}

SideCommand::~SideCommand() {
  if (output_watch_) read();
  // (Swept already, perhaps, where the job has ended as a whole: then the pid may be somebody else's.)
  if (::syscall(SYS_pidfd_send_signal, process_.pidfd.get(), SIGKILL, nullptr, 0) != 0) return;
  while (::waitpid(process_.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace cohort::launch
