#include "net/tls.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <array>
#include <limits>

namespace cohort::net {
namespace {

using Key = std::array<unsigned char, 32>;

struct FreeContext {
  void operator()(SSL_CTX* context) const { ::SSL_CTX_free(context); }
};
struct FreeSsl {
  void operator()(SSL* ssl) const { ::SSL_free(ssl); }
};

// The text of OpenSSL's latest complaint; empties its queue.
std::string openssl_text() {
  const unsigned long code = ::ERR_peek_last_error();
  ::ERR_clear_error();
  const char* const reason = ::ERR_reason_error_string(code);
  return reason == nullptr ? "unknown reason" : reason;
}

tl::unexpected<Error> internal(std::string_view what) {
  return fail(ErrorCode::Internal, "TLS: {}: {}", what, openssl_text());
}

// What went wrong in a handshake, in words of this program.
std::string handshake_failure(bool server) {
  const unsigned long code = ::ERR_peek_last_error();
  const int reason = ERR_GET_REASON(code);
  const std::string text = openssl_text();
  constexpr std::string_view kDiffers =
      "the secret differs from this process's -- start all ranks with the same COHORT_SECRET_FILE, or by one `cohort "
      "run`";
  if (server && reason == SSL_R_BINDER_DOES_NOT_VERIFY) return std::string(kDiffers);
  if (!server && (reason == SSL_R_SSLV3_ALERT_ILLEGAL_PARAMETER || reason == SSL_R_TLSV1_ALERT_DECRYPT_ERROR)) {
    return std::string(kDiffers);
  }
  if (!server && reason == SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE) {
    return "the other end does not know this service or its secret -- is the address right?";
  }
  if (server && (reason == SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM || reason == SSL_R_NO_SHARED_CIPHER ||
                 reason == SSL_R_NO_SUITABLE_KEY_SHARE || reason == SSL_R_UNSUPPORTED_PROTOCOL)) {
    return fmt::format("it does not bring the secret of this service ({})", text);
  }
  return fmt::format("it does not speak TLS 1.3 with the job's secret ({})", text);
}

}  // namespace

struct TlsSession::Impl {
  bool server = false;
  std::string identity;
  Key key{};
  std::unique_ptr<SSL_CTX, FreeContext> context;
  std::unique_ptr<SSL, FreeSsl> ssl;
  BIO* input = nullptr;  // both belong to ssl
  BIO* output = nullptr;

  ~Impl() { ::OPENSSL_cleanse(key.data(), key.size()); }

  SSL_SESSION* make_psk() {
    constexpr unsigned char kAes128GcmSha256[] = {0x13, 0x01};
    const SSL_CIPHER* const cipher = ::SSL_CIPHER_find(ssl.get(), kAes128GcmSha256);
    SSL_SESSION* const session = ::SSL_SESSION_new();
    if (cipher == nullptr || session == nullptr ||
        ::SSL_SESSION_set1_master_key(session, key.data(), key.size()) != 1 ||
        ::SSL_SESSION_set_cipher(session, cipher) != 1 ||
        ::SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) != 1) {
      ::SSL_SESSION_free(session);
      return nullptr;
    }
    return session;
  }

  static int offer_psk(SSL* ssl, const EVP_MD* digest, const unsigned char** identity, std::size_t* size,
                       SSL_SESSION** session) {
    auto* impl = static_cast<Impl*>(SSL_get_app_data(ssl));
    *session = nullptr;
    if (digest != nullptr && ::EVP_MD_get_type(digest) != NID_sha256) return 1;
    *session = impl->make_psk();
    if (*session == nullptr) return 0;
    *identity = reinterpret_cast<const unsigned char*>(impl->identity.data());
    *size = impl->identity.size();
    return 1;
  }

  static int find_psk(SSL* ssl, const unsigned char* identity, std::size_t size, SSL_SESSION** session) {
    auto* impl = static_cast<Impl*>(SSL_get_app_data(ssl));
    *session = nullptr;
    if (std::string_view(reinterpret_cast<const char*>(identity), size) != impl->identity) return 1;
    *session = impl->make_psk();
    return *session == nullptr ? 0 : 1;
  }
};

TlsSession::TlsSession(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TlsSession::~TlsSession() = default;

Result<std::unique_ptr<TlsSession>> TlsSession::make(bool server, const Secret& secret, std::string_view purpose) {
  ::ERR_clear_error();
  auto impl = std::make_unique<Impl>();
  impl->server = server;
  impl->identity = fmt::format("cohort/1 {}", purpose);
  unsigned int size = 0;
  if (::HMAC(::EVP_sha256(), secret.bytes().data(), static_cast<int>(secret.bytes().size()),
             reinterpret_cast<const unsigned char*>(impl->identity.data()), impl->identity.size(), impl->key.data(),
             &size) == nullptr ||
      size != impl->key.size()) {
    return internal("deriving a key");
  }
  impl->context.reset(::SSL_CTX_new(::TLS_method()));
  SSL_CTX* const context = impl->context.get();
  if (context == nullptr) return internal("SSL_CTX_new");
  ::SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
  ::SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  // There are no certificates: a client that is offered one instead of the key must refuse it.
  if (!server) ::SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  if (::SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
      ::SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) != 1 ||
      ::SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") != 1 ||
      ::SSL_CTX_set1_groups_list(context, "X25519") != 1 || ::SSL_CTX_set_num_tickets(context, 0) != 1 ||
      ::SSL_CTX_set_max_early_data(context, 0) != 1) {
    return internal("settings");
  }
  if (server) {
    ::SSL_CTX_set_psk_find_session_callback(context, Impl::find_psk);
  } else {
    ::SSL_CTX_set_psk_use_session_callback(context, Impl::offer_psk);
  }
  impl->ssl.reset(::SSL_new(context));
  impl->input = ::BIO_new(::BIO_s_mem());
  impl->output = ::BIO_new(::BIO_s_mem());
  if (!impl->ssl || impl->input == nullptr || impl->output == nullptr) {
    ::BIO_free(impl->input);
    ::BIO_free(impl->output);
    return internal("SSL_new");
  }
  ::SSL_set_bio(impl->ssl.get(), impl->input, impl->output);
  SSL_set_app_data(impl->ssl.get(), impl.get());
  if (server) {
    ::SSL_set_accept_state(impl->ssl.get());
  } else {
    ::SSL_set_connect_state(impl->ssl.get());
  }
  return std::unique_ptr<TlsSession>(new TlsSession(std::move(impl)));
}

Result<void> TlsSession::feed(std::string_view bytes) {
  const int n = ::BIO_write(impl_->input, bytes.data(), static_cast<int>(bytes.size()));
  if (n != static_cast<int>(bytes.size())) return internal("BIO_write");
  return {};
}

Result<bool> TlsSession::handshake() {
  ::ERR_clear_error();
  const int result = ::SSL_do_handshake(impl_->ssl.get());
  if (result == 1) {
    // The secret is what proves the peer, nothing else.
    if (::SSL_session_reused(impl_->ssl.get()) != 1)
      return fail(ErrorCode::InvalidArgument, "it did not prove the secret");
    return true;
  }
  const int reason = ::SSL_get_error(impl_->ssl.get(), result);
  if (reason == SSL_ERROR_WANT_READ || reason == SSL_ERROR_WANT_WRITE) return false;
  return fail(ErrorCode::InvalidArgument, "{}", handshake_failure(impl_->server));
}

Result<bool> TlsSession::read(std::string& plain) {
  char chunk[16 << 10];
  while (true) {
    ::ERR_clear_error();
    const int n = ::SSL_read(impl_->ssl.get(), chunk, sizeof chunk);
    if (n > 0) {
      plain.append(chunk, static_cast<std::size_t>(n));
      continue;
    }
    switch (::SSL_get_error(impl_->ssl.get(), n)) {
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
    const int n = ::SSL_write(impl_->ssl.get(), plain.data(), size);
    if (n <= 0) return internal("SSL_write");
    plain.remove_prefix(static_cast<std::size_t>(n));
  }
  return {};
}

void TlsSession::close() {
  ::ERR_clear_error();
  ::SSL_shutdown(impl_->ssl.get());
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
