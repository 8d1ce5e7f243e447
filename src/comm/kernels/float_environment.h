// The thread's floating-point mode, for kernels whose results must not depend on it.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace cohort::comm {

// Sets the thread's floating-point mode to IEEE defaults (round to nearest, denormals kept) for a scope. Numerical
// libraries switch denormals off for some threads, and the bits of a sum must not depend on that. Used by one thread.
// If the mode is right already, as it nearly always is, it is only read: writing costs as much as a small sum.
class FloatEnvironment {
 public:
  FloatEnvironment() noexcept : saved_(read()), changed_((saved_ & kControl) != kDefault) {
    if (changed_) write((saved_ & ~kControl) | kDefault);
  }
  ~FloatEnvironment() {
    if (changed_) write(saved_);
  }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
#if defined(__x86_64__) || defined(__i386__)
  using Word = unsigned;
  static constexpr Word kControl = 0xFFC0;  // all bits except the exception flags, which do not change results
  static constexpr Word kDefault = 0x1F80;  // all exceptions masked, nearest, no FTZ, no DAZ
  static Word read() noexcept { return _mm_getcsr(); }
  static void write(Word word) noexcept { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word kControl = ~Word{0};
  static constexpr Word kDefault = 0;
  static Word read() noexcept {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) noexcept { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
  using Word = int;
  static constexpr Word kControl = 0;
  static constexpr Word kDefault = 0;
  static Word read() noexcept { return 0; }
  static void write(Word) noexcept {}
#endif
  Word saved_;
  bool changed_;
};

}  // namespace cohort::comm
