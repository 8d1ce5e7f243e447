#include "launch/starter.h"

#include "launch/environment.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace cohort::launch {

Result<AgentProcess> LocalStarter::start(const AgentCall& call, const net::Secret& secret) {
  constexpr int kSecretFd = 3;
  auto secret_file = secret.to_sealed_memfd();
  if (!secret_file) return tl::unexpected(secret_file.error());
  auto executable = sys::own_executable();
  if (!executable) return tl::unexpected(executable.error());
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return fail(ErrorCode::Unavailable, "pipe: {}", errno_text(errno));
  const sys::UniqueFd read_end(ends[0]);
  sys::UniqueFd write_end(ends[1]);
  const sys::UniqueFd null_device(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (!null_device) return fail(ErrorCode::Unavailable, "/dev/null: {}", errno_text(errno));

  sys::SpawnOptions options;
  // By the link, since the file may have been replaced by a newer one (an upgrade, a rebuild) while we run.
  options.path = "/proc/self/exe";
  options.arguments = {*executable,    "agent",
                       "--connect",    net::to_string(call.supervisor.tcp),
                       "--secret-fd",  std::to_string(kSecretFd),
                       "--host-index", std::to_string(call.host.index)};
  options.environment = Environment::current().assignments();
  options.stdin_fd = read_end.get();
  // Not the caller's stdout: who reads it waits for its end, and must not wait for the agent.
  options.stdout_fd = null_device.get();
  options.inherited = {{secret_file->get(), kSecretFd}};
  options.group = sys::Group::Session;
  auto pending = sys::spawn(options);
  if (!pending) {
    return fail(ErrorCode::Unavailable, "cannot start the agent: {}: {}", pending.error().step,
                errno_text(pending.error().error_number));
  }
  auto process = std::move(*pending).confirm();
  if (!process) {
    return fail(ErrorCode::Unavailable, "cannot start the agent {}: {}: {}", *executable, process.error().step,
                errno_text(process.error().error_number));
  }
  return AgentProcess{*std::move(process), std::move(write_end)};
}

}  // namespace cohort::launch
