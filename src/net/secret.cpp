#include "net/secret.h"

#include "base/files.h"
#include "base/memory.h"
#include "base/result.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace cohort::net {
namespace {

constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
constexpr std::size_t kDigits = 2 * Secret::kBytes;

int digit_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// In words, each by itself: in vector registers it would be whole, and whoever saves those (a signal, the dynamic
// linker when it looks up a function) would leave it on the stack.
void copy_hidden(std::uint8_t* to, const std::uint8_t* from) noexcept {
  for (std::size_t at = 0; at < Secret::kBytes; at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, from + at, sizeof word);
    std::memcpy(to + at, &word, sizeof word);
    __asm__ volatile("" ::: "memory");
  }
}

}  // namespace

Result<Secret> Secret::generate() {
  Secret secret;
  std::size_t have = 0;
  while (have < kBytes) {
    const ssize_t n = ::getrandom(secret.bytes_ + have, kBytes - have, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail(ErrorCode::Io, "cannot make a secret: getrandom: {}", errno_text(errno));
    have += static_cast<std::size_t>(n);
  }
  return secret;
}

Secret Secret::from_bytes(std::span<const std::uint8_t, kBytes> bytes) {
  Secret secret;
  copy_hidden(secret.bytes_, bytes.data());
  return secret;
}

std::optional<Secret> Secret::from_digits(std::string_view digits) {
  if (digits.size() != kDigits) return std::nullopt;
  Secret secret;
  for (std::size_t i = 0; i < kBytes; ++i) {
    const int high = digit_value(digits[2 * i]);
    const int low = digit_value(digits[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    secret.bytes_[i] = static_cast<std::uint8_t>(high * 16 + low);
  }
  return secret;
}

void Secret::append_digits(std::string& to) const {
  constexpr char kHex[] = "0123456789abcdef";
  for (const std::uint8_t byte : bytes()) {
    to += kHex[byte >> 4];
    to += kHex[byte & 15];
  }
}

Result<Secret> Secret::from_sealed_memfd(int fd) {
  constexpr std::string_view kHint =
      "was this process started through a program that closes inherited descriptors (torchrun, Python's subprocess "
      "with close_fds=True, sudo)? Start it by `cohort run` directly, pass the descriptor on (pass_fds), or give the "
      "secret in a file by COHORT_SECRET_FILE";
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    if (errno == EBADF)
      return fail(ErrorCode::Unavailable, "the job's secret: descriptor {} is not open -- {}", fd, kHint);
    return fail(ErrorCode::Unavailable, "the job's secret: descriptor {} is not a memory file: {} -- {}", fd,
                errno_text(errno), kHint);
  }
  struct stat status {};
  if (::fstat(fd, &status) != 0) {
    return fail(ErrorCode::Io, "the job's secret: fstat of descriptor {}: {}", fd, errno_text(errno));
  }
  if ((seals & kSeals) != kSeals || status.st_size != static_cast<off_t>(kBytes)) {
    return fail(
        ErrorCode::Unavailable,
        "the job's secret: descriptor {} is another file ({} bytes, seals {:#x}; expected {} bytes, seals {:#x}) -- {}",
        fd, status.st_size, seals, kBytes, kSeals, kHint);
  }
  Secret secret;
  const ssize_t n = ::pread(fd, secret.bytes_, kBytes, 0);
  if (n != static_cast<ssize_t>(kBytes)) {
    return fail(ErrorCode::Io, "the job's secret: reading descriptor {}: {}", fd,
                n < 0 ? errno_text(errno) : "short read");
  }
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);  // what this process starts has no use for it
  return secret;
}

Result<Secret> Secret::from_file(const std::string& path) {
  // NONBLOCK so that a FIFO in its place cannot hold us up.
  const sys::UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) {
    return fail(ErrorCode::Unavailable, "secret file {}: {} -- make one with `cohort secret {}`", path,
                errno_text(errno), path);
  }
  struct stat status {};
  if (::fstat(file.get(), &status) != 0)
    return fail(ErrorCode::Io, "secret file {}: fstat: {}", path, errno_text(errno));
  if (!S_ISREG(status.st_mode)) return fail(ErrorCode::InvalidArgument, "secret file {} is not a regular file", path);
  if (status.st_uid != ::geteuid()) {
    return fail(ErrorCode::InvalidArgument,
                "secret file {} belongs to uid {}, and this process runs as uid {} -- use a file of your own: `cohort "
                "secret FILE`",
                path, status.st_uid, ::geteuid());
  }
  if ((status.st_mode & 077) != 0) {
    return fail(
        ErrorCode::InvalidArgument,
        "secret file {} has mode {:04o}: others may read or change it -- `chmod 600 {}`, and make a new secret if "
        "somebody may have read this one",
        path, status.st_mode & 07777, path);
  }
  std::array<char, kDigits + 3> text{};
  const ssize_t n = ::read(file.get(), text.data(), text.size());
  if (n < 0) return fail(ErrorCode::Io, "secret file {}: {}", path, errno_text(errno));
  std::size_t size = static_cast<std::size_t>(n);
  while (size > 0 && (text[size - 1] == '\n' || text[size - 1] == '\r')) --size;
  auto secret = from_digits({text.data(), size});
  ::OPENSSL_cleanse(text.data(), text.size());
  if (!secret) {
    return fail(ErrorCode::Corrupt,
                "secret file {} does not hold 64 hexadecimal digits -- make one with `cohort secret FILE`", path);
  }
  return *secret;
}

Result<sys::UniqueFd> Secret::to_sealed_memfd() const {
  sys::UniqueFd file(::memfd_create("cohort-secret", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) return fail(ErrorCode::Unavailable, "cannot hand the secret on: memfd_create: {}", errno_text(errno));
  if (!sys::write_all(file.get(), {reinterpret_cast<const char*>(bytes_), kBytes})) {
    return fail(ErrorCode::Io, "cannot hand the secret on: writing a memory file: {}", errno_text(errno));
  }
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) {
    return fail(ErrorCode::Io, "cannot hand the secret on: sealing a memory file: {}", errno_text(errno));
  }
  return file;
}

bool Secret::operator==(const Secret& other) const noexcept {
  return ::CRYPTO_memcmp(bytes_, other.bytes_, kBytes) == 0;
}

Secret::Secret() : bytes_(static_cast<std::uint8_t*>(sys::take_hidden_memory())) {
  static_assert(kBytes <= sys::kHiddenBytes);
}
Secret::Secret(const Secret& other) : Secret() { copy_hidden(bytes_, other.bytes_); }
Secret& Secret::operator=(const Secret& other) noexcept {
  copy_hidden(bytes_, other.bytes_);
  return *this;
}
Secret::~Secret() { sys::give_hidden_memory(bytes_); }

void wipe(std::string& text) noexcept {
  ::OPENSSL_cleanse(text.data(), text.size());
  text.clear();
}

Result<void> write_new_secret_file(const std::string& path) {
  const auto secret = Secret::generate();
  if (!secret) return tl::unexpected(secret.error());
  std::string text;
  text.reserve(kDigits + 1);
  secret->append_digits(text);
  text += '\n';
  const sys::UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) {
    const bool exists = errno == EEXIST;
    return fail(exists ? ErrorCode::Unavailable : ErrorCode::Io, "cannot write a secret to {}: {}{}", path,
                errno_text(errno),
                exists ? " -- secrets are never overwritten: remove it first or choose another name" : "");
  }
  const bool written = sys::write_all(file.get(), text) && ::fsync(file.get()) == 0;
  const int error_number = errno;
  wipe(text);
  if (!written) {
    ::unlink(path.c_str());
    return fail(ErrorCode::Io, "cannot write a secret to {}: {}", path, errno_text(error_number));
  }
  return {};
}

std::string sha256_hex(std::string_view bytes) {
  std::array<unsigned char, 32> digest{};
  unsigned int size = 0;
  if (::EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, ::EVP_sha256(), nullptr) != 1) {
    raise(ErrorCode::Internal, "SHA-256 is not available in this OpenSSL");
  }
  std::string text;
  for (const unsigned char byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

Mac hmac_sha256(std::span<const std::uint8_t> key, std::string_view bytes) {
  Mac mac{};
  unsigned int size = 0;
  if (::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()),
             reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), mac.data(), &size) == nullptr) {
    raise(ErrorCode::Internal, "HMAC-SHA256 is not available in this OpenSSL");
  }
  return mac;
}

bool same(const Mac& a, const Mac& b) noexcept { return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

namespace {

constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;  // OpenSSL counts in int

void require(int success) {
  if (success != 1) raise(ErrorCode::Internal, "OpenSSL's AES-128-GCM failed -- is this OpenSSL built without it?");
}

}  // namespace

void FrameMac::Free::operator()(evp_cipher_ctx_st* context) const noexcept { ::EVP_CIPHER_CTX_free(context); }

FrameMac::FrameMac(const Key& key) : context_(::EVP_CIPHER_CTX_new()) {
  require(context_ != nullptr &&
          ::EVP_EncryptInit_ex(context_.get(), ::EVP_aes_128_gcm(), nullptr, key.data(), nullptr) == 1);
}

void FrameMac::begin() {
  std::array<std::uint8_t, 12> nonce{};
  ++frames_;
  for (std::size_t i = 0; i < sizeof frames_; ++i) nonce[i] = static_cast<std::uint8_t>(frames_ >> (8 * i));
  require(::EVP_EncryptInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data()));
}

void FrameMac::add(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  while (bytes > 0) {
    const std::size_t step = std::min(bytes, kMostAtOnce);
    int length = 0;
    // What is authenticated and not encrypted: all of it.
    require(::EVP_EncryptUpdate(context_.get(), nullptr, &length, from, static_cast<int>(step)));
    from += step;
    bytes -= step;
  }
}

FrameMac::Tag FrameMac::finish() {
  Tag tag{};
  int length = 0;
  require(::EVP_EncryptFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(tag.data()), &length));
  require(::EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_GET_TAG, static_cast<int>(tag.size()), tag.data()));
  return tag;
}

bool FrameMac::same(const Tag& a, const Tag& b) noexcept { return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

}  // namespace cohort::net
