#include "doctor/shared_file.h"

#include "launch/processes.h"
#include "launch/supervise/supervisor.h"
#include "sys/process.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <utility>

namespace cohort::doctor {

SharedFile::SharedFile()
    : content_(launch::random_hex(16)), path_(launch::absolute_path(".cohort-doctor-" + launch::random_hex(4))) {
  std::array<int, 2> ends{};
  const sys::UniqueFd nothing(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (::pipe2(ends.data(), O_CLOEXEC) == 0) {
    const sys::UniqueFd in(ends[0]);
    lifeline_.reset(ends[1]);
    sys::SpawnOptions shell;
    shell.path = "/bin/sh";
    shell.arguments = {"sh", "-c", "cat >/dev/null; rm -f -- \"$1\"", "sh", path_};
    shell.environment = launch::Environment::current().assignments();
    shell.folder = "/";
    shell.stdin_fd = in.get();
    shell.stdout_fd = nothing.get();
    shell.stderr_fd = nothing.get();
    shell.group = sys::Group::Session;  // Ctrl-C is not for it
    // Without it the file is only removed in good order.
    if (auto pending = sys::spawn(shell)) (void)std::move(*pending).confirm();
  }
  const sys::UniqueFd file(::open(path_.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644));
  if (!file) return;
  made_ = true;
  const std::string line = content_ + "\n";
  if (::write(file.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()) || ::fsync(file.get()) != 0)
    remove();
}

void SharedFile::remove() noexcept {
  if (std::exchange(made_, false)) ::unlink(path_.c_str());
}

}  // namespace cohort::doctor
