// Memory that is met in no order, as rows and their index are: with small pages half of the time goes into finding the
// page. Any thread.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace cohort::ps {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// Of memory that begins with one. Only a wish.
inline void wish_for_huge_pages(void* memory, std::size_t bytes) noexcept {
  (void)::madvise(memory, bytes, MADV_HUGEPAGE);
}

/// For vectors that may become large.
template <class T>
struct HugePageAllocator {
  using value_type = T;
  HugePageAllocator() noexcept = default;
  template <class U>
  HugePageAllocator(const HugePageAllocator<U>&) noexcept {}
  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    if (bytes < kHugePage) return static_cast<T*>(::operator new(bytes));
    void* const memory = ::operator new(bytes, std::align_val_t(kHugePage));
    wish_for_huge_pages(memory, bytes);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) noexcept {
    if (count * sizeof(T) < kHugePage) {
      ::operator delete(memory);
    } else {
      ::operator delete(memory, std::align_val_t(kHugePage));
    }
  }
  template <class U>
  bool operator==(const HugePageAllocator<U>&) const noexcept {
    return true;
  }
};

}  // namespace cohort::ps
