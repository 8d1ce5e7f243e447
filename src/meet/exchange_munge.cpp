// Where Slurm has set up no PMI (MpiDefault=none): rank 0 answers at one of a few ports that the job's number gives, on
// the first host of the step. Both sides show MUNGE credentials of the same user for the same step and round; what rank
// 0 says is sealed for that user. Nothing of a peer is used before its credential has been opened.
#include "base/log.h"
#include "meet/exchange.h"
#include "meet/munge.h"
#include "net/digest.h"
#include "net/rate_limiter.h"
#include "net/secret.h"
#include "net/socket.h"
#include "sys/files.h"
#include "sys/thread.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <list>
#include <optional>
#include <set>
#include <thread>

namespace cohort::meet {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::uint32_t kPorts = 8;
constexpr std::uint16_t kFirstPort = 10240;  // below the ports that kernels hand out
constexpr std::uint32_t kPortSpan = 16000;
constexpr std::uint32_t kLongestMessage = 16 * 1024;
constexpr seconds kPatience{5};  // of rank 0, with a peer that is slow or is not one of ours
constexpr std::size_t kMostAskers = 128;
constexpr int kAtOnce = 64;              // taken before those that are there have their turn
constexpr seconds kLongestPatience{60};  // of the others, with rank 0; the first time less

// "4 bytes of length, then text", with a deadline.
Result<void> send_text(int fd, const std::string& text, net::Deadline deadline) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>((text.size() >> shift) & 0xff);
  bytes += text;
  for (std::string_view rest = bytes; !rest.empty();) {
    const ssize_t n = ::send(fd, rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      rest.remove_prefix(static_cast<std::size_t>(n));
      continue;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN) return fail(ErrorCode::Io, "send: {}", errno_text(errno));
    const auto ready = net::wait_ready(fd, POLLOUT, deadline);
    if (!ready) return tl::unexpected(ready.error());
    if (!*ready) return fail(ErrorCode::Timeout, "the peer does not read");
  }
  return {};
}

Result<std::string> receive_bytes(int fd, std::size_t size, net::Deadline deadline) {
  std::string bytes(size, '\0');
  for (std::size_t have = 0; have < size;) {
    const ssize_t n = ::recv(fd, bytes.data() + have, size - have, MSG_DONTWAIT);
    if (n > 0) {
      have += static_cast<std::size_t>(n);
      continue;
    }
    if (n == 0) return fail(ErrorCode::Io, "the peer has closed the connection");
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return fail(ErrorCode::Io, "recv: {}", errno_text(errno));
    const auto ready = net::wait_ready(fd, POLLIN, deadline);
    if (!ready) return tl::unexpected(ready.error());
    if (!*ready) return fail(ErrorCode::Timeout, "the peer says nothing");
  }
  return bytes;
}

// Nullopt if it is not there yet.
std::optional<std::uint32_t> length_of(std::string_view bytes) {
  if (bytes.size() < 4) return std::nullopt;
  std::uint32_t size = 0;
  for (const char c : bytes.substr(0, 4)) size = (size << 8) | static_cast<unsigned char>(c);
  return size;
}

Result<std::string> receive_text(int fd, net::Deadline deadline) {
  const auto head = receive_bytes(fd, 4, deadline);
  if (!head) return head;
  const std::uint32_t size = length_of(*head).value_or(0);
  if (size > kLongestMessage) return fail(ErrorCode::Corrupt, "something else than a rank answers");
  return receive_bytes(fd, size, deadline);
}

std::string nonce() {
  const net::Secret random = value_or_throw(net::Secret::generate());
  return net::sha256_hex({reinterpret_cast<const char*>(random.bytes().data()), random.bytes().size()}).substr(0, 32);
}

// "WORD STEP KEY NONCE REST"
struct Message {
  std::string word, step, key, nonce, rest;
};
std::string to_text(const Message& message) {
  std::string text;
  text.reserve(message.word.size() + message.step.size() + message.key.size() + message.nonce.size() +
               message.rest.size() + 4);
  for (const std::string* part : {&message.word, &message.step, &message.key, &message.nonce})
    text.append(*part).append(" ");
  return text.append(message.rest);
}
Message from_text(std::string_view text) {
  Message message;
  for (std::string* part : {&message.word, &message.step, &message.key, &message.nonce}) {
    *part = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), part->size() + 1));
  }
  message.rest = text;
  return message;
}

class MungeExchange final : public Exchange {
 public:
  MungeExchange(const cluster::Detected& said, std::shared_ptr<Munge> munge)
      : munge_(std::move(munge)),
        rank_(said.rank),
        size_(said.size),
        on_first_host_(said.node_rank == 0),
        host_(said.hosts.front()),
        step_(net::sha256_hex(said.job).substr(0, 32)) {
    ports_ = munge_ports(said.job);
  }

  ~MungeExchange() override { stop_serving(); }

  std::string_view name() const override { return "MUNGE"; }
  std::size_t longest_value() const override { return 4096; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Result<std::string> share(const std::string& key, const std::optional<std::string>& mine,
                            net::Deadline deadline) override {
    if (!mine) return ask(key, deadline);
    if (!on_first_host_) {
      return fail(ErrorCode::Unavailable,
                  "rank 0 is not on the step's first host ({}), where the others look for it -- start by "
                  "`srun --mpi=pmi2`, or with --distribution=block",
                  host_);
    }
    auto listener = listen();
    if (!listener) return tl::unexpected(listener.error());
    // In the background: who has been told goes on to meet, and who does not come is named there.
    stop_serving();
    stop_ = sys::UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!stop_) return fail(ErrorCode::Io, "eventfd: {}", errno_text(errno));
    const sys::SignalsBlocked blocked;
    server_ = std::thread([this, key, value = *mine, deadline, held = std::move(*listener)]() mutable {
      const net::Wiping wiping(value);
      serve(held.get(), key, value, deadline);
    });
    return *mine;
  }

  void wait_told() override {
    if (server_.joinable()) server_.join();
  }

 private:
  Result<sys::UniqueFd> listen() const {
    std::string reasons;
    for (const std::uint16_t port : ports_) {
      for (const char* const any : {"::", "0.0.0.0"}) {
        auto listener = net::listen_on({{any, port}, {}});
        if (listener) return listener;
        reasons = listener.error().what();
        if (listener.error().context().system_error == EADDRINUSE) break;
      }
    }
    return fail(ErrorCode::Unavailable,
                "none of the {} ports for this job is free on this host, the last one because: {}", kPorts, reasons);
  }

  void stop_serving() {
    if (!server_.joinable()) return;
    ::eventfd_write(stop_.get(), 1);
    server_.join();
  }

  // One that has come to rank 0's port.
  struct Asker {
    net::RateLimiter::PendingConnection incoming;
    net::Deadline until = net::deadline_in(kPatience);
    std::string said = {};  // 4 bytes of length, and its credential
    std::string rank = {};  // which it is, once it has been told
  };

  // Until all others have been told, or nobody waits any more. Many at a time: who says nothing holds up nobody.
  void serve(int listener, const std::string& key, const std::string& value, net::Deadline deadline) const {
    net::RateLimiter limiter(listener);
    std::list<Asker> askers;  // the first that came is in front
    std::set<std::string> told;
    while (told.size() + 1 < static_cast<std::size_t>(size_) && !net::passed(deadline)) {
      const auto paused_until = limiter.paused_until();
      net::Deadline wake = paused_until ? std::min(deadline, *paused_until) : deadline;
      std::vector<pollfd> polled = {{stop_.get(), POLLIN, 0}, {paused_until ? -1 : listener, POLLIN, 0}};
      for (const Asker& asker : askers) {
        polled.push_back({asker.incoming.socket.get(), POLLIN, 0});
        wake = std::min(wake, asker.until);
      }
      if (::poll(polled.data(), polled.size(), net::poll_timeout(wake)) < 0 && errno != EINTR) return;
      if (polled[0].revents != 0) return;
      auto at = polled.begin() + 2;
      for (auto asker = askers.begin(); asker != askers.end(); ++at) {
        Result<bool> over = false;
        if (at->revents != 0) {
          over = hear(*asker, key, value);
        } else if (net::passed(asker->until)) {
          over = fail(ErrorCode::Timeout, "it says nothing");
        }
        if (over && !*over) {
          ++asker;
        } else {
          if (over) {
            told.insert(asker->rank);
            limiter.record_success(asker->incoming.source);
          } else {
            record_failure(limiter, *asker, over.error());
          }
          asker = askers.erase(asker);
        }
      }
      for (int i = 0; i < kAtOnce; ++i) {
        auto incoming = limiter.next();
        if (!incoming) break;
        askers.push_back({*std::move(incoming)});
        if (askers.size() <= kMostAskers) continue;
        const auto idle = net::pick_eviction(askers, [](const Asker& asker) { return !asker.rank.empty(); });
        record_failure(limiter, *idle, Error(ErrorCode::Timeout, "too many others came"));
        askers.erase(idle);
      }
    }
  }

  static void record_failure(net::RateLimiter& limiter, const Asker& asker, const Error& why) {
    limiter.record_failure(asker.incoming.source);
    log::debug("comm", "somebody at {} was not told where to meet: {}", net::describe_peer(asker.incoming.socket.get()),
               why.what());
  }

  // True once it has been told and has said that it has it; otherwise it comes again.
  Result<bool> hear(Asker& asker, const std::string& key, const std::string& value) const {
    char bytes[4096];
    const ssize_t got = ::recv(asker.incoming.socket.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return false;
    if (got <= 0) return fail(ErrorCode::Io, "{}", got == 0 ? "it has closed the connection" : errno_text(errno));
    if (!asker.rank.empty()) return true;
    asker.said.append(bytes, static_cast<std::size_t>(got));
    const auto size = length_of(asker.said);
    if (size > kLongestMessage) return fail(ErrorCode::Corrupt, "it is something else than a rank");
    if (!size || asker.said.size() < 4 + *size) return false;
    const auto text = munge_->open(asker.said.substr(4, *size));
    if (!text) return tl::unexpected(text.error());
    const Message asked = from_text(*text);
    if (asked.word != "ask" || asked.step != step_ || asked.key != key || asked.rest.empty())
      return fail(ErrorCode::Mismatch, "it belongs to another job, or to another of its joins");
    Message give{"give", step_, key, asked.nonce, value};
    std::string plain = to_text(give);
    const auto reply = munge_->seal(plain);
    net::wipe(plain);
    net::wipe(give.rest);
    if (!reply) return tl::unexpected(reply.error());
    // A fresh socket takes so little at once.
    if (auto sent = send_text(asker.incoming.socket.get(), *reply, net::deadline_in({})); !sent)
      return tl::unexpected(sent.error());
    asker.rank = asked.rest;
    return false;
  }

  Result<std::string> ask(const std::string& key, net::Deadline deadline) const {
    std::string why;
    seconds patience{3};  // a stranger at one of the ports, who says nothing, holds us up for so long
    for (auto pause = milliseconds(20);; pause = std::min(pause * 2, milliseconds(500))) {
      for (const std::uint16_t port : ports_) {
        auto value = ask_at(port, key, std::min(deadline, net::deadline_in(patience)));
        if (value) return value;
        if (value.error().code() == ErrorCode::Timeout) patience = std::min(patience * 2, kLongestPatience);
        if (value.error().code() != ErrorCode::PeerLost) why = fmt::format("port {}: {}", port, value.error().what());
      }
      if (std::chrono::steady_clock::now() + pause >= deadline) {
        return fail(
            ErrorCode::Timeout,
            "rank 0 did not answer at {}, the step's first host, at any of the job's {} ports{}{} -- does every "
            "task call join, and does a firewall stand between?",
            host_, kPorts, why.empty() ? "" : "; ", why);
      }
      std::this_thread::sleep_for(pause);
    }
  }

  // PeerLost: nobody listens there (yet).
  Result<std::string> ask_at(std::uint16_t port, const std::string& key, net::Deadline deadline) const {
    const auto connection = net::connect_once({{host_, port}, {}}, deadline);
    if (!connection) {
      if (connection.error().kind == net::ConnectFailure::Refused)
        return fail(ErrorCode::PeerLost, "{}", connection.error().error.what());
      return tl::unexpected(connection.error().error);
    }
    const std::string once = nonce();
    const auto credential = munge_->seal(to_text({"ask", step_, key, once, std::to_string(rank_)}));
    if (!credential) return credential;
    if (auto sent = send_text(connection->get(), *credential, deadline); !sent) return tl::unexpected(sent.error());
    const auto reply = receive_text(connection->get(), deadline);
    if (!reply) return reply;
    auto text = munge_->open(*reply);
    if (!text) return text;
    const net::Wiping wiping(*text);
    Message given = from_text(*text);
    if (given.word != "give" || given.step != step_ || given.key != key || given.nonce != once)
      return fail(ErrorCode::Mismatch, "another job answers");
    constexpr char kThanks = '+';
    (void)::send(connection->get(), &kThanks, 1, MSG_NOSIGNAL);
    return std::move(given.rest);
  }

  std::shared_ptr<Munge> munge_;
  int rank_;
  int size_;
  bool on_first_host_;
  std::string host_;
  std::string step_;
  std::vector<std::uint16_t> ports_;
  sys::UniqueFd stop_;
  std::thread server_;
};

}  // namespace

std::vector<std::uint16_t> munge_ports(std::string_view job) {
  const std::string digits = net::sha256_hex(job).substr(0, 6);
  const std::uint32_t start = static_cast<std::uint32_t>(std::stoul(digits, nullptr, 16)) % kPortSpan;
  std::vector<std::uint16_t> ports;
  // Spread, so that a neighbour's ports are not ours shifted by one.
  for (std::uint32_t i = 0; i < kPorts; ++i)
    ports.push_back(static_cast<std::uint16_t>(kFirstPort + (start + 1237 * i) % kPortSpan));
  return ports;
}

Result<std::shared_ptr<Exchange>> open_munge(const cluster::Detected& said, const cluster::Environment& environment) {
  if (said.hosts.empty() || !said.node_rank)
    return fail(ErrorCode::Unavailable, "SLURM_STEP_NODELIST and SLURM_NODEID do not say where rank 0 is");
  const auto set = environment.find("SLURM_CONF");
  const std::string path = set != environment.end() ? set->second : "/etc/slurm/slurm.conf";
  std::string socket;
  if (const auto conf = sys::read_file(path, {.max_bytes = 16 << 20})) socket = munge_socket_of(conf->text());
  auto munge = Munge::load(socket);
  if (!munge) return tl::unexpected(munge.error());
  // A daemon that does not answer is found out now, where there is advice for it.
  if (const auto sealed = (*munge)->seal("hello"); !sealed) return tl::unexpected(sealed.error());
  return std::shared_ptr<Exchange>(std::make_shared<MungeExchange>(said, *std::move(munge)));
}

}  // namespace cohort::meet
