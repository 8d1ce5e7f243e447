// Tells whether this is a forked child of the process that made the object: a page that the kernel clears in children.
// Costs one load to ask. Any thread.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

namespace cohort::comm {

class ForkGuard {
 public:
  ForkGuard() noexcept {
    void* const page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    ::madvise(page, kPage, MADV_WIPEONFORK);
    word_ = static_cast<std::uint32_t*>(page);
    *word_ = kHome;
  }
  ~ForkGuard() {
    if (word_ != nullptr) ::munmap(word_, kPage);
  }
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  bool in_child() const noexcept { return word_ != nullptr && *word_ != kHome; }

 private:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::uint32_t kHome = 1;
  std::uint32_t* word_ = nullptr;
};

}  // namespace cohort::comm
