#include "telemetry/trace_text.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace cohort::status {
namespace {

using Bytes = std::span<const std::byte>;

template <class T>
std::optional<T> read(Bytes file, std::uint64_t offset) noexcept {
  if (offset > file.size() || file.size() - offset < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, file.data() + offset, sizeof value);
  return value;
}

Bytes part(Bytes file, std::uint64_t offset, std::uint64_t size) noexcept {
  if (offset > file.size() || file.size() - offset < size) return {};
  return file.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(size));
}

std::string_view text_at(Bytes texts, std::uint64_t offset) noexcept {
  if (offset >= texts.size()) return {};
  const auto* const begin = reinterpret_cast<const char*>(texts.data()) + offset;
  const void* const end = std::memchr(begin, '\0', texts.size() - static_cast<std::size_t>(offset));
  if (end == nullptr) return {};
  return {begin, static_cast<std::size_t>(static_cast<const char*>(end) - begin)};
}

FunctionSymbol find_in(Bytes symbols, Bytes names, std::uint64_t address) noexcept {
  for (std::uint64_t at = 0; at + sizeof(Elf64_Sym) <= symbols.size(); at += sizeof(Elf64_Sym)) {
    const auto symbol = *read<Elf64_Sym>(symbols, at);
    const bool inside = address >= symbol.st_value && address - symbol.st_value < symbol.st_size;
    if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && inside) {
      return {text_at(names, symbol.st_name), address - symbol.st_value};
    }
  }
  return {};
}

}  // namespace

FunctionSymbol find_function(Bytes file, std::uint64_t address) noexcept {
  constexpr unsigned char kOrder = std::endian::native == std::endian::little ? ELFDATA2LSB : ELFDATA2MSB;
  const auto header = read<Elf64_Ehdr>(file, 0);
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return {};
  if (header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_ident[EI_DATA] != kOrder) return {};
  if (header->e_shentsize != sizeof(Elf64_Shdr)) return {};
  const auto section = [&](std::uint64_t number) {
    // A table at the end of the numbers would come around.
    if (header->e_shoff > file.size()) return std::optional<Elf64_Shdr>();
    return read<Elf64_Shdr>(file, header->e_shoff + number * sizeof(Elf64_Shdr));
  };
  for (std::uint64_t i = 0; i < header->e_shnum; ++i) {
    const auto table = section(i);
    if (!table || table->sh_type != SHT_SYMTAB) continue;
    const auto names = section(table->sh_link);
    if (!names) continue;
    return find_in(part(file, table->sh_offset, table->sh_size), part(file, names->sh_offset, names->sh_size), address);
  }
  return {};
}

namespace {

constexpr int kMostFrames = 64;

struct DirectoryEntry {  // linux_dirent64: opendir allocates
  std::uint64_t inode;
  std::int64_t offset;
  unsigned short length;
  unsigned char type;
  char name[1];
};

std::string_view last_line(std::string_view text) noexcept {
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  const auto end = text.rfind('\n');
  return end == std::string_view::npos ? text : text.substr(end + 1);
}

// /proc/self/task/TID/NAME
void task_path(char (&path)[96], std::string_view tid, std::string_view name) noexcept {
  std::size_t length = 0;
  for (const std::string_view part : {std::string_view("/proc/self/task/"), tid, std::string_view("/"), name}) {
    const std::size_t piece = std::min(part.size(), sizeof path - 1 - length);
    std::memcpy(path + length, part.data(), piece);
    length += piece;
  }
  path[length] = '\0';
}

std::string_view read_small(char (&bytes)[128], const char* path) noexcept {
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const ssize_t got = ::read(fd, bytes, sizeof bytes);
  ::close(fd);
  return last_line({bytes, static_cast<std::size_t>(std::max<ssize_t>(got, 0))});
}

void add_thread(TraceText& text, std::string_view tid) noexcept {
  char path[96];
  char bytes[128];
  text.add("  thread ").add(tid);
  task_path(path, tid, "comm");
  text.add(" \"").add(read_small(bytes, path)).add("\"");
  task_path(path, tid, "stat");
  const std::string_view stat = read_small(bytes, path);
  const auto end = stat.rfind(") ");  // of the name, which may hold anything
  const char state = end != std::string_view::npos && end + 2 < stat.size() ? stat[end + 2] : '?';
  text.add(state == 'R' ? " runs" : state == 'D' ? " waits, uninterruptibly" : state == 'T' ? " is stopped" : " waits");
  task_path(path, tid, "wchan");
  const std::string_view where = read_small(bytes, path);
  if (!where.empty() && where != "0") text.add(" in ").add(where);
  text.add("\n");
}

/// A module's file while its symbols are looked at. (sys::Mapping's makers allocate.)
class ModuleFile {
 public:
  explicit ModuleFile(const link_map& module) noexcept {
    const char* const path = module.l_name[0] == '\0' ? "/proc/self/exe" : module.l_name;
    const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
    struct stat status = {};
    if (fd >= 0 && ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0) {
      size_ = static_cast<std::size_t>(status.st_size);
      data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    if (fd >= 0) ::close(fd);
  }
  ~ModuleFile() {
    if (data_ != MAP_FAILED) ::munmap(data_, size_);
  }
  ModuleFile(const ModuleFile&) = delete;
  ModuleFile& operator=(const ModuleFile&) = delete;
  std::span<const std::byte> bytes() const noexcept {
    if (data_ == MAP_FAILED) return {};
    return {static_cast<const std::byte*>(data_), size_};
  }

 private:
  void* data_ = MAP_FAILED;
  std::size_t size_ = 0;
};

void add_function(TraceText& text, const char* name, std::uint64_t offset, Symbols symbols) noexcept {
  char* readable = nullptr;
  int status = -1;
  if (symbols == Symbols::Demangled) readable = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  text.add(readable != nullptr ? readable : name);
  std::free(readable);
  text.add("+0x").add_hex(offset).add(" in ");
}

void add_frame(TraceText& text, int number, const void* address, Symbols symbols) noexcept {
  text.add("  #").add_number(number).add(" ");
  Dl_info info{};
  link_map* module = nullptr;
  // What follows a call may belong to the next function already, if the call does not return.
  const auto place = reinterpret_cast<std::uintptr_t>(address) - 1;
  if (::dladdr1(static_cast<const char*>(address) - 1, &info, reinterpret_cast<void**>(&module), RTLD_DL_LINKMAP) ==
      0) {
    text.add("0x").add_hex(place).add("\n");
    return;
  }
  const std::uint64_t offset = place - module->l_addr;  // as the file counts
  if (info.dli_sname != nullptr) {
    add_function(text, info.dli_sname, place - reinterpret_cast<std::uintptr_t>(info.dli_saddr), symbols);
  } else {
    const ModuleFile file(*module);
    const FunctionSymbol found = find_function(file.bytes(), offset);
    if (!found.name.empty()) add_function(text, found.name.data(), found.offset, symbols);  // a zero ends it
  }
  // In this form `addr2line -Cfe FILE OFFSET` takes it.
  if (info.dli_fname != nullptr) text.add(info.dli_fname).add(" ");
  text.add("0x").add_hex(offset).add("\n");
}

}  // namespace

TraceText& TraceText::add(std::string_view text) noexcept {
  const std::size_t piece = std::min(text.size(), room());
  std::memcpy(bytes_.data() + length_, text.data(), piece);
  length_ += piece;
  return *this;
}

TraceText& TraceText::add_number(std::int64_t number) noexcept {
  char digits[24];
  std::size_t at = sizeof digits;
  auto rest = number < 0 ? 0 - static_cast<std::uint64_t>(number) : static_cast<std::uint64_t>(number);
  do {
    digits[--at] = static_cast<char>('0' + rest % 10);
    rest /= 10;
  } while (rest != 0);
  if (number < 0) digits[--at] = '-';
  return add({digits + at, sizeof digits - at});
}

TraceText& TraceText::add_hex(std::uint64_t number) noexcept {
  char digits[16];
  std::size_t at = sizeof digits;
  do {
    digits[--at] = "0123456789abcdef"[number % 16];
    number /= 16;
  } while (number != 0);
  return add({digits + at, sizeof digits - at});
}

bool TraceText::add_file(const char* path) noexcept {
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool added = add_file(fd);
  ::close(fd);
  return added;
}

bool TraceText::add_file(int fd) noexcept {
  const std::size_t before = length_;
  off_t position = 0;
  while (room() > 0) {
    const ssize_t got = ::pread(fd, bytes_.data() + length_, room(), position);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    length_ += static_cast<std::size_t>(got);
    position += got;
  }
  return length_ != before;
}

void prepare_traces() noexcept {
  void* frame = nullptr;
  (void)::backtrace(&frame, 1);
}

void add_backtrace(TraceText& text, int skip, Symbols symbols) noexcept {
  void* frames[kMostFrames];
  const int count = ::backtrace(frames, kMostFrames);
  for (int i = skip + 1; i < count; ++i) add_frame(text, i - skip - 1, frames[i], symbols);
  if (count == kMostFrames) text.add("  ... and further out\n");
}

void add_other_threads(TraceText& text) noexcept {
  const int folder = ::open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  const auto self = static_cast<std::int64_t>(::syscall(SYS_gettid));
  alignas(DirectoryEntry) char bytes[2048];
  long got = 0;
  while (text.room() > 0 && (got = ::syscall(SYS_getdents64, folder, bytes, sizeof bytes)) > 0) {
    for (long at = 0; at < got;) {
      const auto* const entry = reinterpret_cast<const DirectoryEntry*>(bytes + at);
      const std::string_view tid(entry->name);
      if (tid.front() != '.' && std::strtoll(entry->name, nullptr, 10) != self) add_thread(text, tid);
      at += entry->length;
    }
  }
  ::close(folder);
}

}  // namespace cohort::status
