#include "launch/run_folder.h"

#include "launch/own_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <utility>

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;

std::string utc_text(const char* format) {
  const std::time_t now = std::time(nullptr);
  tm parts{};
  ::gmtime_r(&now, &parts);
  char text[64];
  return {text, std::strftime(text, sizeof text, format, &parts)};
}

/// For the user's convenience only: a link that cannot be made is no error, and several jobs may try at once.
void point_latest_to(int runs, const std::string& name) {
  struct stat status {};
  if (::fstatat(runs, "latest", &status, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISLNK(status.st_mode)) return;
  const std::string aside = ".latest-" + name;
  if (::symlinkat(name.c_str(), runs, aside.c_str()) != 0) return;
  if (::renameat(runs, aside.c_str(), runs, "latest") != 0) ::unlinkat(runs, aside.c_str(), 0);
}

}  // namespace

std::string utc_now() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  ::gmtime_r(&now.tv_sec, &parts);
  char text[64];
  const std::size_t size = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  return fmt::format("{}.{:03}Z", std::string_view(text, size), now.tv_nsec / 1'000'000);
}

Result<RunFolder> make_run_folder(const RunFolderRequest& request) {
  const bool own_name = request.path.empty();
  const std::string shown =
      own_name ? fmt::format("runs/{}-{}-{}", utc_text("%Y%m%d-%H%M%S"), request.program_name, request.id)
               : request.path;
  const auto failed = [&shown](const std::string& why) {
    return fail(ErrorCode::Io, "cannot make the run's folder {}: {}; choose another with --run-dir", shown, why);
  };
  std::error_code error;
  fs::path path = fs::absolute(shown, error);
  if (error) return failed(error.message());
  path = path.lexically_normal();
  if (path.filename().empty()) path = path.parent_path();
  auto own = make_own_folder(path.string(), own_name ? Existing::Refused : Existing::Taken);
  if (!own) return failed(own.error().what());
  if (::faccessat(own->folder.get(), ".", W_OK | X_OK, 0) != 0) return failed(errno_text(errno));
  if (own_name) point_latest_to(own->parent.get(), path.filename().string());
  return RunFolder{path.string(), shown, std::move(own->folder)};
}

Result<void> write_job_record(const RunFolder& folder, const nlohmann::ordered_json& record) {
  const std::string path = folder.path + "/job.json";
  constexpr const char* kAside = ".job.json.new";
  // Arguments and paths need not be UTF-8; JSON has to be.
  const std::string text = record.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  const auto fd = make_file(folder.fd.get(), kAside, 0600);
  if (!fd) return fail(ErrorCode::Io, "{}: {}", path, fd.error().what());
  std::string_view rest(text);
  while (!rest.empty()) {
    const ssize_t put = ::write(fd->get(), rest.data(), rest.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      const int why = errno;
      ::unlinkat(folder.fd.get(), kAside, 0);
      return fail(ErrorCode::Io, "{}: {}", path, errno_text(why));
    }
    rest.remove_prefix(static_cast<std::size_t>(put));
  }
  if (::renameat(folder.fd.get(), kAside, folder.fd.get(), "job.json") != 0)
    return fail(ErrorCode::Io, "{}: {}", path, errno_text(errno));
  return {};
}

}  // namespace cohort::launch
