#include "sys/hidden_memory.h"

#include <string.h>
#include <sys/mman.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <new>

namespace cohort::sys {
namespace {

struct Page {
  std::atomic<std::uint64_t> used{0};  // a bit per slot
  std::byte* bytes = nullptr;
  Page* next = nullptr;
};
constexpr std::size_t kSlots = 64;
constexpr std::size_t kPageBytes = kSlots * kHiddenBytes;

// Pages are only ever put in front.
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
  ::mlock(bytes, kPageBytes);  // RLIMIT_MEMLOCK may not allow it
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
