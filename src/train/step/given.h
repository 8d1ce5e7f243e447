// Values without a default: initialising a struct that has such members does not compile if one is left out.
#pragma once

#include <utility>
#include <variant>

namespace cohort::step {

/// A value without a default.
template <class T>
class Given {
 public:
  Given(T value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  const T& operator*() const noexcept { return value_; }
  const T* operator->() const noexcept { return &value_; }

 private:
  T value_;
};

/// Stands for a part that a method of training does not have, and gives the reason to readers of the method.
struct None {
  explicit constexpr None(const char* why) : reason(why) {}
  const char* reason;
};

/// A part of a method, or the reason why the method does not have it.
template <class T>
class Part {
 public:
  Part(T value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  Part(None none) : value_(none) {}            // NOLINT(google-explicit-constructor)
  const T* get() const noexcept { return std::get_if<T>(&value_); }

 private:
  std::variant<None, T> value_;
};

}  // namespace cohort::step
