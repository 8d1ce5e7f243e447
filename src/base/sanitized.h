// Which sanitizer the code is compiled for, for tests that cannot be tried under it:
// COHORT_SANITIZED(address_sanitizer), or undefined_behavior_sanitizer, thread_sanitizer. Only clang can say; elsewhere
// it is 0.
#pragma once

#if defined(__has_feature)
#define COHORT_SANITIZED(name) __has_feature(name)
#else
#define COHORT_SANITIZED(name) 0
#endif
