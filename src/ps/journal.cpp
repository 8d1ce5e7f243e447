#include "ps/journal.h"

#include "ps/command_record.h"
#include "sys/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

namespace cohort::ps {
namespace {

constexpr std::string_view kMagic = "cohort ps journal 2\n";

}  // namespace

Result<Journal> Journal::open(const std::string& path, const Replay& replay) {
  sys::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd) return fail_system(errno, ErrorCode::Io, "journal {}: {}", path, errno_text(errno));
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    return fail_system(errno, ErrorCode::Unavailable, "journal {}: another process has it: {}", path,
                       errno_text(errno));
  }
  auto file = sys::read_file(path);
  if (!file) return tl::unexpected(file.error());
  std::string_view rest = file->text();
  if (rest.size() < kMagic.size()) {
    if (rest != kMagic.substr(0, rest.size())) return fail(ErrorCode::Corrupt, "{} is no journal", path);
    if (::ftruncate(fd.get(), 0) != 0 ||
        ::pwrite(fd.get(), kMagic.data(), kMagic.size(), 0) != static_cast<ssize_t>(kMagic.size()))
      return fail_system(errno, ErrorCode::Io, "journal {}: {}", path, errno_text(errno));
    return Journal(std::move(fd), path, kMagic.size());
  }
  if (rest.substr(0, kMagic.size()) != kMagic) return fail(ErrorCode::Corrupt, "{} is no journal", path);
  rest.remove_prefix(kMagic.size());
  while (const auto command = next_record(rest)) {
    if (const auto done = replay(*command); !done)
      return fail(ErrorCode::Corrupt, "journal {}: {}", path, done.error().what());
  }
  const std::uint64_t size = file->size() - rest.size();
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0)
    return fail_system(errno, ErrorCode::Io, "journal {}: {}", path, errno_text(errno));
  return Journal(std::move(fd), path, size);
}

Result<void> Journal::append(const Command& command) {
  std::string head = record_head(command);
  const iovec parts[] = {{head.data(), head.size()}, {const_cast<char*>(command.body.data()), command.body.size()}};
  const auto whole = static_cast<ssize_t>(head.size() + command.body.size());
  ssize_t written = 0;
  do {
    written = ::pwritev(fd_.get(), parts, 2, static_cast<off_t>(size_));
  } while (written < 0 && errno == EINTR);
  if (written != whole) {  // what there is of it is no record, and the next one is written over it
    const int why = written < 0 ? errno : ENOSPC;
    return fail_system(why, ErrorCode::Io, "journal {}: {}", path_, errno_text(why));
  }
  size_ += static_cast<std::uint64_t>(whole);
  return {};
}

}  // namespace cohort::ps
