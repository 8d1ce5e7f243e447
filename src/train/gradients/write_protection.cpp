#include "train/gradients/write_protection.h"

#include "base/result.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>

namespace cohort::gradients {

struct WriteProtection::Entry {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  int rank = 0;
  std::vector<Named> named;
};

namespace {

// This process's entries, one for each model of each rank; ranks may be threads.
std::array<std::atomic<const WriteProtection::Entry*>, 64> entries;
struct sigaction before = {};

/// A line of text that a signal handler can write.
class Line {
 public:
  Line& operator<<(const char* text) noexcept {
    while (*text != '\0' && length_ < sizeof text_) text_[length_++] = *text++;
    return *this;
  }
  Line& operator<<(std::uint64_t number) noexcept {
    char digits[21] = {};
    std::size_t at = sizeof digits - 1;
    do {
      digits[--at] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number != 0);
    return *this << digits + at;
  }
  void write() const noexcept { (void)!::write(STDERR_FILENO, text_, length_); }

 private:
  char text_[600];
  std::size_t length_ = 0;
};

void tell(std::uintptr_t address) noexcept {
  for (const auto& slot : entries) {
    const WriteProtection::Entry* const entry = slot.load(std::memory_order_acquire);
    if (entry == nullptr || address < entry->begin || address >= entry->end) continue;
    Line line;
    line << "cohort: rank " << static_cast<std::uint64_t>(entry->rank) << " writes to ";
    for (const WriteProtection::Named& one : entry->named) {
      const auto first = reinterpret_cast<std::uintptr_t>(one.begin);
      if (address < first || address >= first + one.bytes) continue;
      line << "element " << (address - first) / one.element << " of parameter '" << one.name.c_str() << "', ";
    }
    line << "which all ranks of its host share (Sharding::Parameters) -- only the optimizer may; the stack of this "
            "signal says who does\n";
    return line.write();
  }
}

void on_fault(int number, siginfo_t* info, void* context) {
  tell(reinterpret_cast<std::uintptr_t>(info->si_addr));
  if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(number, info, context);
  // Restores the previous handler. The instruction then runs again, and its fault goes to that handler.
  (void)::sigaction(number, &before, nullptr);
}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    ::sigemptyset(&action.sa_mask);
    (void)::sigaction(SIGSEGV, &action, &before);
  });
}

void protect(const WriteProtection::Entry& entry, int protection) {
  if (::mprotect(reinterpret_cast<void*>(entry.begin), entry.end - entry.begin, protection) != 0) {
    raise(ErrorCode::Unavailable, "protect_parameters: mprotect of {} bytes: {}", entry.end - entry.begin,
          errno_text(errno));
  }
}

}  // namespace

WriteProtection::WriteProtection(void* memory, std::size_t bytes, std::vector<Named> named, int rank)
    : entry_(std::make_unique<Entry>()) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  entry_->begin = reinterpret_cast<std::uintptr_t>(memory);
  entry_->end = entry_->begin + (bytes + page - 1) / page * page;
  entry_->rank = rank;
  entry_->named = std::move(named);
  protect(*entry_, PROT_READ);
  install();
  for (auto& slot : entries) {
    const Entry* none = nullptr;
    if (slot.compare_exchange_strong(none, entry_.get(), std::memory_order_acq_rel)) return;
  }
  protect(*entry_, PROT_READ | PROT_WRITE);
  raise(ErrorCode::Unavailable, "protect_parameters: {} models of this process are protected already", entries.size());
}

WriteProtection::~WriteProtection() {
  for (auto& slot : entries) {
    const Entry* own = entry_.get();
    slot.compare_exchange_strong(own, nullptr, std::memory_order_acq_rel);
  }
  (void)::mprotect(reinterpret_cast<void*>(entry_->begin), entry_->end - entry_->begin, PROT_READ | PROT_WRITE);
}

void WriteProtection::allow() { protect(*entry_, PROT_READ | PROT_WRITE); }
void WriteProtection::forbid() { protect(*entry_, PROT_READ); }

}  // namespace cohort::gradients
