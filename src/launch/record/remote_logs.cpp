#include "launch/record/remote_logs.h"

#include "launch/own_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>

namespace cohort::launch {

RemoteLogs::RemoteLogs(std::string folder, std::function<void(std::string)> on_trouble)
    : folder_(std::move(folder)), on_trouble_(std::move(on_trouble)) {}

std::string log_name(int rank, Stream stream) {
  return fmt::format("rank-{}.{}", rank, stream == Stream::Stdout ? "out" : "err");
}

Result<sys::UniqueFd> RemoteLogs::make(int rank, Stream stream) const {
  const std::string name = log_name(rank, stream);
  if (::mkdir(folder_.c_str(), 0755) != 0 && errno != EEXIST)
    return fail(ErrorCode::Io, "{}/{}: {}", folder_, name, errno_text(errno));
  const auto folder = open_folder(folder_);
  if (!folder) return tl::unexpected(folder.error());
  auto file = make_file(folder->get(), name, 0666);
  if (!file) return fail(ErrorCode::Io, "{}/{}", folder_, file.error().what());
  return file;
}

sys::UniqueFd& RemoteLogs::file(int rank, Stream stream) {
  const auto [place, is_new] = files_.try_emplace({rank, stream});
  if (!is_new) return place->second;
  if (auto made = make(rank, stream))
    place->second = *std::move(made);
  else
    on_trouble_(fmt::format("log {}", made.error().what()));
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
      on_trouble_(fmt::format("{}/{} ends here, the job goes on: {}", folder_, log_name(output.rank, output.stream),
                              errno_text(error)));
    }
  }
}

}  // namespace cohort::launch
