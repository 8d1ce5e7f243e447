#include "launch/supervise/page_process.h"

#include "launch/environment.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <utility>

namespace cohort::launch {

Result<std::unique_ptr<PageProcess>> PageProcess::start(Loop& loop, const std::string& run_folder,
                                                        std::function<void(const std::string&)> say) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return fail(ErrorCode::Unavailable, "no page: pipe: {}", errno_text(errno));
  std::unique_ptr<PageProcess> page(new PageProcess());
  page->output_ = sys::UniqueFd(ends[0]);
  const sys::UniqueFd theirs(ends[1]);
  sys::SpawnOptions options;
  options.path = "/proc/self/exe";
  options.arguments = {"cohort", "watch", run_folder, "--page"};
  options.environment = Environment::current().assignments();
  options.stdout_fd = options.stderr_fd = theirs.get();
  options.group = sys::Group::Session;  // Ctrl-C is not for it
  options.parent_death_signal = SIGKILL;
  auto pending = sys::spawn(options);
  auto child = pending ? std::move(*pending).confirm()
                       : tl::expected<sys::ChildProcess, sys::SpawnFailure>(tl::unexpected(pending.error()));
  if (!child) {
    return fail(ErrorCode::Unavailable, "no page: {}: {}", child.error().step, errno_text(child.error().error_number));
  }
  page->child_ = *std::move(child);
  page->say_ = std::move(say);
  page->watch_ = Watch(loop, page->output_.get());
  page->watch_.on_readable([own = page.get()] { own->on_readable(); });
  return page;
}

void PageProcess::on_readable() {
  char bytes[4096];
  const ssize_t got = ::read(output_.get(), bytes, sizeof bytes);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got <= 0) {
    watch_ = Watch();
    return;
  }
  for (const Line& line : lines_.feed({bytes, static_cast<std::size_t>(got)})) say_(line.text);
}

PageProcess::~PageProcess() {
  if (child_.pid <= 0) return;
  watch_ = Watch();
  // (Swept already, where the job has ended as a whole.)
  if (::syscall(SYS_pidfd_send_signal, child_.pidfd.get(), SIGKILL, nullptr, 0) == 0) ::waitpid(child_.pid, nullptr, 0);
}

}  // namespace cohort::launch
