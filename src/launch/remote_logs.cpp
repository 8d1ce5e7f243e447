#include "launch/remote_logs.h"

#include "base/result.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>

namespace cohort::launch {

RemoteLogs::RemoteLogs(std::string folder, std::function<void(std::string)> on_trouble)
    : folder_(std::move(folder)), on_trouble_(std::move(on_trouble)) {}

std::string RemoteLogs::path(int rank, Stream stream) const {
  return fmt::format("{}/rank-{}.{}", folder_, rank, stream == Stream::Stdout ? "out" : "err");
}

sys::UniqueFd& RemoteLogs::file(int rank, Stream stream) {
  const auto [place, is_new] = files_.try_emplace({rank, stream});
  if (!is_new) return place->second;
  if (::mkdir(folder_.c_str(), 0777) != 0 && errno != EEXIST) {
    on_trouble_(fmt::format("log {}: {}", path(rank, stream), errno_text(errno)));
    return place->second;
  }
  place->second.reset(::open(path(rank, stream).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!place->second) on_trouble_(fmt::format("log {}: {}", path(rank, stream), errno_text(errno)));
  return place->second;
}

void RemoteLogs::open(int first_rank, int ranks) {
  for (int rank = first_rank; rank < first_rank + ranks; ++rank) {
    file(rank, Stream::Stdout);
    file(rank, Stream::Stderr);
  }
}

void RemoteLogs::keep(const Output& output) {
  sys::UniqueFd& log = file(output.rank, output.stream);
  std::string_view bytes = output.bytes;
  while (log && !bytes.empty()) {
    const ssize_t put = ::write(log.get(), bytes.data(), bytes.size());
    if (put > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(put));
    } else if (put < 0 && errno != EINTR) {
      const int error = errno;
      log.reset();
      on_trouble_(
          fmt::format("{} ends here, the job goes on: {}", path(output.rank, output.stream), errno_text(error)));
    }
  }
}

}  // namespace cohort::launch
