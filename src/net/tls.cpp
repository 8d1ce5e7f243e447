#include "net/tls.h"

#include "base/result.h"
#include "net/secret.h"

#include <fmt/ranges.h>
#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace cohort::net {

bool ReplayFilter::first_time(const Words& words) {
  const auto [place, first] = words_.insert(words);
  if (!first) return false;
  oldest_.push_back(place);
  if (words_.size() > most_) {
    words_.erase(oldest_.front());
    oldest_.pop_front();
  }
  return true;
}

// One end of a TLS 1.3 connection, as an OpenSSL session without I/O: authenticated only by a pre-shared key, with a
// fresh X25519 exchange. Used by TlsSession (bytes in memory) and TlsStream (a socket). One thread at a time. (RFC 8446
// section 2.2; external PSKs as RFC 9257 requires: 256 bits, one per purpose.)
class TlsEnd {
 public:
  using Key = std::array<unsigned char, 32>;

  /// `identity` names the key; both ends have to give the same identity.
  static Result<std::unique_ptr<TlsEnd>> make(bool server, std::string identity, const Key& key);
  ~TlsEnd();
  TlsEnd(const TlsEnd&) = delete;
  TlsEnd& operator=(const TlsEnd&) = delete;

  SSL* ssl() const noexcept { return ssl_.get(); }
  bool server() const noexcept { return server_; }
  /// After the handshake, true if the peer has proved the key; nothing else authenticates the peer. (On a server it is
  /// true once the server has answered: the client's hello was made with the key, but may be a replay.)
  bool proven() const noexcept { return ::SSL_session_reused(ssl_.get()) == 1; }
  /// Erases the key, which is not needed after the handshake.
  void forget_key() noexcept;
  /// Describes why a handshake failed, for the user.
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

namespace {

/// Returns the text of OpenSSL's latest error, and empties its error queue.
std::string openssl_text() {
  const unsigned long code = ::ERR_peek_last_error();
  ::ERR_clear_error();
  const char* const reason = ::ERR_reason_error_string(code);
  return reason == nullptr ? "unknown reason" : reason;
}

/// Makes the error of the function `what`, with OpenSSL's text.
tl::unexpected<Error> openssl_error(std::string_view what) {
  return fail(ErrorCode::Internal, "TLS: {}: {}", what, openssl_text());
}

}  // namespace

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

/// Returns the settings shared by all servers or all clients; keys are not part of them. They are made once, since
/// making them takes longer than a handshake, and never freed, since threads may still run when the process ends.
SSL_CTX* TlsEnd::context_of(bool server) {
  const auto make = [](bool serves) -> SSL_CTX* {
    std::unique_ptr<SSL_CTX, FreeContext> context(::SSL_CTX_new(::TLS_method()));
    if (!context) return nullptr;
    ::SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
    ::SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
    // Certificates are not used, so a client that is offered one instead of the key must refuse it.
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
  // Frees the buffers while a connection is idle, as most are. TlsStream::make allocates its own.
  ::SSL_set_mode(ssl, SSL_MODE_RELEASE_BUFFERS);
  if (server) {
    ::SSL_set_accept_state(ssl);
  } else {
    ::SSL_set_connect_state(ssl);
  }
  return end;
}

namespace {

// RFC 8446, 5.5: at most 2^24.5 full records, 388 GiB, are safe under one key of AES-GCM; OpenSSL does not change the
// key by itself.
constexpr std::uint64_t kMostUnderKey = std::uint64_t{1} << 37;

// Functions of a BIO for sockets, since OpenSSL's own raises SIGPIPE.
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

/// Makes a PeerLost error, and leaves errno as send or recv has set it, for the caller.
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
  SSL_set_read_ahead(ssl, 1);  // several records are read with one call
  ::SSL_set_default_read_buffer_len(ssl, std::size_t{128} << 10);
  return std::unique_ptr<TlsStream>(new TlsStream(std::move(end)));
}

Result<std::size_t> TlsStream::write(std::span<const std::byte> bytes) {
  if (bytes.empty()) return 0;
  ::ERR_clear_error();
  std::size_t taken = 0;
  if (::SSL_write_ex(end_->ssl(), bytes.data(), bytes.size(), &taken) == 1) {
    under_key_ += taken;
    // The update fails while a record is partly sent; then the next write tries again.
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
      // A peer that has died sends no close_notify.
      if (ERR_GET_REASON(code) == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
        ::ERR_clear_error();
        return std::optional<std::size_t>(0);
      }
      return fail(ErrorCode::Corrupt, "encrypted data: {}", openssl_text());
    }
  }
}

bool TlsStream::holds_bytes() const noexcept { return ::SSL_has_pending(end_->ssl()) == 1; }

struct TlsSession::Impl {
  std::unique_ptr<TlsEnd> end;
  SSL* ssl = nullptr;
  BIO* input = nullptr;  // `ssl` owns both BIOs
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
