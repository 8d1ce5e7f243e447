#include "track/record_follower.h"

#include "base/result.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>

namespace cohort::track {
namespace {

constexpr std::size_t kBlock = std::size_t{1} << 20;
constexpr std::size_t kLongestLine = std::size_t{256} << 20;

sys::UniqueFd open_record(const std::filesystem::path& record) {
  sys::UniqueFd fd(::open(record.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat status {};
  if (fd && ::fstat(fd.get(), &status) == 0 && S_ISREG(status.st_mode)) return fd;
  const int error = fd ? EISDIR : errno;
  raise(error == ENOENT ? ErrorCode::Unavailable : ErrorCode::Io,
        "reading the run record failed -- {} -- {} -- a run's folder, or its run.jsonl, is wanted", record.string(),
        fd ? "it is no regular file" : errno_text(error));
}

}  // namespace

bool LineReader::fill() {
  // From the line's beginning each time: what was there of its end may have been cut off and written anew.
  for (std::size_t block = kBlock;; block *= 2) {
    if (block > kLongestLine) {
      raise(ErrorCode::Corrupt, "reading the run record failed -- {} -- the line at byte {} is longer than {} MiB",
            path_, offset_, kLongestLine >> 20);
    }
    buffer_.resize(block);
    used_ = 0;
    std::size_t got = 0;
    while (got < block) {
      const ssize_t bytes = ::pread(fd_, buffer_.data() + got, block - got, static_cast<off_t>(offset_ + got));
      if (bytes < 0 && errno == EINTR) continue;
      if (bytes < 0) raise(ErrorCode::Io, "reading the run record failed -- {} -- {}", path_, errno_text(errno));
      const bool at_end = static_cast<std::size_t>(bytes) < block - got;
      got += static_cast<std::size_t>(bytes);
      // What is read behind the end a moment later may belong to a writer that has cut off what was read before it.
      if (at_end) break;
    }
    buffer_.resize(got);
    const std::size_t last = buffer_.rfind('\n');
    if (last != std::string::npos) {
      buffer_.resize(last + 1);
      return true;
    }
    if (got == block) continue;
    buffer_.clear();
    struct stat status {};
    if (got == 0 && ::fstat(fd_, &status) == 0 && static_cast<std::uint64_t>(status.st_size) < offset_) {
      raise(ErrorCode::Corrupt,
            "reading the run record failed -- {} -- it has {} bytes, and {} were read before -- is it another run's?",
            path_, status.st_size, offset_);
    }
    return false;
  }
}

std::optional<std::string_view> LineReader::next() {
  if (used_ == buffer_.size() && !fill()) return std::nullopt;
  const std::string_view rest = std::string_view(buffer_).substr(used_);
  const std::string_view line = rest.substr(0, rest.find('\n'));
  used_ += line.size() + 1;
  offset_ += line.size() + 1;
  return line;
}

RecordFollower::RecordFollower(const std::filesystem::path& record)
    : fd_(open_record(record)), lines_(fd_.get(), record.string()) {
  LineReader all(fd_.get(), record.string());
  for (auto text = all.next(); text; text = all.next()) {
    if (text->find("\"resume\"") == std::string_view::npos || !line_.read(*text) || line_.event != "resume") continue;
    if (const auto step = line_.integer("step")) resumes_.push_back({all.offset() - text->size() - 1, *step});
  }
  for (std::size_t i = resumes_.size(); i > 1; --i) {
    resumes_[i - 2].step = std::min(resumes_[i - 2].step, resumes_[i - 1].step);
  }
}

bool RecordFollower::next() {
  for (auto text = lines_.next(); text; text = lines_.next()) {
    if (!line_.read(*text)) {
      if (text->find_first_not_of(" \t\r") != std::string_view::npos) ++damaged_;
      continue;
    }
    const std::uint64_t begin = lines_.offset() - text->size() - 1;
    while (passed_resumes_ < resumes_.size() && resumes_[passed_resumes_].offset <= begin) ++passed_resumes_;
    step_ = line_.integer("step").value_or(step_);
    superseded_ = passed_resumes_ < resumes_.size() && step_ > resumes_[passed_resumes_].step;
    return true;
  }
  return false;
}

}  // namespace cohort::track
