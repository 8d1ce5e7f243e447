// Encodes records as bytes, and decodes them. A record names its fields once, in order, for both directions:
//   void visit_fields(auto& m, auto& archive, const Record*) { archive(m.a, m.b); }
// in the record's namespace. Fields are numbers, bool, enums (by `below`), texts, records, and vectors, optionals and
// variants of them. Decoding checks every length before it allocates memory, and keeps the first error, so untrusted
// bytes are safe to decode. Pure; any thread.
#pragma once

#include "base/result.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace cohort::codec {

// Little-endian bytes for messages between processes. A Reader never reads past its end, and every call returns a
// Result, so untrusted bytes are safe to read. Not thread-safe; owns nothing.
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
  /// Appends a 32-bit length, then the bytes.
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
  /// Returns a view, which is valid as long as the bytes are.
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

/// Limits of texts and lists whose fields do not set their own. `what` is the prefix of error messages.
struct Limits {
  std::size_t longest_text = 4096;
  std::size_t most_elements = std::size_t{1} << 20;
  std::string_view what = {};
};
inline constexpr std::size_t kLongestError = std::size_t{64} << 10;

/// Fields that set their own bounds; made by the functions below.
template <class T>
struct Below {
  T& value;
  std::size_t count;
  std::string_view otherwise;
};
template <class T>
struct Within {
  T& value;
  Limits limits;
};
template <class T>
struct Constant {
  T value;
  std::string_view otherwise;
};

/// An enum, or a number, below `count`.
template <class T>
Below<T> below(T& value, std::size_t count, std::string_view otherwise) {
  return {value, count, otherwise};
}
template <class T>
Within<T> longest(T& value, std::size_t longest_text) {
  return {value, {longest_text}};
}
/// A list of at most `elements` elements; if they are texts, of at most `longest_text` bytes each.
template <class T>
Within<T> most(T& value, std::size_t elements, std::size_t longest_text = Limits().longest_text) {
  return {value, {longest_text, elements}};
}
template <class T>
Constant<T> constant(T value, std::string_view otherwise) {
  return {value, otherwise};
}

class Encoder {
 public:
  template <class... T>
  void operator()(const T&... fields) {
    (put(fields), ...);
  }
  void demand(bool, std::string_view) noexcept {}
  std::string take() { return writer_.take(); }

 private:
  template <class T>
  void put(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      writer_.number(static_cast<std::uint8_t>(value ? 1 : 0));
    } else if constexpr (std::is_arithmetic_v<T>) {
      writer_.number(value);
    } else {
      visit_fields(value, *this, &value);
    }
  }
  void put(const std::string& value) { writer_.text(value); }
  void put(const Error& error) {
    put(static_cast<std::uint8_t>(error.code()));
    writer_.text(std::string_view(error.what()).substr(0, kLongestError));
  }
  template <class T>
  void put(const std::vector<T>& values) {
    put(static_cast<std::uint32_t>(values.size()));
    for (const T& value : values) put(value);
  }
  template <class T>
  void put(const std::optional<T>& value) {
    put(value.has_value());
    if (value) put(*value);
  }
  template <class... T>
  void put(const std::variant<T...>& value) {
    put(static_cast<std::uint8_t>(value.index()));
    std::visit([this](const auto& alternative) { this->put(alternative); }, value);
  }
  template <class T>
  void put(const Below<T>& field) {
    if constexpr (std::is_enum_v<T>) {
      put(static_cast<std::underlying_type_t<T>>(field.value));
    } else {
      put(field.value);
    }
  }
  template <class T>
  void put(const Within<T>& field) {
    put(field.value);
  }
  template <class T>
  void put(const Constant<T>& field) {
    put(field.value);
  }

  Writer writer_;
};

class Decoder {
 public:
  explicit Decoder(std::string_view bytes, const Limits& limits = {}) : reader_(bytes), limits_(limits) {}

  template <class... T>
  void operator()(T&&... fields) {
    (get(fields), ...);
  }
  void demand(bool condition, std::string_view otherwise) {
    if (!condition) spoil(Error(ErrorCode::Corrupt, std::string(otherwise)));
  }
  /// Fails with Corrupt, naming the first error, if there was one.
  Result<void> finish() {
    demand(reader_.at_end(), "message is longer than its fields");
    if (error_) return tl::unexpected(*error_);
    return {};
  }

 private:
  void spoil(const Error& error) {
    if (error_) return;
    error_ = limits_.what.empty() ? error : Error(ErrorCode::Corrupt, std::string(limits_.what) + ": " + error.what());
  }
  template <class T>
  void get(T& value) {
    if (error_) return;
    if constexpr (std::is_same_v<T, bool>) {
      std::uint8_t byte = 0;
      get(byte);
      demand(byte <= 1, "a flag is neither 0 nor 1");
      value = byte == 1;
    } else if constexpr (std::is_arithmetic_v<T>) {
      if (const auto number = reader_.number<T>()) {
        value = *number;
      } else {
        spoil(number.error());
      }
    } else {
      visit_fields(value, *this, &std::as_const(value));
    }
  }
  void get(std::string& value) { get_text(value, limits_.longest_text); }
  void get_text(std::string& value, std::size_t longest_text) {
    if (error_) return;
    if (const auto text = reader_.text(longest_text)) {
      value.assign(*text);
    } else {
      spoil(text.error());
    }
  }
  template <class T>
  void get(std::vector<T>& values) {
    std::uint32_t count = 0;
    get(count);
    if (error_) return;
    if (count > limits_.most_elements)
      return spoil(Error(ErrorCode::Corrupt,
                         fmt::format("a list of {} where at most {} are allowed", count, limits_.most_elements)));
    // Every element takes at least 4 bytes, so a false count cannot cause a large allocation.
    if (count > reader_.rest().size() / 4) return demand(false, "list is longer than its message");
    for (std::uint32_t i = 0; i < count && !error_; ++i) get(values.emplace_back());
  }
  template <class T>
  void get(std::optional<T>& value) {
    bool present = false;
    get(present);
    if (!present) return;
    if constexpr (std::is_same_v<T, Error>) {
      std::uint8_t code = 0;
      std::string text;
      get(code);
      demand(code <= static_cast<std::uint8_t>(ErrorCode::Internal), "an error code that does not exist");
      get_text(text, kLongestError);
      if (!error_) value.emplace(static_cast<ErrorCode>(code), text);
    } else {
      T got{};
      get(got);
      if (!error_) value = std::move(got);
    }
  }
  template <class... T>
  void get(std::variant<T...>& value) {
    std::uint8_t kind = 0;
    get(kind);
    if (error_) return;
    if (kind >= sizeof...(T)) return spoil(Error(ErrorCode::Corrupt, fmt::format("message of unknown kind {}", kind)));
    get_alternative(value, kind, std::index_sequence_for<T...>());
  }
  template <class V, std::size_t... I>
  void get_alternative(V& value, std::size_t kind, std::index_sequence<I...>) {
    static_cast<void>(((kind == I ? (get(value.template emplace<I>()), true) : false) || ...));
  }
  template <class T>
  void get(Below<T>& field) {
    if constexpr (std::is_enum_v<T>) {
      std::underlying_type_t<T> number{};
      get(number);
      demand(static_cast<std::size_t>(number) < field.count, field.otherwise);
      if (!error_) field.value = static_cast<T>(number);
    } else {
      get(field.value);
      demand(static_cast<std::size_t>(field.value) < field.count, field.otherwise);
    }
  }
  template <class T>
  void get(Within<T>& field) {
    const std::string_view what = limits_.what;
    const Limits around = std::exchange(limits_, field.limits);
    limits_.what = what;
    get(field.value);
    limits_ = around;
  }
  template <class T>
  void get(Constant<T>& field) {
    T value{};
    get(value);
    demand(value == field.value, field.otherwise);
  }

  Reader reader_;
  Limits limits_;
  std::optional<Error> error_;
};

template <class T>
std::string encode(const T& record) {
  Encoder encoder;
  encoder(record);
  return encoder.take();
}

/// Fails with Corrupt unless the bytes are exactly one record.
template <class T>
Result<T> decode(std::string_view bytes, const Limits& limits = {}) {
  T record{};
  Decoder decoder(bytes, limits);
  decoder(record);
  if (auto done = decoder.finish(); !done) return tl::unexpected(std::move(done).error());
  return record;
}

}  // namespace cohort::codec
