// Constants for the sanitizers with which the code is compiled, for tests that cannot run under one of them.
#pragma once

namespace cohort {

#if defined(__has_feature)
inline constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
inline constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
inline constexpr bool kUndefinedBehaviorSanitizer = __has_feature(undefined_behavior_sanitizer);
#else
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif
inline constexpr bool kUndefinedBehaviorSanitizer = false;  // g++ defines no macro for it
#endif

}  // namespace cohort
