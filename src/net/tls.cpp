#include "net/tls.h"

#include "net/hmac.h"
#include "net/tls_end.h"
#include "net/tls_stream.h"

#include <fmt/ranges.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>

namespace cohort::net {

struct TlsSession::Impl {
  std::unique_ptr<TlsEnd> end;
  SSL* ssl = nullptr;
  BIO* input = nullptr;  // both belong to ssl
  BIO* output = nullptr;
};

TlsSession::TlsSession(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TlsSession::~TlsSession() = default;

std::string TlsSession::service_name(std::string_view purpose) { return fmt::format("cohort/1 {}", purpose); }

std::string TlsSession::key_name(const Secret& secret, std::string_view purpose) {
  const std::string service = service_name(purpose);
  const Mac mac = hmac_sha256(secret.bytes(), service + ", its name");
  return fmt::format("{} {:02x}", service, fmt::join(mac.begin(), mac.begin() + 8, ""));
}

Result<std::unique_ptr<TlsSession>> TlsSession::make(bool server, const Secret& secret, std::string_view purpose) {
  TlsEnd::Key key = hmac_sha256(secret.bytes(), service_name(purpose));
  auto end = TlsEnd::make(server, key_name(secret, purpose), key);
  ::OPENSSL_cleanse(key.data(), key.size());
  if (!end) return tl::unexpected(end.error());
  auto impl = std::make_unique<Impl>();
  impl->end = *std::move(end);
  impl->ssl = impl->end->ssl();
  impl->input = ::BIO_new(::BIO_s_mem());
  impl->output = ::BIO_new(::BIO_s_mem());
  if (impl->input == nullptr || impl->output == nullptr) {
    ::BIO_free(impl->input);
    ::BIO_free(impl->output);
    return openssl_error("BIO_new");
  }
  ::SSL_set_bio(impl->ssl, impl->input, impl->output);
  return std::unique_ptr<TlsSession>(new TlsSession(std::move(impl)));
}

Result<void> TlsSession::feed(std::string_view bytes) {
  const int n = ::BIO_write(impl_->input, bytes.data(), static_cast<int>(bytes.size()));
  if (n != static_cast<int>(bytes.size())) return openssl_error("BIO_write");
  return {};
}

Result<bool> TlsSession::handshake() {
  ::ERR_clear_error();
  const int result = ::SSL_do_handshake(impl_->ssl);
  if (result == 1) {
    if (!impl_->end->proven()) return fail(ErrorCode::InvalidArgument, "it did not prove the secret");
    impl_->end->forget_key();
    return true;
  }
  const int reason = ::SSL_get_error(impl_->ssl, result);
  if (reason == SSL_ERROR_WANT_READ || reason == SSL_ERROR_WANT_WRITE) return false;
  return fail(ErrorCode::InvalidArgument, "{}", impl_->end->handshake_failure());
}

std::optional<ReplayFilter::Words> TlsSession::proven_hello() const {
  if (!impl_->end->server() || !impl_->end->proven()) return std::nullopt;
  ReplayFilter::Words words{};
  if (::SSL_get_client_random(impl_->ssl, words.data(), words.size()) != words.size()) return std::nullopt;
  return words;
}

Result<bool> TlsSession::read(std::string& plain) {
  char chunk[16 << 10];
  while (true) {
    ::ERR_clear_error();
    const int n = ::SSL_read(impl_->ssl, chunk, sizeof chunk);
    if (n > 0) {
      plain.append(chunk, static_cast<std::size_t>(n));
      continue;
    }
    switch (::SSL_get_error(impl_->ssl, n)) {
      case SSL_ERROR_WANT_READ: return true;
      case SSL_ERROR_ZERO_RETURN: return false;
      default: return fail(ErrorCode::Corrupt, "damaged record or alert: {}", openssl_text());
    }
  }
}

Result<void> TlsSession::write(std::string_view plain) {
  while (!plain.empty()) {
    ::ERR_clear_error();
    const auto size = static_cast<int>(std::min<std::size_t>(plain.size(), 1 << 20));
    const int n = ::SSL_write(impl_->ssl, plain.data(), size);
    if (n <= 0) return openssl_error("SSL_write");
    plain.remove_prefix(static_cast<std::size_t>(n));
  }
  return {};
}

Result<std::array<std::uint8_t, 32>> TlsSession::export_key(std::string_view label) const {
  std::array<std::uint8_t, 32> key{};
  if (::SSL_export_keying_material(impl_->ssl, key.data(), key.size(), label.data(), label.size(), nullptr, 0, 0) != 1)
    return openssl_error("SSL_export_keying_material");
  return key;
}

Result<std::unique_ptr<TlsStream>> TlsSession::into_stream(int fd) && {
  return TlsStream::make(std::move(impl_->end), fd);
}

void TlsSession::close() {
  ::ERR_clear_error();
  ::SSL_shutdown(impl_->ssl);
  ::ERR_clear_error();
}

std::string TlsSession::take_output() {
  const std::size_t size = ::BIO_ctrl_pending(impl_->output);
  std::string bytes(size, '\0');
  if (size > 0) {
    const int n = ::BIO_read(impl_->output, bytes.data(), static_cast<int>(size));
    bytes.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  }
  return bytes;
}

}  // namespace cohort::net
