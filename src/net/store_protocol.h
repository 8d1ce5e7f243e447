// What a store's client and server say to each other: the bodies of calls (net/rpc.h), whose methods are operations.
// Pure functions; bytes from outside are checked in full before anything is done with them.
#pragma once

#include "base/result.h"
#include "net/store.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::store {

inline constexpr std::uint32_t kProtocolVersion = 1;
/// Two values and some keys; a list of keys that is longer is refused.
inline constexpr std::size_t kLongestMessage = 2 * kLongestValue + (std::size_t{1} << 20);

enum class Op : std::uint8_t {
  Hello,          ///< amount = protocol version, value = meeting
  Set,            ///< keys[0], value
  TryGet,         ///< keys[0]
  Wait,           ///< keys, timeout; replies with the value if there is one key
  GetAny,         ///< keys, timeout; replies with index and value
  Add,            ///< keys[0], amount
  CompareAndSet,  ///< keys[0], expected, value
  Delete,         ///< keys[0]; number 1 if it existed
  LeaveWill,      ///< keys[0], value
  WithdrawWill,   ///< keys[0]
  GoodBye,        ///< no reply; wills do not take effect
};
inline constexpr std::uint8_t kOpCount = 11;

struct Request {
  Op op = Op::Hello;  ///< the call's method
  std::vector<std::string> keys;
  std::string value;
  std::optional<std::string> expected;
  std::int64_t amount = 0;
  std::uint64_t timeout_ms = 0;
};

struct Reply {
  std::optional<Error> error;  ///< then nothing below has a meaning, but `keys` with Timeout
  std::int64_t number = 0;
  std::optional<std::string> value;
  std::vector<std::string> keys;  ///< with Timeout: those that are missing
};

std::string encode(const Request& request);
std::string encode(const Reply& reply);
/// Corrupt if the bytes are not exactly one request whose parts are within the limits of stores.
Result<Request> decode_request(std::uint8_t method, std::string_view bytes);
Result<Reply> decode_reply(std::string_view bytes);

}  // namespace cohort::store
