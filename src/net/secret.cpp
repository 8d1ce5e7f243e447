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
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

namespace cohort::net {
namespace {

constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
constexpr std::size_t kDigits = 2 * Secret::kBytes;
// Prefix of a variable that holds the digits instead of a file, for orchestrators that pass secrets in variables.
constexpr std::string_view kVariable = "env:";

int digit_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// True if `text` looks like a variable's name, and not like a secret (which is longer, or digits).
bool names_a_variable(std::string_view text) {
  const auto of_name = [](char c) { return (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; };
  const auto is_digit = [](char c) { return digit_value(c) >= 0; };
  return !text.empty() && text.size() <= 40 && text[0] > '9' && std::all_of(text.begin(), text.end(), of_name) &&
         !std::all_of(text.begin(), text.end(), is_digit);
}

// Copies word by word. A vector register would hold the whole secret, and code that saves registers (a signal, the
// dynamic linker when it looks up a function) would leave it on the stack.
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
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);  // programs started by this process do not need it
  return secret;
}

Result<Secret> Secret::from_file(const std::string& path) {
  const bool of_variable = path.starts_with(kVariable);
  const std::string name = of_variable ? path.substr(kVariable.size()) : "";
  if ((of_variable && !names_a_variable(name)) || from_digits(path)) {  // may be a secret, and errors are logged
    return fail(ErrorCode::InvalidArgument,
                "the job's secret: {} -- COHORT_SECRET_FILE=env:NAME takes what the variable NAME holds; what is there "
                "now is not shown, as it may be a secret",
                of_variable ? "env: wants a variable's name (A-Z, 0-9, _; at most 40)"
                            : "a file is wanted, not the secret itself");
  }
  if (of_variable) {
    const char* const value = std::getenv(name.c_str());
    std::string_view text = value == nullptr ? "" : value;
    while (text.ends_with('\n')) text.remove_suffix(1);
    if (auto secret = from_digits(text)) return *std::move(secret);
    return fail(ErrorCode::Unavailable, "secret {}: the variable {} {} -- `openssl rand -hex 32` makes such a secret",
                path, name, value == nullptr ? "is not set" : "does not hold 64 hexadecimal digits");
  }
  // O_NONBLOCK, so that a FIFO at this path cannot block.
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
  if (path.starts_with(kVariable)) {
    return fail(ErrorCode::InvalidArgument,
                "a secret's file cannot begin with env:, which stands for a variable that holds the secret -- `export "
                "NAME=$(openssl rand -hex 32)` sets one");
  }
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

/// Returns GCM's first counter block of a frame; the nonce is the frame's number.
FrameMac::Tag first_counter(std::uint64_t frame) noexcept {
  FrameMac::Tag block{};
  for (std::size_t i = 0; i < sizeof frame; ++i) block[i] = static_cast<std::byte>(frame >> (8 * i));
  block.back() = std::byte{1};
  return block;
}

/// Encrypts each block independently, in place.
void encrypt_blocks(EVP_CIPHER_CTX* context, std::span<FrameMac::Tag> blocks) {
  auto* const bytes = reinterpret_cast<unsigned char*>(blocks.data());
  int length = 0;
  require(::EVP_EncryptUpdate(context, bytes, &length, bytes, static_cast<int>(blocks.size_bytes())));
}

}  // namespace

void FrameMac::Free::operator()(evp_cipher_ctx_st* context) const noexcept { ::EVP_CIPHER_CTX_free(context); }

FrameMac::FrameMac(const Key& key, bool own_hash) : context_(::EVP_CIPHER_CTX_new()) {
  require(context_ != nullptr &&
          ::EVP_EncryptInit_ex(context_.get(), own_hash ? ::EVP_aes_128_ecb() : ::EVP_aes_128_gcm(), nullptr,
                               key.data(), nullptr) == 1);
  if (!own_hash) return;
  Tag hash_key{};
  encrypt_blocks(context_.get(), {&hash_key, 1});
  hash_ = std::make_unique<Ghash>(hash_key);
  ::OPENSSL_cleanse(hash_key.data(), hash_key.size());
}

void FrameMac::begin() {
  ++frames_;
  if (hash_) {
    if (frames_ % kPads == 1) make_pads();
    return hash_->begin();
  }
  const Tag first = first_counter(frames_);
  require(::EVP_EncryptInit_ex(context_.get(), nullptr, nullptr, nullptr,
                               reinterpret_cast<const unsigned char*>(first.data())));
}

/// Makes the pads of this frame and the next ones in one call, since a call costs more than encrypting a block.
void FrameMac::make_pads() {
  for (std::uint64_t i = 0; i < kPads; ++i) pads_[i] = first_counter(frames_ + i);
  encrypt_blocks(context_.get(), pads_);
}

void FrameMac::add(const void* data, std::size_t bytes) {
  if (hash_) return hash_->add(data, bytes);
  const auto* from = static_cast<const unsigned char*>(data);
  while (bytes > 0) {
    const std::size_t step = std::min(bytes, kMostAtOnce);
    int length = 0;
    // All bytes are authenticated, not encrypted.
    require(::EVP_EncryptUpdate(context_.get(), nullptr, &length, from, static_cast<int>(step)));
    from += step;
    bytes -= step;
  }
}

FrameMac::Tag FrameMac::finish() {
  Tag tag{};
  if (hash_) {
    tag = hash_->finish();
    const Tag& pad = pads_[(frames_ - 1) % kPads];
    for (std::size_t i = 0; i < tag.size(); ++i) tag[i] ^= pad[i];
    return tag;
  }
  int length = 0;
  require(::EVP_EncryptFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(tag.data()), &length));
  require(::EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_GET_TAG, static_cast<int>(tag.size()), tag.data()));
  return tag;
}

bool FrameMac::same(const Tag& a, const Tag& b) noexcept { return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

}  // namespace cohort::net
