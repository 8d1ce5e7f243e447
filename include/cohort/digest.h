// 128 bits that show whether ranks hold the same bytes. Poly1305 (Bernstein 2005, RFC 8439; OpenSSL's code) with a key
// drawn at random: two different contents of up to 2^40 bytes have the same digest with a probability below 2^-66, a
// proven bound for any contents that do not depend on the key (8 * (bytes / 16) / 2^106). Gives no protection against
// an attacker who knows the key. Pure functions; any thread may call.
#pragma once

#include <cohort/buffer.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace cohort {

using DigestKey = std::array<std::uint8_t, 32>;
using Digest = std::array<std::uint64_t, 2>;

/// Makes a key by the operating system's generator.
DigestKey make_digest_key();

/// Digests the bytes as they lie in memory. Throws Internal if OpenSSL has no Poly1305.
Digest digest_of(ConstBuffer data, const DigestKey& key);

}  // namespace cohort
