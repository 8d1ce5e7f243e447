#include "net/tls_stream.h"

#include "net/tls_end.h"

#include <openssl/bio.h>
#include <openssl/err.h>

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace cohort::net {
namespace {

// RFC 8446, 5.5: at most 2^24.5 full records, 388 GiB, are safe under one key of AES-GCM; OpenSSL does not change it by
// itself.
constexpr std::uint64_t kMostUnderKey = std::uint64_t{1} << 37;

// OpenSSL's own BIO of sockets raises SIGPIPE.
int descriptor(BIO* bio) { return static_cast<int>(reinterpret_cast<std::intptr_t>(::BIO_get_data(bio))); }

int send_some(BIO* bio, const char* bytes, int count) {
  ::BIO_clear_retry_flags(bio);
  ssize_t sent = 0;
  do {
    sent = ::send(descriptor(bio), bytes, static_cast<std::size_t>(count), MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0 && errno == EAGAIN) BIO_set_retry_write(bio);
  return static_cast<int>(sent);
}

int receive_some(BIO* bio, char* to, int room) {
  ::BIO_clear_retry_flags(bio);
  ssize_t got = 0;
  do {
    got = ::recv(descriptor(bio), to, static_cast<std::size_t>(room), 0);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EAGAIN) BIO_set_retry_read(bio);
  if (got == 0) ::BIO_set_flags(bio, BIO_FLAGS_IN_EOF);
  return static_cast<int>(got);
}

long control(BIO* bio, int what, long, void*) {
  if (what == BIO_CTRL_FLUSH) return 1;
  if (what == BIO_CTRL_EOF) return ::BIO_test_flags(bio, BIO_FLAGS_IN_EOF) != 0 ? 1 : 0;
  return 0;
}

int begin(BIO* bio) {
  ::BIO_set_init(bio, 1);
  return 1;
}

const BIO_METHOD* socket_method() {
  static const BIO_METHOD* const method = [] {
    BIO_METHOD* const made = ::BIO_meth_new(::BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket without signals");
    if (made == nullptr) return made;
    ::BIO_meth_set_write(made, send_some);
    ::BIO_meth_set_read(made, receive_some);
    ::BIO_meth_set_ctrl(made, control);
    ::BIO_meth_set_create(made, begin);
    return made;
  }();
  return method;
}

/// As after send and recv: the caller may look at errno.
tl::unexpected<Error> lost(int error) {
  auto failure = fail(ErrorCode::PeerLost, "{}", errno_text(error));
  errno = error;
  return failure;
}

}  // namespace

TlsStream::TlsStream(std::unique_ptr<TlsEnd> end) : end_(std::move(end)) {}
TlsStream::~TlsStream() = default;

Result<std::unique_ptr<TlsStream>> TlsStream::make(std::unique_ptr<TlsEnd> end, int fd) {
  BIO* const bio = socket_method() != nullptr ? ::BIO_new(socket_method()) : nullptr;
  if (bio == nullptr) return openssl_error("BIO_new");
  ::BIO_set_data(bio, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)));
  SSL* const ssl = end->ssl();
  ::SSL_set_bio(ssl, bio, bio);
  SSL_clear_mode(ssl, SSL_MODE_RELEASE_BUFFERS);
  ::SSL_set_mode(ssl, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_set_read_ahead(ssl, 1);  // records are fetched many at a time
  ::SSL_set_default_read_buffer_len(ssl, std::size_t{128} << 10);
  return std::unique_ptr<TlsStream>(new TlsStream(std::move(end)));
}

Result<std::size_t> TlsStream::write(std::span<const std::byte> bytes) {
  if (bytes.empty()) return 0;
  ::ERR_clear_error();
  std::size_t taken = 0;
  if (::SSL_write_ex(end_->ssl(), bytes.data(), bytes.size(), &taken) == 1) {
    under_key_ += taken;
    // It fails while a record is half sent; then the next one tries.
    if (under_key_ >= kMostUnderKey && ::SSL_key_update(end_->ssl(), SSL_KEY_UPDATE_NOT_REQUESTED) == 1) under_key_ = 0;
    return taken;
  }
  const int saved = errno;
  switch (::SSL_get_error(end_->ssl(), 0)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE: return 0;
    case SSL_ERROR_SYSCALL: return lost(saved);
    default: return fail(ErrorCode::Corrupt, "encrypted data: {}", openssl_text());
  }
}

Result<std::optional<std::size_t>> TlsStream::read(std::span<std::byte> to) {
  ::ERR_clear_error();
  std::size_t got = 0;
  errno = 0;
  if (::SSL_read_ex(end_->ssl(), to.data(), to.size(), &got) == 1) return std::optional(got);
  const int saved = errno;
  switch (::SSL_get_error(end_->ssl(), 0)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE: return std::optional<std::size_t>();
    case SSL_ERROR_ZERO_RETURN: return std::optional<std::size_t>(0);
    case SSL_ERROR_SYSCALL:
      if (saved == 0) return std::optional<std::size_t>(0);
      return lost(saved);
    default: {
      const unsigned long code = ::ERR_peek_last_error();
      // A peer that has gone says no good-bye.
      if (ERR_GET_REASON(code) == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
        ::ERR_clear_error();
        return std::optional<std::size_t>(0);
      }
      return fail(ErrorCode::Corrupt, "encrypted data: {}", openssl_text());
    }
  }
}

bool TlsStream::holds_bytes() const noexcept { return ::SSL_has_pending(end_->ssl()) == 1; }

}  // namespace cohort::net
