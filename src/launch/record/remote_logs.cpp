#include "launch/record/remote_logs.h"

#include "launch/own_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>

namespace cohort::launch {

RemoteLogs::RemoteLogs(std::string folder, const Roles& roles, std::function<void(std::string)> on_trouble)
    : folder_(std::move(folder)), roles_(roles), on_trouble_(std::move(on_trouble)) {}

std::string log_name(Role role, int number, Stream stream) {
  return file_name(role, number) + (stream == Stream::Stdout ? ".out" : ".err");
}

std::string RemoteLogs::name_of(int process, Stream stream) const {
  return log_name(roles_.role_of(process), roles_.number_of(process), stream);
}

Result<sys::UniqueFd> RemoteLogs::make(int process, Stream stream) const {
  const std::string name = name_of(process, stream);
  if (::mkdir(folder_.c_str(), 0755) != 0 && errno != EEXIST)
    return fail(ErrorCode::Io, "{}/{}: {}", folder_, name, errno_text(errno));
  const auto folder = open_folder(folder_);
  if (!folder) return tl::unexpected(folder.error());
  auto file = make_file(folder->get(), name, 0666);
  if (!file) return fail(ErrorCode::Io, "{}/{}", folder_, file.error().what());
  return file;
}

sys::UniqueFd& RemoteLogs::file(int process, Stream stream) {
  const auto [place, is_new] = files_.try_emplace({process, stream});
  if (!is_new) return place->second;
  if (auto made = make(process, stream))
    place->second = *std::move(made);
  else
    on_trouble_(fmt::format("log {}", made.error().what()));
  return place->second;
}

void RemoteLogs::open(const std::vector<int>& processes) {
  for (const int process : processes) {
    file(process, Stream::Stdout);
    file(process, Stream::Stderr);
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
      on_trouble_(fmt::format("{}/{} ends here, the job goes on: {}", folder_, name_of(output.rank, output.stream),
                              errno_text(error)));
    }
  }
}

}  // namespace cohort::launch
