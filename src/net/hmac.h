// HMAC-SHA256 (RFC 2104), for proofs of a shared secret. Pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace cohort::net {

using Mac = std::array<std::uint8_t, 32>;

Mac hmac_sha256(std::span<const std::uint8_t> key, std::string_view bytes);

/// In constant time.
bool same(const Mac& a, const Mac& b) noexcept;

}  // namespace cohort::net
