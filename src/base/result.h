// Result<T>: a value or an Error, for functions that may fail in ordinary use (parsing, probing, planning), so that
// several problems can be reported at once. At the public boundary `value_or_throw` turns the Error into an exception.
#pragma once

#include <cohort/error.h>

#include <fmt/format.h>
#include <tl/expected.hpp>

#include <cerrno>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

namespace cohort {

template <class T>
using Result = tl::expected<T, Error>;

/// A failed Result with a formatted message: `return fail(ErrorCode::Corrupt, "{}: ...", path);`
template <class... Args>
tl::unexpected<Error> fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected<Error>(Error(code, fmt::format(format, std::forward<Args>(args)...)));
}

/// Like `fail`, for an error of the operating system. The Error keeps the error's number.
template <class... Args>
tl::unexpected<Error> fail_system(int error_number, ErrorCode code, fmt::format_string<Args...> format,
                                  Args&&... args) {
  ErrorContext context;
  context.system_error = error_number;
  return tl::unexpected<Error>(Error(code, fmt::format(format, std::forward<Args>(args)...), std::move(context)));
}

/// Throws an Error with a formatted message.
template <class... Args>
[[noreturn]] void raise(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

template <class T>
T value_or_throw(Result<T> result) {
  if (!result) throw std::move(result).error();
  if constexpr (!std::is_void_v<T>) return *std::move(result);
}

/// Returns the result of `f`, or the Error it throws. For code that checks results but calls code that throws.
template <class F>
auto result_of(F&& f) -> Result<decltype(f())> {
  try {
    if constexpr (std::is_void_v<decltype(f())>) {
      f();
      return {};
    } else {
      return f();
    }
  } catch (const Error& error) {
    return tl::unexpected(error);
  }
}

/// Returns e.g. "No such file or directory (ENOENT)".
std::string errno_text(int error_number);

}  // namespace cohort
