#include "launch/run_folder.h"

#include "sys/unique_fd.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <string_view>

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
void point_latest_to(const fs::path& folder) {
  const fs::path link = folder.parent_path() / "latest";
  std::error_code error;
  if (fs::exists(fs::symlink_status(link, error)) && !fs::is_symlink(link, error)) return;
  const fs::path aside = folder.parent_path() / (".latest-" + folder.filename().string());
  fs::create_symlink(folder.filename(), aside, error);
  if (error) return;
  fs::rename(aside, link, error);
  if (error) fs::remove(aside, error);
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
  fs::create_directories(path, error);
  if (error) return failed(error.message());
  if (::access(path.c_str(), W_OK | X_OK) != 0) return failed(errno_text(errno));
  if (own_name) point_latest_to(path);
  return RunFolder{path.string(), shown};
}

Result<void> write_job_record(const RunFolder& folder, const nlohmann::ordered_json& record) {
  const std::string path = folder.path + "/job.json";
  const std::string aside = folder.path + "/.job.json.new";
  // Arguments and paths need not be UTF-8; JSON has to be.
  const std::string text = record.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  const sys::UniqueFd fd(::open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!fd) return fail(ErrorCode::Io, "{}: {}", aside, errno_text(errno));
  std::string_view rest(text);
  while (!rest.empty()) {
    const ssize_t put = ::write(fd.get(), rest.data(), rest.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      const int why = errno;
      ::unlink(aside.c_str());
      return fail(ErrorCode::Io, "{}: {}", path, errno_text(why));
    }
    rest.remove_prefix(static_cast<std::size_t>(put));
  }
  if (std::rename(aside.c_str(), path.c_str()) != 0) return fail(ErrorCode::Io, "{}: {}", path, errno_text(errno));
  return {};
}

}  // namespace cohort::launch
