// Compiled once per instruction set by foreach_target.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/kernels/codecs.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "comm/kernels/arrays.h"
#include "comm/kernels/codecs.h"
#include "comm/kernels/float_environment.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef COHORT_COMM_KERNELS_CODECS_ONCE
#define COHORT_COMM_KERNELS_CODECS_ONCE
namespace cohort::comm::codecs {

constexpr std::uint32_t kSign = 0x80000000;
constexpr std::uint32_t kInfinity = 0x7F800000;
constexpr std::uint32_t kLeast = 0x0D800000;  // 2^-100: smaller blocks are zero, so that no scale is denormal
constexpr float kNaN = std::bit_cast<float>(std::uint32_t{0x7FC00000});

inline std::uint32_t magnitude(float value) noexcept { return std::bit_cast<std::uint32_t>(value) & ~kSign; }

// The formats' codes of single elements. `kMost` is the value of the largest code, `kMostBeside` that of the largest
// code of a finite element in a block that has NaN or infinities. `code` takes an element divided by the scale.

struct Int8 {
  static constexpr std::size_t kBlock = 256, kScaleBytes = 4;
  static constexpr bool kPairs = false;
  static constexpr float kMost = 127, kMostBeside = 126;
  static constexpr std::uint8_t kInfinite = 127, kMinusInfinite = 0x81, kNotANumber = 0x80;
  static std::uint8_t code(float value) noexcept {
    return static_cast<std::uint8_t>(std::clamp(std::lrintf(value), -127L, 127L));
  }
  static float value(std::uint8_t code) noexcept { return static_cast<float>(static_cast<std::int8_t>(code)); }
};

struct Int4 {
  static constexpr std::size_t kBlock = 128, kScaleBytes = 2;
  static constexpr bool kPairs = true;
  static constexpr float kMost = 7, kMostBeside = 6;
  static constexpr std::uint8_t kInfinite = 7, kMinusInfinite = 9, kNotANumber = 8;
  static std::uint8_t code(float value) noexcept {
    return static_cast<std::uint8_t>(std::clamp(std::lrintf(value), -7L, 7L)) & 15;
  }
  static float value(std::uint8_t code) noexcept { return static_cast<float>(code >= 8 ? code - 16 : code); }
};

template <class Format>
constexpr std::size_t bytes_of_block(std::size_t count) noexcept {
  return Format::kScaleBytes + (Format::kPairs ? (count + 1) / 2 : count);
}

template <class Format>
float scale_for(std::uint32_t largest, float most) noexcept {
  if (largest < kLeast) return 0;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(largest) / most);
  constexpr std::uint32_t kStep = Format::kScaleBytes == 2 ? 0x10000 : 1;
  bits = (bits + kStep - 1) & ~(kStep - 1);
  // Lowers a scale with which finite values would become infinite.
  while (magnitude(std::bit_cast<float>(bits) * most) >= kInfinity) bits -= kStep;
  return std::bit_cast<float>(bits);
}

template <class Format>
void put_scale(float scale, std::byte* to) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(scale);
  if constexpr (Format::kScaleBytes == 2) {
    const auto half = static_cast<std::uint16_t>(bits >> 16);
    std::memcpy(to, &half, sizeof half);
  } else {
    std::memcpy(to, &bits, sizeof bits);
  }
}

template <class Format>
float get_scale(const std::byte* from) noexcept {
  if constexpr (Format::kScaleBytes == 2) {
    std::uint16_t half;
    std::memcpy(&half, from, sizeof half);
    return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
  } else {
    float scale;
    std::memcpy(&scale, from, sizeof scale);
    return scale;
  }
}

// Encodes blocks that are short or not finite, one element after the other.
template <class Format>
void encode_slowly(const float* values, std::byte* to, std::size_t count, float* residual) noexcept {
  std::uint32_t largest = 0;
  bool finite = true;
  for (std::size_t i = 0; i < count; ++i) {
    if (magnitude(values[i]) < kInfinity) {
      largest = std::max(largest, magnitude(values[i]));
    } else {
      finite = false;
    }
  }
  const float scale = scale_for<Format>(largest, finite ? Format::kMost : Format::kMostBeside);
  const float inverse = scale == 0 ? 0 : 1 / scale;
  put_scale<Format>(finite ? scale : -scale, to);
  auto* const codes = reinterpret_cast<std::uint8_t*>(to + Format::kScaleBytes);
  const std::size_t half = (count + 1) / 2;
  if (Format::kPairs) std::memset(codes, 0, half);
  for (std::size_t i = 0; i < count; ++i) {
    const float value = values[i];
    const bool known = magnitude(value) < kInfinity;
    const std::uint8_t code = known                          ? Format::code(value * inverse)
                              : magnitude(value) > kInfinity ? Format::kNotANumber
                              : value > 0                    ? Format::kInfinite
                                                             : Format::kMinusInfinite;
    if (residual != nullptr) residual[i] = known ? value - Format::value(code) * scale : 0;
    if constexpr (Format::kPairs) {
      codes[i % half] = static_cast<std::uint8_t>(codes[i % half] | (i < half ? code : code << 4));
    } else {
      codes[i] = code;
    }
  }
}

template <class Format>
void decode_slowly(const std::byte* from, float* to, std::size_t count) noexcept {
  const float scale = get_scale<Format>(from);
  const bool finite = !std::signbit(scale);
  const auto* const codes = reinterpret_cast<const std::uint8_t*>(from + Format::kScaleBytes);
  const std::size_t half = (count + 1) / 2;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint8_t code = 0;
    if constexpr (Format::kPairs) {
      code = i < half ? codes[i] & 15 : codes[i - half] >> 4;
    } else {
      code = codes[i];
    }
    if (finite) {
      to[i] = Format::value(code) * scale;
    } else if (code == Format::kNotANumber) {
      to[i] = kNaN;
    } else if (code == Format::kInfinite || code == Format::kMinusInfinite) {
      to[i] = std::bit_cast<float>(code == Format::kInfinite ? kInfinity : kInfinity | kSign);
    } else {
      to[i] = Format::value(code) * -scale;
    }
  }
}

}  // namespace cohort::comm::codecs
#endif

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using DB = hn::Rebind<std::uint8_t, DI>;  // a code for each lane
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;

/// Returns the codes of a whole vector of finite elements, as 32-bit numbers.
template <class Format>
static HWY_INLINE VI codes_of(VF scaled) {
  const DI di;
  const auto most = static_cast<std::int32_t>(Format::kMost);
  return hn::Min(hn::Max(hn::NearestInt(scaled), hn::Set(di, -most)), hn::Set(di, most));
}

template <class Format>
static HWY_INLINE std::uint32_t largest_of(const float* values) {
  const DI di;  // signed numbers will do, since magnitudes are not negative
  const auto without_sign = hn::Set(di, 0x7FFFFFFF);
  auto largest = hn::Zero(di);
  for (std::size_t i = 0; i < Format::kBlock; i += hn::Lanes(di)) {
    largest = hn::Max(largest, hn::And(hn::BitCast(di, hn::LoadU(DF(), values + i)), without_sign));
  }
  return static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest)));
}

/// Encodes a whole block of finite elements.
template <class Format>
static HWY_INLINE void encode_block(const float* values, std::uint32_t largest, std::byte* to, float* residual) {
  const DF df;
  const DB db;
  const std::size_t lanes = hn::Lanes(df);
  const float scale = codecs::scale_for<Format>(largest, Format::kMost);
  codecs::put_scale<Format>(scale, to);
  auto* const codes = reinterpret_cast<std::uint8_t*>(to + Format::kScaleBytes);
  const auto steps = hn::Set(df, scale), inverse = hn::Set(df, scale == 0 ? 0 : 1 / scale);
  const auto take = [&](std::size_t i) HWY_ATTR {
    const auto value = hn::LoadU(df, values + i);
    const auto code = codes_of<Format>(hn::Mul(value, inverse));
    if (residual != nullptr) hn::StoreU(hn::Sub(value, hn::Mul(hn::ConvertTo(df, code), steps)), df, residual + i);
    return hn::And(code, hn::Set(DI(), Format::kPairs ? 15 : 255));
  };
  constexpr std::size_t kCodes = Format::kPairs ? Format::kBlock / 2 : Format::kBlock;
  for (std::size_t i = 0; i < kCodes; i += lanes) {
    auto code = take(i);
    if constexpr (Format::kPairs) code = hn::Or(code, hn::ShiftLeft<4>(take(i + kCodes)));
    hn::StoreU(hn::DemoteTo(db, code), db, codes + i);
  }
}

template <class Format>
static HWY_INLINE void decode_block(const std::byte* from, float* to) {
  const DF df;
  const DI di;
  const DB db;
  const auto steps = hn::Set(df, codecs::get_scale<Format>(from));
  const auto* const codes = reinterpret_cast<const std::uint8_t*>(from + Format::kScaleBytes);
  constexpr std::size_t kCodes = Format::kPairs ? Format::kBlock / 2 : Format::kBlock;
  for (std::size_t i = 0; i < kCodes; i += hn::Lanes(df)) {
    const auto code = hn::PromoteTo(di, hn::LoadU(db, codes + i));
    if constexpr (Format::kPairs) {
      const auto low = hn::ShiftRight<28>(hn::ShiftLeft<28>(code)), high = hn::ShiftRight<28>(hn::ShiftLeft<24>(code));
      hn::StoreU(hn::Mul(hn::ConvertTo(df, low), steps), df, to + i);
      hn::StoreU(hn::Mul(hn::ConvertTo(df, high), steps), df, to + i + kCodes);
    } else {
      const auto number = hn::ShiftRight<24>(hn::ShiftLeft<24>(code));
      hn::StoreU(hn::Mul(hn::ConvertTo(df, number), steps), df, to + i);
    }
  }
}

template <class Format>
static HWY_INLINE void encode_all(const float* from, std::byte* to, std::size_t count, float* residual, float unit) {
  constexpr std::size_t kBlock = Format::kBlock;
  for (std::size_t i = 0; i < count; i += kBlock) {
    const std::size_t length = std::min(kBlock, count - i);
    const float* values = from + i;
    float* const lost = residual == nullptr ? nullptr : residual + i;
    float copied[kBlock];
    if (lost != nullptr || length < kBlock) {
      std::memcpy(copied, values, length * sizeof(float));  // elements need not be aligned
      values = copied;
    }
    if (lost != nullptr) {
      for (std::size_t j = 0; j < length; ++j) copied[j] += lost[j] * unit;
    }
    const std::uint32_t largest = length == kBlock ? largest_of<Format>(values) : codecs::kInfinity;
    if (largest < codecs::kInfinity) {
      encode_block<Format>(values, largest, to, lost);
    } else {
      if (values != copied) std::memcpy(copied, values, sizeof copied);
      codecs::encode_slowly<Format>(copied, to, length, lost);
    }
    if (lost != nullptr && unit != 1) {
      for (std::size_t j = 0; j < length; ++j) lost[j] /= unit;
    }
    to += codecs::bytes_of_block<Format>(length);
  }
}

template <class Format>
static HWY_INLINE void decode_all(const std::byte* from, float* to, std::size_t count) {
  constexpr std::size_t kBlock = Format::kBlock;
  for (std::size_t i = 0; i < count; i += kBlock) {
    const std::size_t length = std::min(kBlock, count - i);
    if (length == kBlock && !std::signbit(codecs::get_scale<Format>(from))) {
      decode_block<Format>(from, to + i);
    } else {
      float values[kBlock];
      codecs::decode_slowly<Format>(from, values, length);
      std::memcpy(to + i, values, length * sizeof(float));
    }
    from += codecs::bytes_of_block<Format>(length);
  }
}

void encode_format(WireFormat format, const float* from, std::byte* to, std::size_t count, float* residual,
                   float unit) {
  if (format == WireFormat::Int4) return encode_all<codecs::Int4>(from, to, count, residual, unit);
  encode_all<codecs::Int8>(from, to, count, residual, unit);
}

void decode_format(WireFormat format, const std::byte* from, float* to, std::size_t count) {
  if (format == WireFormat::Int4) return decode_all<codecs::Int4>(from, to, count);
  decode_all<codecs::Int8>(from, to, count);
}

}  // namespace cohort::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cohort::comm {
namespace {

HWY_EXPORT(encode_format);
HWY_EXPORT(decode_format);

}  // namespace

std::size_t block_of(WireFormat format) noexcept {
  return format == WireFormat::Int4 ? codecs::Int4::kBlock : format == WireFormat::Int8 ? codecs::Int8::kBlock : 1;
}

std::size_t encoded_bytes(WireFormat format, std::size_t count) noexcept {
  if (format == WireFormat::None) return count * sizeof(float);
  if (format == WireFormat::BFloat16) return count * sizeof(std::uint16_t);
  const std::size_t block = block_of(format), rest = count % block;
  const auto bytes = [&](std::size_t length) {
    return format == WireFormat::Int4 ? codecs::bytes_of_block<codecs::Int4>(length)
                                      : codecs::bytes_of_block<codecs::Int8>(length);
  };
  return count / block * bytes(block) + (rest > 0 ? bytes(rest) : 0);
}

void encode(WireFormat format, const float* from, std::byte* to, std::size_t count, float* residual, float unit) {
  if (format == WireFormat::None) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  if (format == WireFormat::BFloat16) return narrow_to_bfloat16(from, reinterpret_cast<std::uint16_t*>(to), count);
  const FloatEnvironment ieee;
  HWY_DYNAMIC_DISPATCH(encode_format)(format, from, to, count, residual, unit);
}

void decode(WireFormat format, const std::byte* from, float* to, std::size_t count) {
  if (format == WireFormat::None) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  if (format == WireFormat::BFloat16)
    return widen_from_bfloat16(reinterpret_cast<const std::uint16_t*>(from), to, count);
  const FloatEnvironment ieee;
  HWY_DYNAMIC_DISPATCH(decode_format)(format, from, to, count);
}

void round_trip(WireFormat format, float* values, std::size_t count, float* residual, float unit) {
  constexpr std::size_t kAtOnce = 1024;  // a multiple of all block sizes
  std::byte encoded[kAtOnce * sizeof(float)];
  for (std::size_t i = 0; i < count; i += kAtOnce) {
    const std::size_t length = std::min(kAtOnce, count - i);
    encode(format, values + i, encoded, length, residual == nullptr ? nullptr : residual + i, unit);
    decode(format, encoded, values + i, length);
  }
}

}  // namespace cohort::comm
#endif
