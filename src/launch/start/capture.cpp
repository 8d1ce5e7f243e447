#include "launch/start/capture.h"

#include "launch/environment.h"
#include "launch/plan/program.h"
#include "sys/process.h"
#include "sys/unique_fd.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kMostText = std::size_t{1} << 20;
constexpr std::size_t kMostInPipe = std::size_t{1} << 20;  // the most that a pipe can be set to

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, 1'000'000));
}

/// Ends what is left of the child and its group, and reaps the child.
int end(const sys::ChildProcess& child) {
  ::kill(-child.pid, SIGKILL);
  int word = 0;
  while (::waitpid(child.pid, &word, 0) < 0 && errno == EINTR) {
  }
  return word;
}

}  // namespace

Result<Captured> capture(const std::vector<std::string>& command, std::chrono::milliseconds limit) {
  const Clock::time_point deadline = Clock::now() + limit;
  const Environment environment = Environment::current();
  ProgramRequest request;
  request.program = command.front();
  request.arguments.assign(command.begin() + 1, command.end());
  request.python = ProgramRequest::Python::Never;
  auto program = resolve_program(request, environment);
  if (!program) return tl::unexpected(program.error());

  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return fail(ErrorCode::Unavailable, "pipe: {}", errno_text(errno));
  const sys::UniqueFd out(ends[0]);
  sys::UniqueFd in(ends[1]);
  sys::SpawnOptions spawn;
  spawn.path = program->path;
  spawn.arguments = program->arguments;
  spawn.environment = environment.assignments();
  spawn.stdout_fd = in.get();
  spawn.stderr_fd = in.get();
  spawn.group = sys::Group::Own;
  spawn.parent_death_signal = SIGKILL;
  auto pending = sys::spawn(spawn);
  in.reset();
  const auto not_started = [&command](const sys::SpawnFailure& why) {
    return fail(ErrorCode::Unavailable, "cannot start {}: {}", command.front(), sys::to_string(why));
  };
  if (!pending) return not_started(pending.error());
  auto child = std::move(*pending).confirm();
  if (!child) return not_started(child.error());

  Captured captured;
  const auto too_late = [&] {
    end(*child);
    return fail(ErrorCode::Timeout, "{} has not ended within {:g} s", command.front(),
                std::chrono::duration<double>(limit).count());
  };
  // Its end counts, and not the pipe's: what it has started may hold that open.
  std::size_t after_end = 0;
  while (true) {
    if (Clock::now() >= deadline) return too_late();
    std::array<pollfd, 2> waited{{{out.get(), POLLIN, 0}, {child->pidfd.get(), POLLIN, 0}}};
    const int ready = ::poll(waited.data(), waited.size(), milliseconds_until(deadline));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return too_late();
    bool ended = waited[1].revents != 0;
    if (waited[0].revents != 0) {
      std::array<char, 16384> buffer;
      const ssize_t got = ::read(out.get(), buffer.data(), buffer.size());
      if (got > 0) {
        if (captured.text.size() < kMostText) captured.text.append(buffer.data(), static_cast<std::size_t>(got));
        // What it has written lies in the pipe, which holds 64 KiB; what comes beyond is another's.
        if (ended) after_end += static_cast<std::size_t>(got);
        if (after_end <= kMostInPipe) continue;
      }
      if (!ended) {
        // It has closed its output, and runs on.
        pollfd last{child->pidfd.get(), POLLIN, 0};
        if (::poll(&last, 1, milliseconds_until(deadline)) <= 0) return too_late();
        ended = true;
      }
    }
    if (ended) break;
  }
  captured.status = sys::exit_status_from_wait(end(*child)).shell_status();
  return captured;
}

}  // namespace cohort::launch
