#include "telemetry/last_words.h"

#include "telemetry/status_page.h"

#include <cohort/error.h>

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <stdio_ext.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <typeinfo>

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
    // Prevents an overflow for a table near the largest offset.
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

// Text of a dying process, with backtraces: a fixed buffer, formatted without allocation, locks or locale. Safe in
// signal handlers. One thread at a time per buffer.
class TraceText {
 public:
  static constexpr std::size_t kBytes = 12 << 10;

  std::string_view view() const noexcept { return {bytes_.data(), length_}; }
  void clear() noexcept { length_ = 0; }
  std::size_t room() const noexcept { return kBytes - length_; }

  TraceText& add(std::string_view text) noexcept;
  TraceText& add_number(std::int64_t number) noexcept;
  TraceText& add_hex(std::uint64_t number) noexcept;
  /// Adds as much of a file as fits. Returns false if the file is empty.
  bool add_file(int fd) noexcept;

 private:
  std::array<char, kBytes> bytes_;
  std::size_t length_ = 0;
};

enum class Symbols {
  Demangled,  ///< allocates: not in signal handlers
  Raw,
};

struct DirectoryEntry {  // linux_dirent64, used directly since opendir allocates
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

// Writes /proc/self/task/TID/NAME to `path`.
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
  const auto end = stat.rfind(") ");  // end of the name, which may contain anything
  const char state = end != std::string_view::npos && end + 2 < stat.size() ? stat[end + 2] : '?';
  text.add(state == 'R' ? " runs" : state == 'D' ? " waits, uninterruptibly" : state == 'T' ? " is stopped" : " waits");
  task_path(path, tid, "wchan");
  const std::string_view where = read_small(bytes, path);
  if (!where.empty() && where != "0") text.add(" in ").add(where);
  text.add("\n");
}

/// Maps a module's file while its symbols are read. (Functions that make a sys::Mapping allocate.)
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
  // The return address may lie in the next function if the call does not return.
  const auto place = reinterpret_cast<std::uintptr_t>(address) - 1;
  if (::dladdr1(static_cast<const char*>(address) - 1, &info, reinterpret_cast<void**>(&module), RTLD_DL_LINKMAP) ==
      0) {
    text.add("0x").add_hex(place).add("\n");
    return;
  }
  const std::uint64_t offset = place - module->l_addr;  // address in the file's numbering
  if (info.dli_sname != nullptr) {
    add_function(text, info.dli_sname, place - reinterpret_cast<std::uintptr_t>(info.dli_saddr), symbols);
  } else {
    const ModuleFile file(*module);
    const FunctionSymbol found = find_function(file.bytes(), offset);
    if (!found.name.empty()) add_function(text, found.name.data(), found.offset, symbols);  // name ends with a zero
  }
  // `addr2line -Cfe FILE OFFSET` accepts this form.
  if (info.dli_fname != nullptr) text.add(info.dli_fname).add(" ");
  text.add("0x").add_hex(offset).add("\n");
}

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

/// Must be called outside a handler before the first backtrace, since a process's first backtrace loads a library.
void prepare_traces() noexcept {
  void* frame = nullptr;
  (void)::backtrace(&frame, 1);
}

/// Adds the calling thread's stack, a line per frame, without the innermost `skip` frames.
void add_backtrace(TraceText& text, int skip, Symbols symbols) noexcept {
  void* frames[kMostFrames];
  const int count = ::backtrace(frames, kMostFrames);
  for (int i = skip + 1; i < count; ++i) add_frame(text, i - skip - 1, frames[i], symbols);
  if (count == kMostFrames) text.add("  ... and further out\n");
}

/// Adds the other threads of this process: name, state, and where in the kernel they wait.
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

constexpr int kFatalSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr std::size_t kAlternateStack = 64 << 10;

std::terminate_handler terminate_before = nullptr;
std::atomic<int> interpreter_fd{-1};
// Separate buffers, since an exception's terminate handler ends in SIGABRT, and SIGQUIT may come at any time.
TraceText of_exception;
TraceText of_signal;
TraceText of_stacks;

std::string_view name_of_fatal(int number) noexcept {
  switch (number) {
    case SIGSEGV: return "SIGSEGV";
    case SIGBUS: return "SIGBUS";
    case SIGFPE: return "SIGFPE";
    case SIGILL: return "SIGILL";
    default: return "SIGABRT";
  }
}

void add_type(TraceText& text) noexcept {
  const std::type_info* const type = abi::__cxa_current_exception_type();
  if (type == nullptr) {
    text.add("exception of an unknown type");
    return;
  }
  int status = -1;
  char* const readable = abi::__cxa_demangle(type->name(), nullptr, nullptr, &status);
  text.add(readable != nullptr ? readable : type->name());
  std::free(readable);
}

void add_context(TraceText& text, const Error& error) noexcept {
  const ErrorContext& context = error.context();
  text.add("\n  code ").add(to_string(error.code()));
  if (context.rank >= 0) text.add(", rank ").add_number(context.rank);
  if (!context.host.empty()) text.add(", host ").add(context.host);
  if (context.peer >= 0) text.add(", peer ").add_number(context.peer);
  if (!context.operation.empty()) text.add(", operation ").add(context.operation);
  if (context.sequence != 0) text.add(", number ").add_number(static_cast<std::int64_t>(context.sequence));
}

void add_exception(TraceText& text, int depth) noexcept;

void add_cause(TraceText& text, const std::exception& error, int depth) noexcept {
  constexpr int kMostCauses = 5;
  if (depth == kMostCauses) return;
  try {
    std::rethrow_if_nested(error);
  } catch (...) {
    text.add("\n  caused by ");
    add_exception(text, depth + 1);
  }
}

// Removes the hundred lines of stack frames that libtorch's errors end with, since our own stack follows.
std::string_view without_frames(std::string_view what) noexcept { return what.substr(0, what.find("\nframe #0: ")); }

// Adds the exception being handled.
void add_exception(TraceText& text, int depth) noexcept {
  add_type(text);
  try {
    throw;
  } catch (const Error& error) {
    text.add(": ").add(error.what());
    add_context(text, error);
    // A lost peer is the cause even if the exception was wrapped in others.
    const bool follows = error.code() == ErrorCode::PeerLost || error.code() == ErrorCode::Aborted;
    if (depth == 0 || follows) StatusPage::own().note_end(error);
    add_cause(text, error, depth);
  } catch (const std::exception& error) {
    text.add(": ").add(without_frames(error.what()));
    add_cause(text, error, depth);
  } catch (...) {
    // such an exception has no text besides its type
  }
}

[[noreturn]] void on_terminate() noexcept {
  static std::atomic<bool> entered{false};
  if (!entered.exchange(true)) {
    TraceText& text = of_exception;
    text.clear();
    if (std::current_exception() != nullptr) {
      text.add(kUncaught);
      add_exception(text, 0);
    } else {
      text.add("std::terminate without an exception (a joinable std::thread destroyed?)");
    }
    StatusPage& page = StatusPage::own();
    if (page.say_last_words(text.add("\n").view())) {
      text.clear();
      // If no handler could catch the exception, nothing has been unwound, and the throw is still on the stack. If a
      // noexcept function stopped the exception, the frames between the throw and that function are gone.
      text.add(kThrowStack);
      add_backtrace(text, 1, Symbols::Demangled);
      page.add_last_words(text.view());
    }
  }
  if (terminate_before != nullptr) terminate_before();
  std::abort();
}

void on_fatal_signal(int number, siginfo_t* info, void* /*context*/) {
  const int error_number = errno;
  static std::atomic<bool> entered{false};
  if (!entered.exchange(true)) {
    TraceText& text = of_signal;
    text.clear();
    text.add("fatal signal ").add(name_of_fatal(number));
    if (info != nullptr && info->si_code > 0 && number != SIGABRT) {
      text.add(" at address 0x").add_hex(reinterpret_cast<std::uintptr_t>(info->si_addr));
    } else if (info != nullptr && info->si_code <= 0 && info->si_pid != ::getpid()) {
      text.add(" sent by process ").add_number(info->si_pid);
    }
    text.add("\n");
    const int fd = interpreter_fd.load();
    if (fd >= 0) text.add_file(fd);
    StatusPage& page = StatusPage::own();
    // Writes the safe part first: walking a broken stack may fault again, which ends the process.
    if (page.say_last_words(text.view())) {
      text.clear();
      text.add(kNativeStack);
      add_backtrace(text, 1, Symbols::Raw);
      page.add_last_words(text.view());
    }
  }
  ::signal(number, SIG_DFL);
  // The signal stays blocked until this handler returns, and is then delivered at the place of the fault.
  ::raise(number);
  errno = error_number;
}

void on_quit(int /*number*/) {
  const int error_number = errno;
  static std::atomic<bool> busy{false};
  const StatusPage& page = StatusPage::own();
  if (page.layout().pid.load() != ::getpid()) {  // in a fork of the rank, the signal has its default action
    ::signal(SIGQUIT, SIG_DFL);
    ::raise(SIGQUIT);
    return;
  }
  const int fd = page.fd();
  if (!busy.exchange(true)) {
    TraceText& text = of_stacks;
    text.clear();
    text.add("thread ").add_number(static_cast<std::int64_t>(::syscall(SYS_gettid))).add(":\n");
    add_backtrace(text, 1, Symbols::Raw);
    add_other_threads(text);
    std::string_view rest = text.view();
    while (!rest.empty()) {
      const ssize_t put = ::write(fd, rest.data(), rest.size());
      if (put > 0) rest.remove_prefix(static_cast<std::size_t>(put));
      if (put < 0 && errno != EINTR) break;
    }
    busy.store(false);
  }
  errno = error_number;
}

bool is_default(int number) noexcept {
  struct sigaction now = {};
  return ::sigaction(number, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_DFL;
}

// Provides an alternate stack, so that a handler can run after a stack overflow.
void provide_alternate_stack() noexcept {
  alignas(64) static std::byte memory[kAlternateStack];
  stack_t now = {};
  if (::sigaltstack(nullptr, &now) != 0 || (now.ss_flags & SS_DISABLE) == 0) return;
  stack_t wanted = {};
  wanted.ss_sp = memory;
  wanted.ss_size = sizeof memory;
  (void)::sigaltstack(&wanted, nullptr);
}

}  // namespace

void keep_last_words() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (StatusPage::own().fd() < 0) return;
    prepare_traces();
    terminate_before = std::set_terminate(on_terminate);
    provide_alternate_stack();
    for (const int number : kFatalSignals) {
      if (!is_default(number)) continue;  // handled by a sanitizer or the program, or ignored
      struct sigaction action = {};
      action.sa_sigaction = on_fatal_signal;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK;
      ::sigemptyset(&action.sa_mask);
      (void)::sigaction(number, &action, nullptr);
    }
  });
}

void tell_stacks_when_asked() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (StatusPage::own().fd() < 0 || !is_default(SIGQUIT)) return;
    prepare_traces();
    struct sigaction action = {};
    action.sa_handler = on_quit;
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    ::sigemptyset(&action.sa_mask);
    if (::sigaction(SIGQUIT, &action, nullptr) == 0) StatusPage::own().announce_stacks();
  });
}

void show_lines_at_once() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (StatusPage::own().fd() < 0 || __flbf(stdout) != 0 || __fbufsize(stdout) == 1) return;
    // glibc can change the mode of a stream in use; the change takes effect when its buffer is empty.
    (void)std::setvbuf(stdout, nullptr, _IOLBF, 0);
    (void)std::fflush(stdout);
  });
}

void add_to_last_words(int fd) noexcept { interpreter_fd.store(fd); }

}  // namespace cohort::status
