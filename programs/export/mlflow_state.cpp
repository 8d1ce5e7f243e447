#include "export/mlflow_state.h"

#include "base/env.h"
#include "base/json.h"
#include "base/parse.h"
#include "base/result.h"

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <utility>

namespace cohort::track {
namespace {

constexpr std::size_t kLongestKey = 250;

}  // namespace

std::string mlflow_key(std::string_view name) {
  std::string key;
  // A path as it would be written plainly: no empty parts, none that are dots alone.
  while (!name.empty()) {
    const std::string_view part = take_until(name, "/");
    if (part.empty()) continue;
    if (!key.empty()) key += '/';
    const bool dots = part == "." || part == "..";
    for (const char c : part) {
      const auto byte = static_cast<unsigned char>(c);
      const bool good =
          std::isalnum(byte) != 0 || byte >= 0x80 || std::string_view("_-. :").find(c) != std::string_view::npos;
      key += good && !dots ? c : '_';
    }
  }
  if (key.size() > kLongestKey) {
    std::size_t end = kLongestKey;
    while (end > 0 && (static_cast<unsigned char>(key[end]) & 0xc0) == 0x80) --end;  // within a character
    key.resize(end);
    while (key.ends_with('/')) key.pop_back();
  }
  return key.empty() ? "_" : key;
}

namespace {

constexpr std::size_t kMostBytes = 4096;

std::string digest(std::string_view text) { return fmt::format("{:016x}", fnv1a(text)); }

std::string first_line(const std::filesystem::path& record) {
  std::ifstream in(record, std::ios::binary);
  std::string line;
  std::getline(in, line);
  return line;
}

}  // namespace

MlflowProgress MlflowProgress::read(std::string_view text) {
  MlflowProgress progress;
  const auto json = parse_json_or_discard(text);
  if (!json.is_object()) return progress;
  for (const auto& [name, to] :
       {std::pair("to", &progress.to), std::pair("record", &progress.record), std::pair("intent", &progress.intent),
        std::pair("run", &progress.run), std::pair("experiment", &progress.experiment)}) {
    if (const auto found = json.find(name); found != json.end() && found->is_string()) *to = *found;
  }
  if (const auto found = json.find("offset"); found != json.end() && found->is_number_unsigned())
    progress.offset = *found;
  for (const auto& [name, to] : {std::pair("ended", &progress.ended), std::pair("artifacts", &progress.artifacts)}) {
    if (const auto found = json.find(name); found != json.end() && found->is_boolean()) *to = *found;
  }
  return progress;
}

std::string MlflowProgress::text() const {
  const nlohmann::ordered_json json = {{"to", to},       {"record", record},         {"intent", intent},
                                       {"run", run},     {"experiment", experiment}, {"offset", offset},
                                       {"ended", ended}, {"artifacts", artifacts}};
  return json_text(json);
}

MlflowState::MlflowState(const std::filesystem::path& record, const std::string& to)
    : file_(record.parent_path() / fmt::format("mlflow-{}.state", digest(to).substr(0, 8))) {
  fd_.reset(::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NOFOLLOW, 0600));
  if (!fd_) {
    raise(ErrorCode::Io, "opening {} failed -- {} -- how far MLflow has got is kept there, beside the record",
          file_.string(), errno_text(errno));
  }
  if (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    raise(ErrorCode::Unavailable,
          "exporting to MLflow failed -- {} -- another process is doing the same for this record", file_.string());
  }
  std::string text(kMostBytes, '\0');
  const ssize_t got = ::pread(fd_.get(), text.data(), text.size(), 0);
  text.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
  progress = MlflowProgress::read(text);
  const std::string line = digest(first_line(record));
  std::error_code unknown;
  if (progress.to != to || progress.record != line || progress.offset > std::filesystem::file_size(record, unknown)) {
    progress = {};
    progress.to = to;
    progress.record = line;
  }
}

void MlflowState::save() {
  // In place, since the lock is this file's; within a page, so that a kill tears nothing.
  std::string text = progress.text();
  if (text.size() >= kMostBytes) {
    raise(ErrorCode::InvalidArgument,
          "exporting to MLflow failed -- its address and the experiment's name are too long");
  }
  text.resize(kMostBytes - 1, ' ');
  text += '\n';
  ssize_t put = -1;
  do put = ::pwrite(fd_.get(), text.data(), text.size(), 0);
  while (put < 0 && errno == EINTR);
  if (put != static_cast<ssize_t>(text.size()))
    raise(ErrorCode::Io, "writing {} failed -- {}", file_.string(), errno_text(errno));
}

}  // namespace cohort::track
