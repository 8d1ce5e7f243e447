#include "net/tls_end.h"

#include "net/tls.h"

#include <openssl/crypto.h>
#include <openssl/err.h>

namespace cohort::net {

std::string openssl_text() {
  const unsigned long code = ::ERR_peek_last_error();
  ::ERR_clear_error();
  const char* const reason = ::ERR_reason_error_string(code);
  return reason == nullptr ? "unknown reason" : reason;
}

tl::unexpected<Error> openssl_error(std::string_view what) {
  return fail(ErrorCode::Internal, "TLS: {}: {}", what, openssl_text());
}

TlsEnd::~TlsEnd() { forget_key(); }

void TlsEnd::forget_key() noexcept { ::OPENSSL_cleanse(key_.data(), key_.size()); }

std::string TlsEnd::handshake_failure() const {
  const unsigned long code = ::ERR_peek_last_error();
  const int reason = ERR_GET_REASON(code);
  const std::string text = openssl_text();
  if (server_ && reason == SSL_R_BINDER_DOES_NOT_VERIFY) return std::string(kSecretDiffers);
  if (!server_ && (reason == SSL_R_SSLV3_ALERT_ILLEGAL_PARAMETER || reason == SSL_R_TLSV1_ALERT_DECRYPT_ERROR)) {
    return std::string(kSecretDiffers);
  }
  if (!server_ && reason == SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE) {
    return "the other end does not know this service or its secret -- is the address right?";
  }
  if (server_ && (reason == SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM || reason == SSL_R_NO_SHARED_CIPHER ||
                  reason == SSL_R_NO_SUITABLE_KEY_SHARE || reason == SSL_R_UNSUPPORTED_PROTOCOL)) {
    return fmt::format("it does not bring the secret of this service ({})", text);
  }
  return fmt::format("it does not speak TLS 1.3 with the job's secret ({})", text);
}

SSL_SESSION* TlsEnd::make_psk() const {
  constexpr unsigned char kAes128GcmSha256[] = {0x13, 0x01};
  const SSL_CIPHER* const cipher = ::SSL_CIPHER_find(ssl_.get(), kAes128GcmSha256);
  SSL_SESSION* const session = ::SSL_SESSION_new();
  if (cipher == nullptr || session == nullptr ||
      ::SSL_SESSION_set1_master_key(session, key_.data(), key_.size()) != 1 ||
      ::SSL_SESSION_set_cipher(session, cipher) != 1 ||
      ::SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) != 1) {
    ::SSL_SESSION_free(session);
    return nullptr;
  }
  return session;
}

int TlsEnd::offer_psk(SSL* ssl, const EVP_MD* digest, const unsigned char** identity, std::size_t* size,
                      SSL_SESSION** session) {
  const auto* end = static_cast<TlsEnd*>(SSL_get_app_data(ssl));
  *session = nullptr;
  if (digest != nullptr && ::EVP_MD_get_type(digest) != NID_sha256) return 1;
  *session = end->make_psk();
  if (*session == nullptr) return 0;
  *identity = reinterpret_cast<const unsigned char*>(end->identity_.data());
  *size = end->identity_.size();
  return 1;
}

int TlsEnd::find_psk(SSL* ssl, const unsigned char* identity, std::size_t size, SSL_SESSION** session) {
  const auto* end = static_cast<TlsEnd*>(SSL_get_app_data(ssl));
  *session = nullptr;
  if (std::string_view(reinterpret_cast<const char*>(identity), size) != end->identity_) return 1;
  *session = end->make_psk();
  return *session == nullptr ? 0 : 1;
}

/// The settings of all ends of one kind, which keys are no part of: making them takes longer than a handshake. Never
/// freed, since threads may still be at work when the process ends.
SSL_CTX* TlsEnd::context_of(bool server) {
  const auto make = [](bool serves) -> SSL_CTX* {
    std::unique_ptr<SSL_CTX, FreeContext> context(::SSL_CTX_new(::TLS_method()));
    if (!context) return nullptr;
    ::SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
    ::SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
    // There are no certificates: a client that is offered one instead of the key must refuse it.
    if (!serves) ::SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
    if (::SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION) != 1 ||
        ::SSL_CTX_set_max_proto_version(context.get(), TLS1_3_VERSION) != 1 ||
        ::SSL_CTX_set_ciphersuites(context.get(), "TLS_AES_128_GCM_SHA256") != 1 ||
        ::SSL_CTX_set1_groups_list(context.get(), "X25519") != 1 || ::SSL_CTX_set_num_tickets(context.get(), 0) != 1 ||
        ::SSL_CTX_set_max_early_data(context.get(), 0) != 1) {
      return nullptr;
    }
    if (serves) {
      ::SSL_CTX_set_psk_find_session_callback(context.get(), find_psk);
    } else {
      ::SSL_CTX_set_psk_use_session_callback(context.get(), offer_psk);
    }
    return context.release();
  };
  if (server) {
    static SSL_CTX* const of_servers = make(true);
    return of_servers;
  }
  static SSL_CTX* const of_clients = make(false);
  return of_clients;
}

Result<std::unique_ptr<TlsEnd>> TlsEnd::make(bool server, std::string identity, const Key& key) {
  ::ERR_clear_error();
  SSL_CTX* const context = context_of(server);
  if (context == nullptr) return openssl_error("settings");
  std::unique_ptr<TlsEnd> end(new TlsEnd(server, std::move(identity), key));
  end->ssl_.reset(::SSL_new(context));
  SSL* const ssl = end->ssl_.get();
  if (ssl == nullptr) return openssl_error("SSL_new");
  SSL_set_app_data(ssl, end.get());
  // Most are silent for most of the time; and a TlsStream needs other buffers.
  ::SSL_set_mode(ssl, SSL_MODE_RELEASE_BUFFERS);
  if (server) {
    ::SSL_set_accept_state(ssl);
  } else {
    ::SSL_set_connect_state(ssl);
  }
  return end;
}

}  // namespace cohort::net
