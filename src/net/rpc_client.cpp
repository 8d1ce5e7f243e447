#include "base/log.h"
#include "base/records.h"
#include "net/rpc.h"
#include "net/secure_connection.h"
#include "net/shared_calls.h"
#include "net/socket.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::net {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::nanoseconds kSlice =
    milliseconds(10);  // longest wait in shared memory between two checks of the connection

std::string framed(std::uint8_t method, std::uint64_t id, std::string_view body) {
  codec::Writer out;
  return out.number(method).number(id).take().append(body);
}

}  // namespace

// Calls are numbered, and the first waiting thread becomes the reader, which polls the connection and distributes the
// answers. So the client needs no thread, and no wait holds up another. For a call in shared memory, each thread waits
// by itself.
struct RpcClient::Impl : std::enable_shared_from_this<RpcClient::Impl> {
  /// A call whose answer has not been taken yet.
  struct Pending {
    std::optional<std::string> answer = {};   // received over the connection, or copied
    std::optional<SharedCallId> shared = {};  // the call in shared memory
    bool queued = false;                      // waits for space in shared memory
    bool watched = false;                     // a thread waits for it in shared memory
    std::uint8_t method = 0;
    std::string body = {};
    std::size_t room = 0;
  };
  using Calls = std::map<std::uint64_t, Pending>;

  Impl(SecureConnection connected, std::string called, std::string at)
      : connection(std::move(connected)),
        name(std::move(called)),
        place(std::move(at)),
        wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        process(::getpid()) {
    if (!wake) raise(ErrorCode::Io, "{} client: eventfd: {}", name, errno_text(errno));
  }

  std::uint64_t begin(std::uint8_t method, std::string_view body, std::size_t room) {
    if (::getpid() != process) {
      raise(ErrorCode::InvalidArgument,
            "the {} at {} was connected by process {}, and this is process {}, forked from it -- connect again "
            "after fork",
            name, place, process, ::getpid());
    }
    const std::lock_guard lock(mutex);
    if (dead) throw *dead;
    const std::uint64_t id = ++last_id;
    const auto entry = pending.emplace(id, Pending{}).first;
    if (shared && SharedCallsClient::fits(body.size(), room)) {
      if (queue.empty() && submit(entry->second, method, body, room)) return id;
      entry->second = {.queued = true, .method = method, .body = std::string(body), .room = room};
      queue.push_back(id);
      return id;
    }
    const auto queued = connection.queue(framed(method, id, body));
    if (!queued) {
      pending.erase(entry);
      // Either the call was refused before anything was sent, or the connection is gone.
      if (queued.error().code() != ErrorCode::InvalidArgument) die(queued.error());
      throw queued.error();
    }
    if (reading && connection.wants_write()) wake_reader();
    return id;
  }

  RpcAnswer finish(std::uint64_t id, Deadline deadline) {
    std::unique_lock lock(mutex);
    const auto entry = pending.find(id);
    if (entry == pending.end()) raise(ErrorCode::Internal, "{} client: call {} is finished twice", name, id);
    Pending& call = entry->second;
    while (true) {
      // Read the count before checking for the answer, so that no answer is missed.
      const std::uint32_t seen = shared ? shared->answers() : 0;
      if (call.queued) submit_queued(true);
      const auto state = call.shared ? shared->state(*call.shared) : SharedCallsClient::State::Elsewhere;
      if (!call.answer && state == SharedCallsClient::State::Answered) {
        auto answer = take_shared(entry);
        if (answer) return *std::move(answer);
        continue;  // the answer is invalid, and the connection is dead
      }
      if (call.answer || dead) break;
      if (passed(deadline)) {
        if (call.shared) abandoned.push_back(*call.shared);
        std::erase(queue, id);
        pending.erase(entry);
        raise(ErrorCode::Timeout,
              "the {} server at {} does not answer -- is its process stopped or its host overloaded?", name, place);
      }
      if (call.queued || state == SharedCallsClient::State::UnderWay) {
        call.watched = true;
        lock.unlock();
        const bool any = shared->wait(seen, std::min(kSlice, time_left(deadline)));
        lock.lock();
        call.watched = false;
        if (!any && !reading) read_arrived();
      } else if (reading) {
        answered.wait_until(lock, deadline);
      } else {
        read_for_all(lock, deadline);
      }
    }
    std::optional<std::string> answer = std::move(call.answer);
    if (call.shared) free_shared(*call.shared);
    pending.erase(entry);
    if (answer) return RpcAnswer(*std::move(answer));
    throw *dead;
  }

  // ---- shared memory; with the lock ----

  bool submit(Pending& call, std::uint8_t method, std::string_view body, std::size_t room) {
    call.shared = shared->begin(method, body, room);
    if (!call.shared) {
      std::erase_if(abandoned, [this](SharedCallId id) {
        if (shared->state(id) == SharedCallsClient::State::UnderWay) return false;
        shared->free(id);
        return true;
      });
      call.shared = shared->begin(method, body, room);
    }
    if (!call.shared) return false;
    call.queued = false;
    if (shared->has_to_ring()) {
      if (const auto rung = connection.queue(framed(kRing, 0, {})); !rung) die(rung.error());
    }
    return true;
  }

  /// Submits the calls that wait for shared memory, in order. With `make_room`, copies out answers that no thread waits
  /// for, if necessary.
  void submit_queued(bool make_room) {
    while (!queue.empty()) {
      Pending& next = pending.at(queue.front());
      while (!submit(next, next.method, next.body, next.room)) {
        if (!make_room || !copy_one_away()) return;
      }
      next.body = {};
      queue.pop_front();
    }
  }

  bool copy_one_away() {
    for (auto& [id, call] : pending) {
      if (!call.shared || call.answer || call.watched ||
          shared->state(*call.shared) != SharedCallsClient::State::Answered)
        continue;
      const auto answer = shared->answer(*call.shared);
      if (!answer) return false;  // the thread that finishes the call reports the error
      call.answer.emplace(*answer);
      shared->free(*std::exchange(call.shared, std::nullopt));
      return true;
    }
    return false;
  }

  void free_shared(SharedCallId id) {
    if (shared->state(id) == SharedCallsClient::State::UnderWay) {
      abandoned.push_back(id);
      return;
    }
    shared->free(id);
    submit_queued(false);
  }

  std::optional<RpcAnswer> take_shared(Calls::iterator entry) {
    const SharedCallId id = *entry->second.shared;
    const auto answer = shared->answer(id);
    if (!answer) {
      entry->second.shared.reset();
      die(answer.error());
      return std::nullopt;
    }
    pending.erase(entry);
    if (answer->size() > kCopied) {
      return RpcAnswer(*answer, std::shared_ptr<void>(this, [self = shared_from_this(), id](void*) {
        const std::lock_guard lock(self->mutex);
        self->free_shared(id);
      }));
    }
    std::string text(*answer);
    free_shared(id);
    return RpcAnswer(std::move(text));
  }

  // ---- the connection ----

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
    read_arrived();
  }

  void read_arrived() {
    const auto advanced = connection.advance();
    while (const auto message = connection.next_message()) {
      codec::Reader in(*message);
      const auto id = in.number<std::uint64_t>();
      if (!id) {
        die(id.error());
        break;
      }
      const auto found =
          !is_shared(*id) ? pending.find(*id) : std::find_if(pending.begin(), pending.end(), [&](const auto& each) {
            return each.second.shared == SharedCallId(*id);
          });
      if (found == pending.end()) continue;  // no thread waits for this call any more
      found->second.answer.emplace(in.rest());
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
  Calls pending;
  std::optional<Error> dead;
  std::unique_ptr<SharedCallsClient> shared;  // once set, never reset
  std::deque<std::uint64_t> queue;            // calls that do not fit in shared memory yet
  std::vector<SharedCallId> abandoned;        // calls that no thread waits for any more
};

RpcClient::RpcClient(SecureConnection connection, std::string name, std::string place)
    : impl_(std::make_shared<Impl>(std::move(connection), std::move(name), std::move(place))) {}
RpcClient::~RpcClient() = default;

std::string RpcClient::call(std::uint8_t method, std::string_view body, Deadline deadline) {
  return std::string(finish(begin(method, body), deadline).body());
}
std::uint64_t RpcClient::begin(std::uint8_t method, std::string_view body, std::size_t room) {
  return impl_->begin(method, body, room);
}
RpcAnswer RpcClient::finish(std::uint64_t call, Deadline deadline) { return impl_->finish(call, deadline); }

Result<std::optional<Endpoint>> RpcClient::share_memory(const std::string& host, Deadline deadline) {
  const auto answer = value_or_throw(codec::decode<SharedMemory>(call(kShareMemory, {}, deadline)));
  if (answer.refused) return tl::unexpected(*answer.refused);
  if (!answer.unix_name.empty()) {
    if (answer.host != host) return fail(ErrorCode::Unavailable, "it is on another host, or in another container");
    Endpoint nearer;
    nearer.unix_name = answer.unix_name;
    return nearer;
  }
  const std::lock_guard lock(impl_->mutex);
  auto mapped = SharedCallsClient::map(impl_->connection.take_descriptor());
  if (!mapped) return tl::unexpected(mapped.error());
  impl_->shared = *std::move(mapped);
  return std::nullopt;
}

void RpcClient::close() noexcept {
  if (::getpid() == impl_->process) (void)::shutdown(impl_->connection.fd(), SHUT_RDWR);
}

void RpcClient::say(std::uint8_t method, std::string_view body, Deadline deadline) noexcept {
  if (::getpid() != impl_->process || impl_->dead) return;
  (void)impl_->connection.send(framed(method, 0, body), deadline);
}

namespace {

/// The reason why an attempt failed, and whether to try again.
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
  for (int attempt = 1;; ++attempt) {
    // Limit each attempt, so that one lost packet does not use up all the time.
    const auto failed = try_once(place, std::min(deadline, deadline_in(std::chrono::seconds(15))), greet);
    if (!failed) return;
    if (!failed->again) throw failed->error;
    log::debug("net", "{}; trying again", failed->error.what());
    // An earlier attempt's error says more than a timeout of the last attempt.
    if (!reason || failed->error.code() != ErrorCode::Timeout) reason = failed->error;
    // Random pauses keep clients that were started together from connecting together.
    const milliseconds jittered(pause.count() / 2 + static_cast<int>(random() % static_cast<unsigned>(pause.count())));
    if (std::chrono::steady_clock::now() + jittered >= deadline) {
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begun;
      const std::string time = waited > milliseconds(100) ? fmt::format("within {:.1f} s", waited.count())
                               : attempt == 1             ? "in the one attempt that there was time for"
                                              : fmt::format("in the {} attempts that there was time for", attempt);
      const std::string& purpose = place.secure.purpose;
      raise(ErrorCode::Timeout, "nobody met us at {} {}: {} -- is the {} running, and the address right?",
            place.endpoints.size() == 1 ? to_string(place.endpoints[0]) : "any of its addresses", time, reason->what(),
            purpose == "store" ? "process that listens there (rank 0, or `cohort run`)" : purpose);
    }
    std::this_thread::sleep_for(jittered);
    pause = std::min(pause * 2, milliseconds(400));
  }
}

}  // namespace cohort::net
