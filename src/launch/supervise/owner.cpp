#include "launch/supervise/owner.h"

#include "base/result.h"
#include "sys/process.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>
#include <utility>

namespace cohort::launch {

Owner::Owner(Loop& loop, int pid, std::function<void()> on_gone) : pid_(pid) {
  // A process that has ended leaves its children to another, so that a pid which is in use again is noticed.
  if (::getppid() == pid) process_ = value_or_throw(sys::open_pidfd(pid));
  if (!process_ || ::getppid() != pid) {
    raise(ErrorCode::Unavailable,
          "the process that the job belongs to (pid {}) has ended or is not the one that started "
          "this command",
          pid);
  }
  watch_ = Watch(loop, process_.get());
  watch_.on_readable([this, on_gone = std::move(on_gone)] {
    const auto call = on_gone;  // which ends with the watch
    gone_ = true;
    watch_ = Watch();
    call();
  });
}

void remove_private_folder(const std::string& path) {
  struct stat info {};
  // Nothing that others can write into is ever removed as a whole.
  if (::lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != ::getuid() ||
      (info.st_mode & 077) != 0) {
    return;
  }
  std::error_code error;
  std::filesystem::remove_all(path, error);
}

}  // namespace cohort::launch
