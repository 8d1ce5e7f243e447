#include "observe/export/python_child.h"

#include "base/result.h"
#include "net/socket.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <utility>

namespace cohort::track {
namespace {

/// With -c, Python looks for modules in the working folder first, which may have anybody's json.py. (-P: from 3.11.)
constexpr std::string_view kNotFromHere = "import sys; sys.path[:] = [path for path in sys.path if path]\n";

}  // namespace

PythonChild::PythonChild(std::string_view program) {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    raise(ErrorCode::Unavailable, "socketpair: {}", errno_text(errno));
  }
  fd_.reset(ends[0]);
  const timeval patience{60, 0};  // limit if the child does not read
  ::setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  const sys::UniqueFd theirs(ends[1]);
  sys::SpawnOptions spawn{.path = "/usr/bin/env",
                          .arguments = {"env", "python3", "-c", std::string(kNotFromHere) + std::string(program)},
                          .environment = {},
                          .folder = {}};
  for (char** one = environ; *one != nullptr; ++one) spawn.environment.emplace_back(*one);
  spawn.stdin_fd = spawn.stdout_fd = theirs.get();
  spawn.group = sys::Group::Own;  // so that Ctrl-C reaches only this process
  spawn.parent_death_signal = SIGKILL;
  auto pending = sys::spawn(spawn);
  auto child = pending ? std::move(*pending).confirm() : tl::unexpected(pending.error());
  if (!child) raise(ErrorCode::Unavailable, "cannot start {}: {}", spawn.path, sys::to_string(child.error()));
  process_ = *std::move(child);
}

PythonChild::~PythonChild() {
  ::kill(process_.pid, SIGKILL);
  while (::waitpid(process_.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

bool PythonChild::say(std::string_view text) const {
  while (!text.empty()) {
    const ssize_t sent = ::send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(sent));
  }
  return true;
}

std::string PythonChild::line(std::chrono::milliseconds limit) {
  const net::Deadline until = net::deadline_in(limit);
  while (said_.find('\n') == std::string::npos) {
    if (!net::wait_ready(fd_.get(), POLLIN, until).value_or(false))
      return fmt::format("it has said nothing for {} s", limit.count() / 1000);
    char bytes[512];
    const ssize_t got = ::read(fd_.get(), bytes, sizeof bytes);
    if (got <= 0) return std::exchange(said_, {});
    said_.append(bytes, static_cast<std::size_t>(got));
  }
  const std::size_t end = said_.find('\n');
  std::string line = said_.substr(0, end);
  said_.erase(0, end + 1);
  return line;
}

}  // namespace cohort::track
