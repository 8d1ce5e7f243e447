// The ranks' inputs and the expected results: small whole numbers that depend on rank and place, so that every sum is
// exact in every type and a part at the wrong place shows. Pure functions.
#pragma once

#include "peer_task.h"

#include <bit>
#include <cstring>
#include <vector>

namespace peers {

/// Values repeat after so many elements: a prime, so that parts never begin alike.
inline constexpr std::size_t kPeriod = 251;

inline int value_of(int rank, std::size_t index) {
  const std::uint32_t mixed = (static_cast<std::uint32_t>(index % kPeriod) + 1) * 2654435761U ^
                              (static_cast<std::uint32_t>(rank) + 7) * 2246822519U;
  return 1 + static_cast<int>((mixed >> 15) % 5);
}

/// Bits of a whole number from 0 to 255 in `type`.
inline std::uint64_t bits_of(int value, Type type) {
  if (type == Type::Int64) return static_cast<std::uint64_t>(value);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
  if (type == Type::Float32) return bits;
  if (type == Type::BFloat16) return bits >> 16;
  if (value == 0) return 0;
  const std::uint32_t exponent = (bits >> 23) - 127 + 15;
  return exponent << 10 | ((bits >> 13) & 0x3FF);
}

/// A rank's input elements, one period of them.
struct Pattern {
  std::vector<std::uint64_t> bits = std::vector<std::uint64_t>(kPeriod);
};

inline Pattern pattern_of(int rank, Type type) {
  Pattern pattern;
  for (std::size_t i = 0; i < kPeriod; ++i) pattern.bits[i] = bits_of(value_of(rank, i), type);
  return pattern;
}

inline Pattern sum_pattern(int ranks, Type type) {
  Pattern pattern;
  for (std::size_t i = 0; i < kPeriod; ++i) {
    int sum = 0;
    for (int rank = 0; rank < ranks; ++rank) sum += value_of(rank, i);
    pattern.bits[i] = bits_of(sum, type);
  }
  return pattern;
}

/// Calls `use` with a zero of the unsigned integer that is as wide as `type`.
template <class Use>
auto with_word(Type type, Use use) {
  if (type == Type::Int64) return use(std::uint64_t{});
  return type == Type::Float32 ? use(std::uint32_t{}) : use(std::uint16_t{});
}

/// Element i becomes the pattern's element i.
inline void fill(void* data, std::size_t count, Type type, const Pattern& pattern) {
  with_word(type, [&](auto zero) {
    std::size_t place = 0;
    for (std::size_t i = 0; i < count; ++i) {
      static_cast<decltype(zero)*>(data)[i] = static_cast<decltype(zero)>(pattern.bits[place]);
      if (++place == kPeriod) place = 0;
    }
  });
}

/// Number of `count` elements that differ from the pattern from `first` on.
inline std::size_t count_wrong(const void* data, std::size_t count, Type type, const Pattern& pattern,
                               std::size_t first = 0) {
  return with_word(type, [&](auto zero) {
    std::size_t wrong = 0;
    std::size_t place = first % kPeriod;
    for (std::size_t i = 0; i < count; ++i) {
      wrong += static_cast<const decltype(zero)*>(data)[i] != pattern.bits[place] ? 1U : 0U;
      if (++place == kPeriod) place = 0;
    }
    return wrong;
  });
}

/// Number of elements of rank `rank`'s output that the collective has not delivered rightly; `count` as count_of says.
inline std::size_t wrong_elements(const Task& task, int rank, int ranks, const void* output, std::size_t count) {
  const Type type = task.type;
  const auto size = static_cast<std::size_t>(ranks);
  const auto own = static_cast<std::size_t>(rank);
  const auto parts = [&](std::size_t first) {
    std::size_t wrong = 0;
    for (std::size_t part = 0; part < size; ++part) {
      const char* const data = static_cast<const char*>(output) + part * count * size_of(type);
      wrong += count_wrong(data, count, type, pattern_of(static_cast<int>(part), type), first);
    }
    return wrong;
  };
  switch (task.collective) {
    case Collective::AllReduce: return count_wrong(output, count, type, sum_pattern(ranks, type));
    case Collective::Reduce: return rank != 0 ? 0 : count_wrong(output, count, type, sum_pattern(ranks, type));
    case Collective::Broadcast: return count_wrong(output, count, type, pattern_of(0, type));
    case Collective::AllGather: return parts(0);
    case Collective::Gather: return rank != 0 ? 0 : parts(0);
    case Collective::Scatter: return count_wrong(output, count, type, pattern_of(0, type), own * count);
    case Collective::ReduceScatter: return count_wrong(output, count, type, sum_pattern(ranks, type), own * count);
    case Collective::AllToAll: return parts(own * count);
    case Collective::SendRecv: return rank > 1 ? 0 : count_wrong(output, count, type, pattern_of(0, type));
    case Collective::Barrier: return 0;
  }
  return 0;
}

}  // namespace peers
