#include "track/append.h"

#include "base/log.h"
#include "base/result.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

namespace cohort::track {

void raise_io(const AppendTo& to, int error) {
  raise(ErrorCode::Io, "{} failed -- {} -- {} -- is there space, and may this user write there?", to.what,
        to.file.string(), errno_text(error));
}

void append_all(const AppendTo& to, std::string_view bytes) {
  struct stat status {};
  const bool sized = ::fstat(to.fd, &status) == 0 && S_ISREG(status.st_mode);
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t wrote = ::write(to.fd, bytes.data() + done, bytes.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      const int error = errno;
      if (done > 0 && sized && ::ftruncate(to.fd, status.st_size) != 0) {
        log::warn("track", "{}: its end is torn: {}", to.file.string(), errno_text(errno));
      }
      raise_io(to, error);
    }
    done += static_cast<std::size_t>(wrote);
  }
}

}  // namespace cohort::track
