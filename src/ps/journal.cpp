#include "ps/journal.h"

#include "sys/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace cohort::ps {
namespace {

constexpr std::string_view kMagic = "cohort ps journal 1\n";

struct Head {
  std::uint64_t digest;
  std::uint64_t incarnation;
  std::uint32_t size;
  std::uint32_t now;
  std::uint32_t worker;
  std::uint32_t method;
};
static_assert(sizeof(Head) == 32);

/// Tells a torn record from a whole one.
std::uint64_t digest_of(Head head, std::string_view body) noexcept {
  head.digest = 0;
  std::uint64_t digest = 0xCBF29CE484222325ULL;
  const auto take = [&](const char* bytes, std::size_t size) {
    for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + at, std::min(sizeof word, size - at));
      digest = (digest ^ word) * 0x9E3779B97F4A7C15ULL;
    }
  };
  take(reinterpret_cast<const char*>(&head), sizeof head);
  take(body.data(), body.size());
  return mix64(digest);
}

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
  while (rest.size() >= sizeof(Head)) {
    Head head;
    std::memcpy(&head, rest.data(), sizeof head);
    const std::string_view body = rest.substr(sizeof head);
    if (head.size > body.size() || head.digest != digest_of(head, body.substr(0, head.size))) break;
    const auto done =
        replay({head.now, static_cast<Method>(head.method), head.worker, head.incarnation, body.substr(0, head.size)});
    if (!done) return fail(ErrorCode::Corrupt, "journal {}: {}", path, done.error().what());
    rest.remove_prefix(sizeof head + head.size);
  }
  const std::uint64_t size = file->size() - rest.size();
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0)
    return fail_system(errno, ErrorCode::Io, "journal {}: {}", path, errno_text(errno));
  return Journal(std::move(fd), path, size);
}

Result<void> Journal::append(const Command& command) {
  Head head{0,           command.incarnation, static_cast<std::uint32_t>(command.body.size()),
            command.now, command.worker,      static_cast<std::uint32_t>(command.method)};
  head.digest = digest_of(head, command.body);
  const iovec parts[] = {{&head, sizeof head}, {const_cast<char*>(command.body.data()), command.body.size()}};
  const auto whole = static_cast<ssize_t>(sizeof head + command.body.size());
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
