// Helpers for tests of transports: record reported events, and make frames to send and receive. Plain values.
#pragma once

#include "comm/transport/transport.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::transport::testing {

struct Heard final : TransportEvents {
  void on_message(int peer, std::uint32_t tag, std::string_view bytes) override {
    messages.push_back(fmt::format("{}:{}:{}", peer, tag, bytes));
  }
  void on_ended(int peer, std::string_view bytes) override { ended.push_back(fmt::format("{}:{}", peer, bytes)); }
  void on_broken(int peer, std::string_view why) override { broken.push_back(fmt::format("{}:{}", peer, why)); }
  std::vector<std::string> messages, ended, broken;
};

inline std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::byte>((i * 2654435761U + 97UL * seed) >> 7);
  return values;
}

inline void fill(Outgoing& frame, int peer, std::uint32_t tag, const std::vector<std::byte>& data) {
  frame.peer = peer;
  frame.operation = 5;
  frame.tag = tag;
  frame.data = data.data();
  frame.bytes = data.size();
}

inline void fill(Incoming& frame, int peer, std::uint32_t tag, std::vector<std::byte>& data) {
  frame.peer = peer;
  frame.operation = 5;
  frame.tag = tag;
  frame.to = data.data();
  frame.room = data.size();
}

}  // namespace cohort::transport::testing
