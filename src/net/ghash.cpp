#include "net/ghash.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cohort::net {

#if defined(__x86_64__)
namespace {

#define COHORT_WIDE __attribute__((target("avx512f,avx512bw,vpclmulqdq"), always_inline)) inline

// If the bytes of each block are reversed and the key is multiplied by x, GCM's products equal those of POLYVAL (RFC
// 8452, appendix A): dot(a, b) = a b x^-128 modulo x^128 + x^127 + x^126 + x^121 + 1, bits in their usual order.
constexpr long long kPolynomial = static_cast<long long>(0xC200000000000000);  // upper half, without x^128

// Intrinsics are used in their masked form, with a mask of ones: GCC 12 warns about the forms without a mask.
constexpr __mmask16 kAll = 0xFFFF;

struct Product {
  __m512i low, middle, high;
};

COHORT_WIDE __m512i reversed(__m512i blocks) {
  return _mm512_shuffle_epi8(blocks, _mm512_set4_epi32(0x00010203, 0x04050607, 0x08090A0B, 0x0C0D0E0F));
}

COHORT_WIDE void add_product(Product& sum, __m512i a, __m512i b) {
  constexpr int kXorOfThree = 0x96;
  sum.low = _mm512_xor_si512(sum.low, _mm512_clmulepi64_epi128(a, b, 0x00));
  sum.high = _mm512_xor_si512(sum.high, _mm512_clmulepi64_epi128(a, b, 0x11));
  sum.middle = _mm512_ternarylogic_epi64(sum.middle, _mm512_clmulepi64_epi128(a, b, 0x01),
                                         _mm512_clmulepi64_epi128(a, b, 0x10), kXorOfThree);
}

/// Swaps the halves of each block.
COHORT_WIDE __m512i swapped(__m512i blocks) { return _mm512_maskz_shuffle_epi32(kAll, blocks, _MM_PERM_BADC); }

/// Montgomery reduction of each of the four blocks.
COHORT_WIDE __m512i reduced(const Product& product) {
  const __m512i polynomial = _mm512_set1_epi64(kPolynomial);
  const __m512i low = _mm512_xor_si512(product.low, _mm512_bslli_epi128(product.middle, 8));
  const __m512i high = _mm512_xor_si512(product.high, _mm512_bsrli_epi128(product.middle, 8));
  const __m512i once = _mm512_xor_si512(swapped(low), _mm512_clmulepi64_epi128(low, polynomial, 0x00));
  const __m512i twice = _mm512_xor_si512(swapped(once), _mm512_clmulepi64_epi128(once, polynomial, 0x00));
  return _mm512_xor_si512(twice, high);
}

COHORT_WIDE __m512i dot(__m512i a, __m512i b) {
  Product product{};
  add_product(product, a, b);
  return reduced(product);
}

COHORT_WIDE __m512i load(const void* at) { return _mm512_loadu_si512(at); }

COHORT_WIDE __m128i first_of(__m512i blocks) { return _mm512_maskz_extracti32x4_epi32(0xF, blocks, 0); }
COHORT_WIDE __m512i alone(const Ghash::Block& block) {
  return _mm512_zextsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block.data())));
}
COHORT_WIDE void store(__m128i block, void* to) { _mm_storeu_si128(static_cast<__m128i*>(to), block); }

/// Returns the sum of the four blocks.
COHORT_WIDE __m128i total(__m512i blocks) {
  const __m512i two =
      _mm512_xor_si512(blocks, _mm512_maskz_shuffle_i32x4(kAll, blocks, blocks, _MM_SHUFFLE(1, 0, 3, 2)));
  const __m512i one = _mm512_xor_si512(two, _mm512_maskz_shuffle_i32x4(kAll, two, two, _MM_SHUFFLE(2, 3, 0, 1)));
  return first_of(one);
}

}  // namespace

bool Ghash::available() noexcept {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("vpclmulqdq");
}

/// Computes the key's powers.
__attribute__((target("avx512f,avx512bw,vpclmulqdq"))) void Ghash::prepare(const Block& key) noexcept {
  std::array<std::uint64_t, 2> halves{};
  store(first_of(reversed(alone(key))), halves.data());
  const std::uint64_t carry = 0 - (halves[1] >> 63);
  halves = {(halves[0] << 1) ^ (carry & 1),
            (halves[1] << 1 | halves[0] >> 63) ^ (carry & static_cast<std::uint64_t>(kPolynomial))};
  const __m512i first =
      _mm512_maskz_broadcast_i32x4(kAll, _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves.data())));
  __m512i power = first;
  for (std::size_t i = 1; i <= 4 * kVectors; ++i) {
    if (i <= 4) store(first_of(power), secrets_.last.blocks[4 - i].data());
    if (i % 4 == 0) _mm512_storeu_si512(&secrets_.strides[i / 4 - 1], power);
    power = dot(power, first);
  }
  ::OPENSSL_cleanse(halves.data(), sizeof halves);
}

/// Computes four sums in parallel, each over every fourth block, then multiplies each by the power of the key that
/// belongs to its last block, and adds them.
__attribute__((target("avx512f,avx512bw,vpclmulqdq"))) void Ghash::absorb(const std::byte* blocks,
                                                                          std::size_t count) noexcept {
  if (count == 0) return;
  const std::size_t lead = (count - 1) % 4 + 1;
  const auto words = static_cast<__mmask8>(0xFF << (8 - 2 * lead));
  __m512i sums = _mm512_xor_si512(reversed(_mm512_maskz_expandloadu_epi64(words, blocks)),
                                  _mm512_maskz_expand_epi64(words, alone(secrets_.sum)));
  blocks += lead * sizeof(Block);
  for (std::size_t vectors = (count - lead) / 4; vectors > 0;) {
    std::size_t left = std::min(kVectors, vectors);
    vectors -= left;
    Product product{};
    add_product(product, sums, load(&secrets_.strides[left - 1]));
    while (--left > 0) {
      add_product(product, reversed(load(blocks)), load(&secrets_.strides[left - 1]));
      blocks += sizeof(Vector);
    }
    sums = _mm512_xor_si512(reduced(product), reversed(load(blocks)));
    blocks += sizeof(Vector);
  }
  sums = dot(sums, load(secrets_.last.blocks.data()));
  store(total(sums), secrets_.sum.data());
}

__attribute__((target("avx512f,avx512bw,vpclmulqdq"))) Ghash::Block Ghash::finish() noexcept {
  std::array<Block, 2> end{};
  std::memcpy(end[0].data(), secrets_.held.data(), held_);
  for (std::size_t i = 0; i < sizeof total_; ++i) end[1][i] = static_cast<std::byte>(total_ * 8 >> (56 - 8 * i));
  if (held_ > 0) {
    absorb(end[0].data(), 2);
  } else {
    absorb(end[1].data(), 1);
  }
  Block hash;
  store(first_of(reversed(alone(secrets_.sum))), hash.data());
  return hash;
}

#undef COHORT_WIDE
#else

bool Ghash::available() noexcept { return false; }
void Ghash::prepare(const Block&) noexcept {}
void Ghash::absorb(const std::byte*, std::size_t) noexcept {}
Ghash::Block Ghash::finish() noexcept { return {}; }

#endif

Ghash::Ghash(const Block& key) noexcept { prepare(key); }
Ghash::~Ghash() { ::OPENSSL_cleanse(&secrets_, sizeof secrets_); }

void Ghash::begin() noexcept {
  secrets_.sum = {};
  held_ = 0;
  total_ = 0;
}

void Ghash::add(const void* data, std::size_t bytes) noexcept {
  const auto* from = static_cast<const std::byte*>(data);
  total_ += bytes;
  if (held_ > 0) {
    const std::size_t step = std::min(sizeof(Block) - held_, bytes);
    std::memcpy(secrets_.held.data() + held_, from, step);
    held_ += step;
    if (held_ < sizeof(Block)) return;
    absorb(secrets_.held.data(), 1);
    from += step;
    bytes -= step;
  }
  absorb(from, bytes / sizeof(Block));
  held_ = bytes % sizeof(Block);
  if (held_ > 0) std::memcpy(secrets_.held.data(), from + (bytes - held_), held_);
}

}  // namespace cohort::net
