#include "base/memory.h"

#include "base/parse.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <fstream>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string_view>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace cohort::sys {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// Memory left for other processes, since a host without free memory kills processes.
constexpr std::size_t kReserve = std::size_t{64} << 20;

std::optional<std::size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  return parse_integer<std::size_t>(word);
}

std::size_t host_memory() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::size_t kib = 0;
  std::string unit;
  while (file >> key >> kib) {
    if (key == "MemAvailable:") return kib * 1024;
    std::getline(file, unit);
  }
  return std::numeric_limits<std::size_t>::max();
}

// Returns the page cache, which counts as used, but is freed under pressure.
std::size_t reclaimable(const std::string& stat_path) {
  std::ifstream file(stat_path);
  std::string key;
  std::size_t value = 0;
  std::size_t total = 0;
  while (file >> key >> value) {
    if (key == "inactive_file" || key == "active_file") total += value;
  }
  return total;
}

std::size_t left(std::size_t limit, std::size_t used, std::size_t reclaimable_bytes) {
  const std::size_t held = used > reclaimable_bytes ? used - reclaimable_bytes : 0;
  return limit > held ? limit - held : 0;
}

// Returns the memory that the control groups leave. Every group up to the root may have a limit.
std::size_t group_memory() {
  std::size_t least = std::numeric_limits<std::size_t>::max();
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    std::string group = line.substr(second + 1);
    while (true) {
      if (group == "/") group.clear();
      const std::string folder = root + group;
      const auto limit = read_number(folder + (unified ? "/memory.max" : "/memory.limit_in_bytes"));
      const auto used = read_number(folder + (unified ? "/memory.current" : "/memory.usage_in_bytes"));
      if (limit && used) least = std::min(least, left(*limit, *used, reclaimable(folder + "/memory.stat")));
      const std::size_t slash = group.rfind('/');
      if (slash == std::string::npos) break;
      group.resize(slash);
    }
  }
  return least;
}

tl::unexpected<Error> refuse(std::size_t bytes, std::string_view why) {
  return fail(ErrorCode::Unavailable,
              "cannot get {:.1f} MiB of shared memory -- {} -- use fewer or smaller buffers, or raise the limit",
              static_cast<double>(bytes) / 1048576.0, why);
}

Result<Mapping> map(int fd, std::size_t bytes) {
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    rlimit limit{};
    ::getrlimit(RLIMIT_AS, &limit);
    const std::string hint =
        error == ENOMEM && limit.rlim_cur != RLIM_INFINITY
            ? fmt::format("; the process may have {} MiB of address space (ulimit -v)", limit.rlim_cur >> 20)
            : std::string();
    return refuse(bytes, fmt::format("mmap: {}{}", errno_text(error), hint));
  }
  Mapping mapping(data, bytes);
  if (bytes >= kHugePage) ::madvise(data, bytes, MADV_HUGEPAGE);  // fewer TLB misses; only a hint
  return mapping;
}

}  // namespace

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

std::size_t available_memory() {
  const std::size_t available = std::min(host_memory(), group_memory());
  return available > kReserve ? available - kReserve : 0;
}

Result<SharedSegment> create_shared_segment(const std::string& name, std::size_t bytes) {
  const std::size_t unit = bytes >= kHugePage ? kHugePage : kPage;
  if (bytes == 0 || bytes > std::numeric_limits<std::size_t>::max() / 4) return refuse(bytes, "not a possible size");
  const std::size_t whole = (bytes + unit - 1) / unit * unit;
  const std::size_t available = available_memory();
  if (whole > available) {
    return refuse(bytes, fmt::format("{} MiB are available to this process (host or cgroup)", available >> 20));
  }
  rlimit file_size{};
  if (::getrlimit(RLIMIT_FSIZE, &file_size) == 0 && whole > file_size.rlim_cur) {  // ftruncate would raise SIGXFSZ
    return refuse(bytes, fmt::format("files may have {} bytes at most (ulimit -f)", file_size.rlim_cur));
  }
  SharedSegment segment;
  segment.fd.reset(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!segment.fd) return refuse(bytes, "memfd_create: " + errno_text(errno));
  if (::ftruncate(segment.fd.get(), static_cast<off_t>(whole)) != 0) {
    return refuse(bytes, "ftruncate: " + errno_text(errno));
  }
  auto mapping = map(segment.fd.get(), whole);
  if (!mapping) return tl::unexpected(mapping.error());
  segment.mapping = *std::move(mapping);
  if (::madvise(segment.mapping.data(), whole, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINVAL) return refuse(bytes, "populating it: " + errno_text(errno));
    // Before Linux 5.14: reserve all pages, which can fail cleanly, then map them.
    if (const int error = ::posix_fallocate(segment.fd.get(), 0, static_cast<off_t>(whole)); error != 0) {
      return refuse(bytes, "posix_fallocate: " + errno_text(error));
    }
    for (std::size_t offset = 0; offset < whole; offset += kPage) {
      static_cast<volatile char*>(segment.mapping.data())[offset] = 0;
    }
  }
  if (::fcntl(segment.fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return refuse(bytes, "sealing it: " + errno_text(errno));
  }
  return segment;
}

Result<Mapping> map_shared_segment(int fd, std::size_t bytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0)
    return fail(ErrorCode::Io, "cannot read the size of a peer's memory -- {}", errno_text(errno));
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || static_cast<std::size_t>(status.st_size) < bytes) {
    return fail(ErrorCode::Corrupt, "a peer's memory has {} bytes (seals {:#x}) where {} sealed ones were announced",
                status.st_size, seals, bytes);
  }
  return map(fd, static_cast<std::size_t>(status.st_size));
}

void populate(const Mapping& mapping) noexcept { ::madvise(mapping.data(), mapping.bytes(), MADV_POPULATE_WRITE); }

namespace {

struct Page {
  std::atomic<std::uint64_t> used{0};  // a bit per slot
  std::byte* bytes = nullptr;
  Page* next = nullptr;
};
constexpr std::size_t kSlots = 64;
constexpr std::size_t kPageBytes = kSlots * kHiddenBytes;

// A list of pages. New pages are added at its front, and none is ever removed.
std::atomic<Page*> pages{nullptr};

void* take_from(Page& page) noexcept {
  std::uint64_t used = page.used.load();
  while (~used != 0) {
    const auto slot = static_cast<std::size_t>(std::countr_one(used));
    if (page.used.compare_exchange_weak(used, used | std::uint64_t{1} << slot)) return page.bytes + slot * kHiddenBytes;
  }
  return nullptr;
}

}  // namespace

void* take_hidden_memory() {
  for (Page* page = pages.load(); page != nullptr; page = page->next) {
    if (void* const memory = take_from(*page)) return memory;
  }
  auto page = std::make_unique<Page>();
  void* const bytes = ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (bytes == MAP_FAILED) throw std::bad_alloc();
  ::madvise(bytes, kPageBytes, MADV_DONTDUMP);
  ::mlock(bytes, kPageBytes);  // may fail because of RLIMIT_MEMLOCK
  page->bytes = static_cast<std::byte*>(bytes);
  page->used.store(1);
  Page* const made = page.release();
  made->next = pages.load();
  while (!pages.compare_exchange_weak(made->next, made)) continue;
  return made->bytes;
}

void give_hidden_memory(void* memory) noexcept {
  ::explicit_bzero(memory, kHiddenBytes);
  auto* const bytes = static_cast<std::byte*>(memory);
  for (Page* page = pages.load(); page != nullptr; page = page->next) {
    if (bytes < page->bytes || bytes >= page->bytes + kPageBytes) continue;
    const auto slot = static_cast<std::size_t>(bytes - page->bytes) / kHiddenBytes;
    page->used.fetch_and(~(std::uint64_t{1} << slot));
    return;
  }
}

void lock_hidden_memory() noexcept {
  for (Page* page = pages.load(); page != nullptr; page = page->next) ::mlock(page->bytes, kPageBytes);
}

}  // namespace cohort::sys
