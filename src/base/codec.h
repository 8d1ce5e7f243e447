// Little-endian bytes for messages between processes. A Reader never reads past its end: every call returns a
// Result, so that bytes from outside cannot do harm. Not thread-safe; owns nothing.
#pragma once

#include "base/result.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace cohort::codec {

static_assert(std::endian::native == std::endian::little, "messages are little-endian, and so must the host be");

class Writer {
 public:
  template <class T>
  requires std::is_arithmetic_v<T> Writer& number(T value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out_.append(bytes, sizeof value);
    return *this;
  }
  /// 32-bit length, then the bytes.
  Writer& text(std::string_view value) {
    number(static_cast<std::uint32_t>(value.size()));
    out_.append(value);
    return *this;
  }
  std::string take() { return std::move(out_); }
  const std::string& bytes() const noexcept { return out_; }

 private:
  std::string out_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <class T>
  requires std::is_arithmetic_v<T> Result<T> number() {
    if (rest_.size() < sizeof(T)) return fail(ErrorCode::Corrupt, "message ends within a number");
    T value;
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_.remove_prefix(sizeof value);
    return value;
  }
  /// The view is valid as long as the bytes are.
  Result<std::string_view> text(std::size_t longest) {
    auto size = number<std::uint32_t>();
    if (!size) return tl::unexpected(size.error());
    if (*size > longest)
      return fail(ErrorCode::Corrupt, "text of {} bytes where at most {} are allowed", *size, longest);
    if (*size > rest_.size()) return fail(ErrorCode::Corrupt, "message ends within a text");
    const std::string_view value = rest_.substr(0, *size);
    rest_.remove_prefix(*size);
    return value;
  }
  bool at_end() const noexcept { return rest_.empty(); }
  std::string_view rest() const noexcept { return rest_; }

 private:
  std::string_view rest_;
};

}  // namespace cohort::codec
