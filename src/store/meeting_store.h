// What a meeting of processes needs beyond `Store`: to wait for the first of several keys, and to learn that another
// process has died. Implemented by the stores that connect processes (TCP or Unix socket, file).
#pragma once

#include "store/store.h"

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace cohort::store {

/// Limits of all stores; longer ones are refused with InvalidArgument.
inline constexpr std::size_t kLongestKey = 4096;
inline constexpr std::size_t kLongestValue = std::size_t{64} << 20;
inline constexpr std::size_t kMostKeys = 65536;  ///< in one call of wait

class MeetingStore : public Store {
 public:
  struct Found {
    std::size_t index = 0;
    std::string value;
  };
  /// Waits until one of the keys exists; the first of the list that does. Throws Timeout, naming them.
  virtual Found get_any(std::span<const std::string> keys, Deadline deadline) = 0;
  /// If this process dies (or drops the store) while the will stands, `key` is set to `value` unless it exists.
  /// One will per key and process; a second one replaces the first.
  virtual void leave_will(std::string_view key, std::string_view value) = 0;
  virtual void withdraw_will(std::string_view key) = 0;
};

}  // namespace cohort::store
