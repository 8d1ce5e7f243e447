// One end of a TLS 1.3 connection that is authenticated by a pre-shared key alone, with a fresh X25519 exchange:
// OpenSSL set up that way, without its I/O. Used by TlsSession (bytes in memory) and TlsStream (a socket). One thread
// at a time. (RFC 8446 section 2.2; external PSKs as RFC 9257 asks for: 256 bits, one per purpose.)
#pragma once

#include "base/result.h"

#include <openssl/ssl.h>

#include <array>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace cohort::net {

class TlsEnd {
 public:
  using Key = std::array<unsigned char, 32>;

  /// `identity` says which key is meant: both ends give the same.
  static Result<std::unique_ptr<TlsEnd>> make(bool server, std::string identity, const Key& key);
  ~TlsEnd();
  TlsEnd(const TlsEnd&) = delete;
  TlsEnd& operator=(const TlsEnd&) = delete;

  SSL* ssl() const noexcept { return ssl_.get(); }
  bool server() const noexcept { return server_; }
  /// After a handshake: whether the peer has proved the key. It is what proves the peer, nothing else. (Of a server
  /// that has answered, before: whether the client's hello was made with the key, even if replayed.)
  bool proven() const noexcept { return ::SSL_session_reused(ssl_.get()) == 1; }
  /// It is not needed once the handshake is over.
  void forget_key() noexcept;
  /// Of a handshake that failed, in words of this program.
  std::string handshake_failure() const;

 private:
  struct FreeContext {
    void operator()(SSL_CTX* context) const { ::SSL_CTX_free(context); }
  };
  struct FreeSsl {
    void operator()(SSL* ssl) const { ::SSL_free(ssl); }
  };
  TlsEnd(bool server, std::string identity, const Key& key)
      : server_(server), identity_(std::move(identity)), key_(key) {}
  static SSL_CTX* context_of(bool server);
  SSL_SESSION* make_psk() const;
  static int offer_psk(SSL* ssl, const EVP_MD* digest, const unsigned char** identity, std::size_t* size,
                       SSL_SESSION** session);
  static int find_psk(SSL* ssl, const unsigned char* identity, std::size_t size, SSL_SESSION** session);

  const bool server_;
  const std::string identity_;
  Key key_;
  std::unique_ptr<SSL, FreeSsl> ssl_;
};

/// The text of OpenSSL's latest complaint; empties its queue.
std::string openssl_text();
/// Of the function `what`, with that text.
tl::unexpected<Error> openssl_error(std::string_view what);

}  // namespace cohort::net
