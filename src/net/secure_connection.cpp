#include "net/secure_connection.h"

#include "base/unique_fd.h"
#include "net/socket.h"
#include "net/tls.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::net {
namespace {

constexpr std::size_t kReadChunk = 16 << 10;
constexpr std::size_t kReadPerAdvance = 256 << 10;
constexpr std::size_t kHandshakeLimit = 4096;
// First bytes sent if the kernel identifies the other end; a TLS handshake starts with 0x16 instead.
constexpr std::string_view kPlainGreeting = "COHORT1\n";
constexpr char kTlsHandshake = 0x16;
// Position of the random number in a ClientHello, after the headers of record and message and the version.
constexpr std::size_t kHelloRandom = 11;
constexpr std::string_view kRepeats = "it repeats what another connection began with";
constexpr std::size_t kRecordHeader = 5;
// TLS alerts handshake_failure and decrypt_error: the replies to peers without a secret, and with another secret.
constexpr std::string_view kTlsRefusal("\x15\x03\x03\x00\x02\x02\x28", 7);
constexpr std::string_view kTlsOtherSecret("\x15\x03\x03\x00\x02\x02\x33", 7);

constexpr std::string_view kHowToGiveASecret =
    "give all ranks one secret: `cohort secret FILE` makes it, COHORT_SECRET_FILE=FILE or InitOptions::secret_file "
    "names "
    "it; `cohort run` does all that itself";

// A queue of bytes, taken from the front without moving the rest each time.
class ByteQueue {
 public:
  void append(std::string_view bytes) { bytes_.append(bytes); }
  std::string_view view() const noexcept { return std::string_view(bytes_).substr(taken_); }
  std::size_t size() const noexcept { return bytes_.size() - taken_; }
  void take(std::size_t count) {
    taken_ += count;
    if (taken_ == bytes_.size()) {
      bytes_.clear();
      taken_ = 0;
      if (bytes_.capacity() > (1 << 20)) bytes_.shrink_to_fit();
    } else if (taken_ > (64 << 10) && taken_ > bytes_.size() / 2) {
      bytes_.erase(0, taken_);
      taken_ = 0;
    }
  }

 private:
  std::string bytes_;
  std::size_t taken_ = 0;
};

/// Returns the length of a record's body, from the last two bytes of its header.
std::size_t record_length(std::string_view header) {
  return static_cast<std::size_t>(static_cast<unsigned char>(header[3])) << 8 | static_cast<unsigned char>(header[4]);
}

/// Position in a stream of TLS records.
class RecordEdge {
 public:
  void pass(std::string_view bytes) {
    while (!bytes.empty()) {
      const std::size_t step = std::min(bytes.size(), to_go());
      if (left_ > 0) {
        left_ -= step;
      } else {
        header_.append(bytes.substr(0, step));
        if (header_.size() == kRecordHeader) {
          left_ = record_length(header_);
          header_.clear();
        }
      }
      bytes.remove_prefix(step);
    }
  }
  /// Number of bytes that can be read without reading past the current record or, between records, the next header.
  std::size_t to_go() const noexcept { return left_ > 0 ? left_ : kRecordHeader - header_.size(); }
  bool between() const noexcept { return left_ == 0 && header_.empty(); }

 private:
  std::string header_;
  std::size_t left_ = 0;
};

}  // namespace

struct SecureConnection::Impl {
  sys::UniqueFd socket;
  Role role = Role::Client;
  SecureOptions options;
  std::string peer;
  std::unique_ptr<TlsSession> tls;  // null if the kernel identifies the peer, or before a client's hello
  std::optional<Secret> secret;     // kept until `tls` exists
  std::string hello;                // the client's hello, until it is complete
  bool credible = false;
  bool established = false;
  bool end_of_input = false;
  std::size_t handshake_bytes = 0;
  pid_t process = ::getpid();
  RecordEdge edge;         // position in the received bytes
  std::string waiting;     // framed messages, to be sent once established
  ByteQueue incoming;      // decrypted bytes
  ByteQueue outgoing;      // bytes for the socket
  sys::UniqueFd to_send;   // a descriptor to be sent with the next byte
  sys::UniqueFd received;  // a received descriptor, not yet taken

  bool encrypted() const noexcept { return tls != nullptr || secret.has_value(); }

  tl::unexpected<Error> not_authenticated(std::string_view why) const {
    return fail(ErrorCode::InvalidArgument, "authentication failed with {}: {}", peer, why);
  }

  Result<void> become_established() {
    established = true;
    hello = {};
    const std::string frames = std::exchange(waiting, {});
    return frames.empty() ? Result<void>() : encrypt(frames);
  }

  Result<void> encrypt(std::string_view bytes) {
    if (!tls) {
      outgoing.append(bytes);
      return {};
    }
    auto result = tls->write(bytes);
    if (!result) return result;
    outgoing.append(tls->take_output());
    return {};
  }

  Result<void> feed_plain(std::string_view bytes) {
    incoming.append(bytes);
    if (established) return {};
    const std::string_view have = incoming.view().substr(0, kPlainGreeting.size());
    if (!have.empty() && have != kPlainGreeting.substr(0, have.size())) {
      (void)flush();  // shows the other end, by our greeting, what is wrong
      if (have.front() == 0x16 || have.front() == 0x15) {
        return not_authenticated(fmt::format("it has a secret and this process has none -- {}", kHowToGiveASecret));
      }
      return not_authenticated("it is not a Cohort process of this version");
    }
    if (have.size() < kPlainGreeting.size()) return {};
    incoming.take(kPlainGreeting.size());
    return become_established();
  }

  bool hello_complete() const {
    return hello.size() >= kRecordHeader && hello.size() >= kRecordHeader + record_length(hello);
  }

  /// Checks a client's hello before an OpenSSL session is made, so that clients without TLS or without the secret, and
  /// replays, cost none.
  Result<void> look_at_hello() {
    if (hello.front() != kTlsHandshake) return not_authenticated("it does not speak TLS");
    if (handshake_bytes >= kHandshakeLimit) return not_authenticated("its handshake is too long");
    if (!hello_complete()) return {};
    if (hello.find(TlsSession::key_name(*secret, options.purpose)) == std::string::npos) {
      const bool other_secret = hello.find(TlsSession::service_name(options.purpose)) != std::string::npos;
      outgoing.append(other_secret ? kTlsOtherSecret : kTlsRefusal);
      (void)flush();
      return not_authenticated(other_secret ? kSecretDiffers : "it does not bring the secret of this service");
    }
    ReplayFilter::Words words{};
    if (options.heard != nullptr && hello.size() >= kHelloRandom + words.size()) {
      std::memcpy(words.data(), hello.data() + kHelloRandom, words.size());
      if (options.heard->knows(words)) return not_authenticated(kRepeats);
    }
    return {};
  }

  Result<void> feed_tls(std::string_view bytes) {
    if (!established) {
      handshake_bytes += bytes.size();
      if (role == Role::Server && handshake_bytes == bytes.size() && bytes.front() == kPlainGreeting.front()) {
        outgoing.append(kTlsRefusal);
        (void)flush();
        return not_authenticated(fmt::format("it brings no secret -- {}", kHowToGiveASecret));
      }
      if (role == Role::Client && handshake_bytes == bytes.size() && bytes.front() == kPlainGreeting.front()) {
        (void)flush();  // shows the other end, by our first message, what is wrong
        return not_authenticated(fmt::format("it has no secret and this process has one -- {}", kHowToGiveASecret));
      }
      if (!tls) {
        hello.append(bytes);
        if (auto wanted = look_at_hello(); !wanted) return wanted;
        if (!hello_complete()) return {};
        auto made = TlsSession::make(true, *secret, options.purpose);
        if (!made) return tl::unexpected(made.error());
        tls = *std::move(made);
        secret.reset();
        bytes = hello;
      }
    }
    if (auto fed = tls->feed(bytes); !fed) return fed;
    if (!established) {
      auto done = tls->handshake();
      outgoing.append(tls->take_output());  // an alert for the other end, if it failed
      if (!done) {
        (void)flush();
        return not_authenticated(done.error().what());
      }
      if (!credible && role == Role::Server) {
        const auto words = tls->proven_hello();
        if (words && options.heard != nullptr && !options.heard->first_time(*words)) return not_authenticated(kRepeats);
        credible = words.has_value();
      }
      if (!*done && handshake_bytes >= kHandshakeLimit) return not_authenticated("its handshake is too long");
      if (!*done) return {};
      if (auto result = become_established(); !result) return result;
    }
    std::string plain;
    auto open = tls->read(plain);
    incoming.append(plain);
    if (!open) return fail(ErrorCode::Corrupt, "connection with {}: {}", peer, open.error().what());
    if (!*open) end_of_input = true;
    return {};
  }

  Result<void> receive_some() {
    std::size_t total = 0;
    char chunk[kReadChunk];
    while (!end_of_input && total < kReadPerAdvance) {
      std::size_t room = sizeof chunk;
      if (options.detachable && established) {
        if (has_message()) break;
        room = std::min(room, edge.to_go());
      }
      if (encrypted() && !established)
        room = std::min(room, kHandshakeLimit - std::min(handshake_bytes, kHandshakeLimit - 1));
      const ssize_t n = options.descriptors && established ? sys::receive_with_fd(socket.get(), chunk, room, received)
                                                           : ::recv(socket.get(), chunk, room, 0);
      if (n < 0) {
        if (errno == EINTR) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) break;
        return fail(established ? ErrorCode::PeerLost : ErrorCode::Unavailable, "connection with {} lost: {}", peer,
                    errno_text(errno));
      }
      if (n == 0) {
        if (!established) {
          return fail(ErrorCode::Unavailable,
                      "connection with {} closed by the other end before the handshake was over", peer);
        }
        // TLS ends with close_notify; without it, the stream may have been truncated.
        if (encrypted()) return fail(ErrorCode::PeerLost, "connection with {} lost: it ended without a good-bye", peer);
        end_of_input = true;
        break;
      }
      const std::string_view bytes(chunk, static_cast<std::size_t>(n));
      total += bytes.size();
      if (options.detachable) edge.pass(bytes);
      if (auto result = encrypted() ? feed_tls(bytes) : feed_plain(bytes); !result) return result;
    }
    return {};
  }

  Result<void> flush() {
    while (outgoing.size() > 0) {
      const std::string_view bytes = outgoing.view();
      const ssize_t n = sys::send_with_fd(socket.get(), bytes.data(), bytes.size(), to_send.get());
      if (n < 0) {
        if (errno == EINTR) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
        return fail(established ? ErrorCode::PeerLost : ErrorCode::Unavailable, "connection with {} lost: {}", peer,
                    errno_text(errno));
      }
      to_send.reset();
      outgoing.take(static_cast<std::size_t>(n));
    }
    return {};
  }

  // Returns the length of the next frame's message; nullopt if the frame's header is not complete.
  std::optional<std::uint32_t> announced() const {
    std::uint32_t length = 0;
    if (incoming.size() < sizeof length) return std::nullopt;
    std::memcpy(&length, incoming.view().data(), sizeof length);
    return length;
  }

  bool has_message() const {
    const auto length = announced();
    return length && incoming.size() >= sizeof *length + *length;
  }

  Result<void> check_frame() const {
    const auto length = established ? announced() : std::nullopt;
    if (length && *length > options.longest_message) {
      return fail(ErrorCode::Corrupt, "{} announced a message of {} bytes where at most {} are allowed", peer, *length,
                  options.longest_message);
    }
    if (end_of_input && incoming.size() > 0 && (!length || incoming.size() < sizeof *length + *length)) {
      return fail(ErrorCode::PeerLost, "connection with {} ended within a message", peer);
    }
    return {};
  }
};

SecureConnection::SecureConnection(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
SecureConnection::SecureConnection(SecureConnection&&) noexcept = default;
SecureConnection& SecureConnection::operator=(SecureConnection&&) noexcept = default;

SecureConnection::~SecureConnection() {
  // In a forked child, close_notify would go into the parent's stream. An end that may have detached its socket would
  // take close_notify for data.
  if (!impl_ || !impl_->tls || !impl_->established || impl_->options.detachable || impl_->process != ::getpid()) return;
  // Send close_notify, as far as the socket takes it without blocking.
  impl_->tls->close();
  impl_->outgoing.append(impl_->tls->take_output());
  (void)impl_->flush();
}

Result<SecureConnection> SecureConnection::with_secret(sys::UniqueFd socket, Role role, const Secret& secret,
                                                       const SecureOptions& options) {
  auto impl = std::make_unique<Impl>();
  impl->peer = describe_peer(socket.get());
  impl->socket = std::move(socket);
  impl->role = role;
  impl->options = options;
  if (role == Role::Server) {
    impl->secret = secret;
  } else {
    auto tls = TlsSession::make(false, secret, options.purpose);
    if (!tls) return tl::unexpected(tls.error());
    impl->tls = *std::move(tls);
    if (auto started = impl->tls->handshake(); !started) return tl::unexpected(started.error());
    impl->outgoing.append(impl->tls->take_output());
  }
  return SecureConnection(std::move(impl));
}

Result<SecureConnection> SecureConnection::same_user(sys::UniqueFd socket, Role role, const SecureOptions& options) {
  const auto credentials = peer_credentials(socket.get());
  if (!credentials) return tl::unexpected(credentials.error());
  if (credentials->uid != ::geteuid()) {
    return fail(
        ErrorCode::InvalidArgument,
        "authentication failed: the other process (pid {}) belongs to uid {}, this one (pid {}) to uid {}, and without "
        "a secret only processes of the same user are let in -- {}",
        credentials->pid, credentials->uid, ::getpid(), ::geteuid(), kHowToGiveASecret);
  }
  auto impl = std::make_unique<Impl>();
  impl->peer = describe_peer(socket.get());
  impl->socket = std::move(socket);
  impl->role = role;
  impl->options = options;
  impl->outgoing.append(kPlainGreeting);
  return SecureConnection(std::move(impl));
}

Result<SecureConnection::Detached> SecureConnection::detach(Encryption encryption) {
  Impl& impl = *impl_;
  if (!impl.established || !impl.tls || !impl.options.detachable)
    return fail(ErrorCode::Internal, "a connection with {} that cannot be given away", impl.peer);
  if (unsent_bytes() > 0 || impl.incoming.size() > 0 || !impl.edge.between())
    return fail(ErrorCode::Corrupt, "{} has more to say than it should, or takes too little", impl.peer);
  Detached detached;
  const auto key = impl.tls->export_key("EXPORTER-cohort frames");
  if (!key) return tl::unexpected(key.error());
  detached.key = *key;
  if (encryption == Encryption::Stays) {
    auto stream = std::move(*impl.tls).into_stream(impl.socket.get());
    if (!stream) return tl::unexpected(stream.error());
    detached.stream = *std::move(stream);
  }
  impl.tls.reset();
  detached.socket = std::move(impl.socket);
  return detached;
}

int SecureConnection::fd() const noexcept { return impl_->socket.get(); }
bool SecureConnection::established() const noexcept { return impl_->established; }
bool SecureConnection::credible() const noexcept { return impl_->credible || impl_->established; }
const std::string& SecureConnection::peer() const noexcept { return impl_->peer; }
bool SecureConnection::wants_write() const noexcept { return impl_->outgoing.size() > 0; }
std::size_t SecureConnection::unsent_bytes() const noexcept { return impl_->outgoing.size() + impl_->waiting.size(); }
bool SecureConnection::at_end() const noexcept { return impl_->end_of_input && impl_->incoming.size() == 0; }

Result<void> SecureConnection::advance() {
  // Read first: the other end's last bytes explain why it does not take our output.
  if (auto result = impl_->receive_some(); !result) return result;
  if (auto result = impl_->flush(); !result) return result;
  return impl_->check_frame();
}

std::optional<std::string> SecureConnection::next_message() {
  if (!impl_->established) return std::nullopt;
  const auto length = impl_->announced();
  if (!length || *length > impl_->options.longest_message || impl_->incoming.size() < sizeof *length + *length) {
    return std::nullopt;
  }
  std::string message(impl_->incoming.view().substr(sizeof *length, *length));
  impl_->incoming.take(sizeof *length + *length);
  return message;
}

Result<void> SecureConnection::queue(std::string_view message) {
  if (message.size() > impl_->options.longest_message) {
    return fail(ErrorCode::InvalidArgument, "a message of {} bytes to {}, where at most {} are allowed", message.size(),
                impl_->peer, impl_->options.longest_message);
  }
  const auto length = static_cast<std::uint32_t>(message.size());
  std::string frame;
  frame.reserve(sizeof length + message.size());
  frame.append(reinterpret_cast<const char*>(&length), sizeof length).append(message);
  if (!impl_->established) {
    impl_->waiting += frame;
    return {};
  }
  if (auto result = impl_->encrypt(frame); !result) return result;
  return impl_->flush();
}

Result<void> SecureConnection::queue(std::string_view message, sys::UniqueFd descriptor) {
  impl_->to_send = std::move(descriptor);
  return queue(message);
}

sys::UniqueFd SecureConnection::take_descriptor() noexcept { return std::move(impl_->received); }

Result<void> SecureConnection::handshake(Deadline deadline) {
  while (true) {
    if (auto result = advance(); !result) return result;
    if (established()) return {};
    const auto ready = wait_ready(fd(), static_cast<short>(wants_write() ? POLLIN | POLLOUT : POLLIN), deadline);
    if (!ready) return tl::unexpected(ready.error());
    if (!*ready) return fail(ErrorCode::Timeout, "no handshake with {} in time", peer());
  }
}

Result<void> SecureConnection::send(std::string_view message, Deadline deadline) {
  if (auto result = queue(message); !result) return result;
  while (unsent_bytes() > 0) {
    if (auto result = advance(); !result) return result;
    if (unsent_bytes() == 0) break;
    const auto ready = wait_ready(fd(), static_cast<short>(wants_write() ? POLLIN | POLLOUT : POLLIN), deadline);
    if (!ready) return tl::unexpected(ready.error());
    if (!*ready)
      return fail(ErrorCode::Timeout, "{} did not take a message of {} bytes in time", peer(), message.size());
  }
  return {};
}

Result<std::string> SecureConnection::receive(Deadline deadline) {
  while (true) {
    if (auto message = next_message()) return *std::move(message);
    if (at_end()) return fail(ErrorCode::PeerLost, "connection closed by {}", peer());
    if (auto result = advance(); !result) {
      if (auto message = next_message()) return *std::move(message);
      return tl::unexpected(result.error());
    }
    if (auto message = next_message()) return *std::move(message);
    if (at_end()) continue;
    const auto ready = wait_ready(fd(), static_cast<short>(wants_write() ? POLLIN | POLLOUT : POLLIN), deadline);
    if (!ready) return tl::unexpected(ready.error());
    if (!*ready) return fail(ErrorCode::Timeout, "no message from {} in time", peer());
  }
}

void tell_of_no_secret(const Address& server, Deadline deadline) noexcept {
  try {
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(100))) {
      const auto socket = connect_once({server, {}}, std::min(deadline, deadline_in(std::chrono::seconds(1))));
      const bool may_come = !socket && socket.error().kind == ConnectFailure::Refused;
      if (may_come && std::chrono::steady_clock::now() < deadline) continue;
      if (!socket) return;
      // Sends the greeting of clients that have no secret, which the server recognises.
      (void)::send(socket->get(), kPlainGreeting.data(), kPlainGreeting.size(), MSG_NOSIGNAL);
      (void)wait_ready(socket->get(), POLLIN, deadline);  // wait for the server's refusal
      return;
    }
  } catch (const std::exception&) {  // failing is harmless, since the report is only for the server's user
  }
}

namespace {

/// A connection that is not yet answered or not yet authenticated.
struct Attempt {
  Endpoint endpoint;
  sys::UniqueFd socket;                        ///< the socket, until it is connected
  std::optional<SecureConnection> connection;  ///< the connection over the connected socket
  std::string failure = "no answer";
  bool over = false;
  bool turned_away = false;

  void fail_with(std::string why) {
    failure = std::move(why);
    over = true;
    socket.reset();
    connection.reset();
  }
  int fd() const { return connection ? connection->fd() : socket.get(); }
};

void begin(Attempt& attempt, const SocketAddress& address) {
  const int family = address.storage.ss_family;
  attempt.socket.reset(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!attempt.socket) return attempt.fail_with(errno_text(errno));
  const int on = 1;
  ::setsockopt(attempt.socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (::connect(attempt.socket.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.size) != 0 &&
      errno != EINPROGRESS) {
    attempt.fail_with(errno_text(errno));
  }
}

/// Continues an attempt. Returns true when the peer has proved itself.
bool go_on(Attempt& attempt, const Secret& secret, const SecureOptions& options) {
  if (!attempt.connection) {
    int error_number = 0;
    socklen_t size = sizeof error_number;
    ::getsockopt(attempt.socket.get(), SOL_SOCKET, SO_ERROR, &error_number, &size);
    if (error_number != 0) {
      attempt.fail_with(errno_text(error_number));
      return false;
    }
    auto made = SecureConnection::with_secret(std::move(attempt.socket), Role::Client, secret, options);
    if (!made) {
      attempt.fail_with(made.error().what());
      return false;
    }
    attempt.connection = *std::move(made);
    attempt.failure = "connected, and no proof of the secret";
  }
  if (auto moved = attempt.connection->advance(); !moved) {
    attempt.turned_away = moved.error().code() == ErrorCode::Unavailable;
    attempt.fail_with(moved.error().what());
    return false;
  }
  return attempt.connection->established();
}

}  // namespace

Result<SecureConnection> reach(std::span<const Endpoint> endpoints, const Secret& secret, const SecureOptions& options,
                               Deadline deadline) {
  std::vector<Attempt> attempts;
  for (const Endpoint& endpoint : endpoints) {
    Attempt& attempt = attempts.emplace_back();
    attempt.endpoint = endpoint;
    auto addresses = resolve(endpoint.tcp, deadline);
    if (!addresses || addresses->empty())
      attempt.fail_with(addresses ? "no address" : addresses.error().what());
    else
      begin(attempt, addresses->front());
  }
  const auto left = [&attempts] {
    return std::any_of(attempts.begin(), attempts.end(), [](const Attempt& attempt) { return !attempt.over; });
  };
  while (left() && !passed(deadline)) {
    std::vector<pollfd> waited;
    std::vector<Attempt*> waiting;
    for (Attempt& attempt : attempts) {
      if (attempt.over) continue;
      const bool writes = !attempt.connection || attempt.connection->wants_write();
      const int events = attempt.connection ? POLLIN | (writes ? POLLOUT : 0) : POLLOUT;
      waited.push_back({attempt.fd(), static_cast<short>(events), 0});
      waiting.push_back(&attempt);
    }
    if (::poll(waited.data(), waited.size(), poll_timeout(deadline)) < 0 && errno != EINTR) {
      return fail(ErrorCode::Io, "poll: {}", errno_text(errno));
    }
    for (std::size_t i = 0; i < waited.size(); ++i) {
      if (waited[i].revents != 0 && go_on(*waiting[i], secret, options)) return *std::move(waiting[i]->connection);
    }
  }
  std::string tried;
  for (const Attempt& attempt : attempts) {
    tried += fmt::format("{}{} ({})", tried.empty() ? "" : ", ", to_string(attempt.endpoint), attempt.failure);
  }
  const bool turned_away =
      std::any_of(attempts.begin(), attempts.end(), [](const Attempt& attempt) { return attempt.turned_away; });
  const ErrorCode code = left() ? ErrorCode::Timeout : turned_away ? ErrorCode::PeerLost : ErrorCode::Unavailable;
  return fail(code, "cannot connect to {}", tried.empty() ? "any address" : tried);
}

}  // namespace cohort::net
