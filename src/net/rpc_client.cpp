#include "base/log.h"
#include "base/records.h"
#include "net/reach.h"
#include "net/rpc.h"
#include "net/socket.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

namespace cohort::net {
namespace {

using std::chrono::milliseconds;

std::string framed(std::uint8_t method, std::uint64_t id, std::string_view body) {
  codec::Writer out;
  return out.number(method).number(id).take().append(body);
}

}  // namespace

// Whoever waits first reads for all: calls are numbered, and one of the waiting threads (the reader) polls the
// connection and hands the answers out. So there is no thread of our own, and no wait holds another one up.
struct RpcClient::Impl {
  Impl(SecureConnection connected, std::string called, std::string at)
      : connection(std::move(connected)),
        name(std::move(called)),
        place(std::move(at)),
        wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        process(::getpid()) {
    if (!wake) raise(ErrorCode::Io, "{} client: eventfd: {}", name, errno_text(errno));
  }

  std::uint64_t begin(std::uint8_t method, std::string_view body) {
    if (::getpid() != process) {
      raise(ErrorCode::InvalidArgument,
            "the {} at {} was connected by process {}, and this is process {}, forked from it -- connect again "
            "after fork",
            name, place, process, ::getpid());
    }
    const std::lock_guard lock(mutex);
    if (dead) throw *dead;
    const std::uint64_t id = ++last_id;
    const auto entry = pending.emplace(id, std::nullopt).first;
    const auto queued = connection.queue(framed(method, id, body));
    if (!queued) {
      pending.erase(entry);
      // The call itself was refused, before anything was sent; or the connection is gone.
      if (queued.error().code() != ErrorCode::InvalidArgument) die(queued.error());
      throw queued.error();
    }
    if (reading && connection.wants_write()) wake_reader();
    return id;
  }

  std::string finish(std::uint64_t id, Deadline deadline) {
    std::unique_lock lock(mutex);
    const auto entry = pending.find(id);
    if (entry == pending.end()) raise(ErrorCode::Internal, "{} client: call {} is finished twice", name, id);
    while (!entry->second && !dead) {
      if (passed(deadline)) {
        pending.erase(entry);
        raise(ErrorCode::Timeout,
              "the {} server at {} does not answer -- is its process stopped or its host overloaded?", name, place);
      }
      if (reading) {
        answered.wait_until(lock, deadline);
      } else {
        read_for_all(lock, deadline);
      }
    }
    std::optional<std::string> answer = std::move(entry->second);
    pending.erase(entry);
    if (answer) return *std::move(answer);
    throw *dead;
  }

  void read_for_all(std::unique_lock<std::mutex>& lock, Deadline deadline) {
    reading = true;
    pollfd entries[] = {{connection.fd(), static_cast<short>(connection.wants_write() ? POLLIN | POLLOUT : POLLIN), 0},
                        {wake.get(), POLLIN, 0}};
    lock.unlock();
    (void)::poll(entries, 2, poll_timeout(deadline));
    lock.lock();
    reading = false;
    std::uint64_t ignored = 0;
    (void)!::read(wake.get(), &ignored, sizeof ignored);
    const auto advanced = connection.advance();
    while (const auto message = connection.next_message()) {
      codec::Reader in(*message);
      const auto id = in.number<std::uint64_t>();
      if (!id) {
        die(id.error());
        break;
      }
      const auto found = pending.find(*id);
      if (found == pending.end()) continue;  // nobody waits for it any more
      found->second.emplace(in.rest());
    }
    if (!advanced) {
      die(advanced.error());
    } else if (connection.at_end()) {
      die(Error(ErrorCode::PeerLost, "it has closed"));
    }
    answered.notify_all();
  }

  void die(const Error& error) {
    if (!dead) {
      dead = Error(ErrorCode::PeerLost, fmt::format("{} at {} lost: {} -- has the process that serves it ended?", name,
                                                    place, error.what()));
    }
    answered.notify_all();
  }

  void wake_reader() {
    const std::uint64_t one = 1;
    (void)!::write(wake.get(), &one, sizeof one);
  }

  std::mutex mutex;
  std::condition_variable answered;
  SecureConnection connection;
  const std::string name;
  const std::string place;
  const sys::UniqueFd wake;
  const pid_t process;
  bool reading = false;
  std::uint64_t last_id = 0;
  std::map<std::uint64_t, std::optional<std::string>> pending;  // and answers that nobody has taken yet
  std::optional<Error> dead;
};

RpcClient::RpcClient(SecureConnection connection, std::string name, std::string place)
    : impl_(std::make_unique<Impl>(std::move(connection), std::move(name), std::move(place))) {}
RpcClient::~RpcClient() = default;

std::string RpcClient::call(std::uint8_t method, std::string_view body, Deadline deadline) {
  return finish(begin(method, body), deadline);
}
std::uint64_t RpcClient::begin(std::uint8_t method, std::string_view body) { return impl_->begin(method, body); }
std::string RpcClient::finish(std::uint64_t call, Deadline deadline) { return impl_->finish(call, deadline); }

void RpcClient::close() noexcept {
  if (::getpid() == impl_->process) (void)::shutdown(impl_->connection.fd(), SHUT_RDWR);
}

void RpcClient::say(std::uint8_t method, std::string_view body, Deadline deadline) noexcept {
  if (::getpid() != impl_->process || impl_->dead) return;
  (void)impl_->connection.send(framed(method, 0, body), deadline);
}

namespace {

/// One attempt: why not, and whether to try again.
struct Failure {
  Error error;
  bool again = false;
};

std::optional<Failure> try_once(const RpcPlace& place, Deadline deadline,
                                const std::function<void(SecureConnection, const std::string&, Deadline)>& greet) {
  std::optional<SecureConnection> connection;
  std::string at;
  if (place.endpoints.size() == 1) {
    auto socket = connect_once(place.endpoints[0], deadline);
    if (!socket) {
      const auto kind = socket.error().kind;
      return Failure{socket.error().error, kind == ConnectFailure::Refused || kind == ConnectFailure::NoAnswer};
    }
    auto made = place.secret
                    ? SecureConnection::with_secret(*std::move(socket), Role::Client, *place.secret, place.secure)
                    : SecureConnection::same_user(*std::move(socket), Role::Client, place.secure);
    if (!made) return Failure{made.error(), false};
    if (const auto shaken = made->handshake(deadline); !shaken)
      return Failure{shaken.error(), shaken.error().code() != ErrorCode::InvalidArgument};
    connection = *std::move(made);
    at = to_string(place.endpoints[0]);
  } else {
    auto made = reach(place.endpoints, *place.secret, place.secure, deadline);
    if (!made) return Failure{made.error(), true};
    at = made->peer();
    connection = *std::move(made);
  }
  try {
    greet(*std::move(connection), at, deadline);
    return std::nullopt;
  } catch (const Error& error) {
    const bool again = error.code() == ErrorCode::Unavailable || error.code() == ErrorCode::PeerLost ||
                       error.code() == ErrorCode::Timeout;
    return Failure{error, again};
  }
}

}  // namespace

void rpc_connect(const RpcPlace& place, Deadline deadline,
                 const std::function<void(SecureConnection, const std::string&, Deadline)>& greet) {
  const auto begun = std::chrono::steady_clock::now();
  std::minstd_rand random(std::random_device{}());
  milliseconds pause{2};
  std::optional<Error> reason;
  while (true) {
    // One lost packet must not use up all the time there is.
    const auto failed = try_once(place, std::min(deadline, deadline_in(std::chrono::seconds(15))), greet);
    if (!failed) return;
    if (!failed->again) throw failed->error;
    log::debug("net", "{}; trying again", failed->error.what());
    // What somebody said counts for more than that the last attempt had no time to hear it.
    if (!reason || failed->error.code() != ErrorCode::Timeout) reason = failed->error;
    // Those that were started together should not knock together.
    const milliseconds jittered(pause.count() / 2 + static_cast<int>(random() % static_cast<unsigned>(pause.count())));
    if (std::chrono::steady_clock::now() + jittered >= deadline) {
      const auto waited = std::chrono::steady_clock::now() - begun;
      raise(ErrorCode::Timeout,
            "nobody met us at {} within {:.1f} s: {} -- is the process that listens there (rank 0, or `cohort run`) "
            "running, and the address right?",
            place.endpoints.size() == 1 ? to_string(place.endpoints[0]) : "any of its addresses",
            std::chrono::duration<double>(waited).count(), reason->what());
    }
    std::this_thread::sleep_for(jittered);
    pause = std::min(pause * 2, milliseconds(400));
  }
}

}  // namespace cohort::net
