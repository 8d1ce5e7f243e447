#include "store/client.h"

#include "base/log.h"
#include "net/reach.h"
#include "net/secure_connection.h"
#include "net/socket.h"
#include "store/protocol.h"
#include "store/table.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace cohort::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The server ends a wait at its deadline and says what is missing; this much later it is not there any more.
constexpr seconds kGrace{10};

// Whoever waits first reads for all: requests are numbered, and one of the waiting threads (the reader) polls the
// connection and hands the replies out. So there is no thread of our own, and no wait holds another one up.
class RemoteStore final : public MeetingStore {
 public:
  RemoteStore(net::SecureConnection connection, std::string place, milliseconds call_timeout)
      : connection_(std::move(connection)),
        place_(std::move(place)),
        call_timeout_(call_timeout),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        process_(::getpid()) {
    if (!wake_) raise(ErrorCode::Io, "store client: eventfd: {}", errno_text(errno));
  }

  ~RemoteStore() override {
    if (::getpid() != process_ || dead_) return;
    Request request;
    request.op = Op::GoodBye;
    (void)connection_.send(encode(request), net::deadline_in(seconds(1)));
  }

  void hello(const std::string& meeting, Deadline deadline) {
    Request request;
    request.op = Op::Hello;
    request.amount = kProtocolVersion;
    request.value = meeting;
    (void)call(std::move(request), deadline);
  }

  void set(std::string_view key, std::string_view value) override {
    value_or_throw(check_sizes(key, value));
    Request request = make(Op::Set, key);
    request.value = value;
    (void)call(std::move(request));
  }

  std::string get(std::string_view key, Deadline deadline) override {
    return call_waiting(make(Op::Wait, key), deadline).value.value_or(std::string());
  }

  std::optional<std::string> try_get(std::string_view key) override { return call(make(Op::TryGet, key)).value; }

  void wait(std::span<const std::string> keys, Deadline deadline) override {
    if (keys.empty()) return;
    (void)call_waiting(make(Op::Wait, keys), deadline);
  }

  std::int64_t add(std::string_view key, std::int64_t amount) override {
    Request request = make(Op::Add, key);
    request.amount = amount;
    return call(std::move(request)).number;
  }

  std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                             std::string_view desired) override {
    value_or_throw(check_sizes(key, desired));
    if (expected) value_or_throw(check_sizes(key, *expected));
    Request request = make(Op::CompareAndSet, key);
    if (expected) request.expected = std::string(*expected);
    request.value = desired;
    return call(std::move(request)).value;
  }

  bool delete_key(std::string_view key) override { return call(make(Op::Delete, key)).number == 1; }

  Found get_any(std::span<const std::string> keys, Deadline deadline) override {
    if (keys.empty()) raise(ErrorCode::InvalidArgument, "store: get_any of no keys");
    Reply reply = call_waiting(make(Op::GetAny, keys), deadline);
    return {static_cast<std::size_t>(reply.number), std::move(reply.value).value_or(std::string())};
  }

  void leave_will(std::string_view key, std::string_view value) override {
    value_or_throw(check_sizes(key, value));
    Request request = make(Op::LeaveWill, key);
    request.value = value;
    (void)call(std::move(request));
  }

  void withdraw_will(std::string_view key) override { (void)call(make(Op::WithdrawWill, key)); }

 private:
  static Request make(Op op, std::string_view key) {
    value_or_throw(check_sizes(key, {}));
    Request request;
    request.op = op;
    request.keys.emplace_back(key);
    return request;
  }
  static Request make(Op op, std::span<const std::string> keys) {
    if (keys.size() > kMostKeys)
      raise(ErrorCode::InvalidArgument, "store: {} keys in one call, at most {}", keys.size(), kMostKeys);
    Request request;
    request.op = op;
    for (const std::string& key : keys) value_or_throw(check_sizes(key, {}));
    request.keys.assign(keys.begin(), keys.end());
    return request;
  }

  Reply call(Request request) { return call(std::move(request), net::deadline_in(call_timeout_)); }

  Reply call(Request request, Deadline deadline) {
    Reply reply = exchange(std::move(request), deadline);
    if (reply.error) throw *reply.error;
    return reply;
  }

  Reply call_waiting(Request request, Deadline deadline) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    request.timeout_ms = static_cast<std::uint64_t>(std::max<std::int64_t>(left.count(), 0));
    const Deadline answered =
        deadline > Deadline::max() - kGrace ? deadline : std::max(deadline, net::deadline_in({})) + kGrace;
    Reply reply = exchange(std::move(request), answered);
    if (!reply.error) return reply;
    if (reply.error->code() == ErrorCode::Timeout) {
      raise(ErrorCode::Timeout, "store at {}: nobody set {} in time", place_, list_of_keys(reply.keys));
    }
    throw *reply.error;
  }

  struct Slot {
    std::optional<Reply> reply;
  };

  Reply exchange(Request request, Deadline deadline) {
    if (::getpid() != process_) {
      raise(ErrorCode::InvalidArgument,
            "the store at {} was connected by process {}, and this is process {}, forked from it -- connect again "
            "after fork",
            place_, process_, ::getpid());
    }
    std::unique_lock lock(mutex_);
    if (dead_) throw *dead_;
    Slot slot;
    request.id = ++last_id_;
    const auto entry = pending_.emplace(request.id, &slot).first;
    const auto queued = connection_.queue(encode(request));
    if (!queued) {
      pending_.erase(entry);
      // The request itself was refused, before anything was sent; or the connection is gone.
      if (queued.error().code() != ErrorCode::InvalidArgument) die(queued.error());
      throw queued.error();
    }
    if (reading_ && connection_.wants_write()) wake_reader();
    while (!slot.reply && !dead_) {
      if (net::passed(deadline)) {
        pending_.erase(request.id);
        raise(ErrorCode::Timeout,
              "the store server at {} does not answer -- is its process stopped or its host overloaded?", place_);
      }
      if (reading_) {
        replied_.wait_until(lock, deadline);
      } else {
        read_for_all(lock, deadline);
      }
    }
    if (slot.reply) return *std::move(slot.reply);
    throw *dead_;
  }

  void read_for_all(std::unique_lock<std::mutex>& lock, Deadline deadline) {
    reading_ = true;
    pollfd entries[] = {
        {connection_.fd(), static_cast<short>(connection_.wants_write() ? POLLIN | POLLOUT : POLLIN), 0},
        {wake_.get(), POLLIN, 0}};
    lock.unlock();
    (void)::poll(entries, 2, net::poll_timeout(deadline));
    lock.lock();
    reading_ = false;
    std::uint64_t ignored = 0;
    (void)!::read(wake_.get(), &ignored, sizeof ignored);
    const auto advanced = connection_.advance();
    while (const auto message = connection_.next_message()) {
      auto reply = decode_reply(*message);
      if (!reply) {
        die(reply.error());
        break;
      }
      const auto found = pending_.find(reply->id);
      if (found == pending_.end()) continue;  // nobody waits for it any more
      found->second->reply = *std::move(reply);
      pending_.erase(found);
    }
    if (!advanced) {
      die(advanced.error());
    } else if (connection_.at_end()) {
      die(Error(ErrorCode::PeerLost, "it has closed"));
    }
    replied_.notify_all();
  }

  void die(const Error& error) {
    if (!dead_) {
      dead_ = Error(ErrorCode::PeerLost,
                    fmt::format("store at {} lost: {} -- has the process that serves it ended?", place_, error.what()));
    }
    replied_.notify_all();
  }

  void wake_reader() {
    const std::uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof one);
  }

  std::mutex mutex_;
  std::condition_variable replied_;
  net::SecureConnection connection_;
  const std::string place_;
  const milliseconds call_timeout_;
  const sys::UniqueFd wake_;
  const pid_t process_;
  bool reading_ = false;
  std::uint64_t last_id_ = 0;
  std::map<std::uint64_t, Slot*> pending_;
  std::optional<Error> dead_;
};

// One attempt: connected, proved and greeted, or why not.
struct Attempt {
  std::shared_ptr<RemoteStore> store;
  std::optional<Error> error;
  bool again = false;
};

const net::SecureOptions kSecure{.purpose = "store", .longest_message = kLongestMessage};

Attempt greet(net::SecureConnection connection, std::string place, const StoreClientOptions& options,
              net::Deadline deadline) {
  try {
    auto store = std::make_shared<RemoteStore>(std::move(connection), std::move(place), options.call_timeout);
    store->hello(options.meeting, deadline);
    return {std::move(store), {}, false};
  } catch (const Error& error) {
    const bool again = error.code() == ErrorCode::Unavailable || error.code() == ErrorCode::PeerLost ||
                       error.code() == ErrorCode::Timeout;
    return {{}, error, again};
  }
}

Attempt attempt(const StoreClientOptions& options, net::Deadline deadline) {
  auto socket = net::connect_once(options.endpoint, deadline);
  if (!socket) {
    const auto kind = socket.error().kind;
    return {{}, socket.error().error, kind == net::ConnectFailure::Refused || kind == net::ConnectFailure::NoAnswer};
  }
  auto connection = options.secret ? net::SecureConnection::with_secret(*std::move(socket), net::Role::Client,
                                                                        *options.secret, kSecure)
                                   : net::SecureConnection::same_user(*std::move(socket), net::Role::Client, kSecure);
  if (!connection) return {{}, connection.error(), false};
  if (const auto shaken = connection->handshake(deadline); !shaken) {
    return {{}, shaken.error(), shaken.error().code() != ErrorCode::InvalidArgument};
  }
  return greet(*std::move(connection), net::to_string(options.endpoint), options, deadline);
}

Attempt attempt_at_any(std::span<const net::Endpoint> endpoints, const StoreClientOptions& options,
                       net::Deadline deadline) {
  auto connection = net::reach(endpoints, *options.secret, kSecure, deadline);
  if (!connection) return {{}, connection.error(), true};
  std::string place = connection->peer();
  return greet(*std::move(connection), std::move(place), options, deadline);
}

/// `place`: for messages.
template <class Try>
std::shared_ptr<MeetingStore> keep_trying(std::string_view place, net::Deadline deadline, Try try_once) {
  const auto begun = std::chrono::steady_clock::now();
  std::minstd_rand random(std::random_device{}());
  milliseconds pause{2};
  std::optional<Error> reason;
  while (true) {
    // One lost packet must not use up all the time there is.
    Attempt tried = try_once(std::min(deadline, net::deadline_in(seconds(15))));
    if (tried.store) return std::move(tried.store);
    if (!tried.again) throw *tried.error;
    log::debug("store", "{}; trying again", tried.error->what());
    // What somebody said counts for more than that the last attempt had no time to hear it.
    if (!reason || tried.error->code() != ErrorCode::Timeout) reason = tried.error;
    // Ranks that were started together should not knock together.
    const milliseconds jittered(pause.count() / 2 + static_cast<int>(random() % static_cast<unsigned>(pause.count())));
    if (std::chrono::steady_clock::now() + jittered >= deadline) {
      const auto waited = std::chrono::steady_clock::now() - begun;
      raise(ErrorCode::Timeout,
            "nobody met us at {} within {:.1f} s: {} -- is the process that listens there (rank 0, or `cohort run`) "
            "running, and the address right?",
            place, std::chrono::duration<double>(waited).count(), reason->what());
    }
    std::this_thread::sleep_for(jittered);
    pause = std::min(pause * 2, milliseconds(400));
  }
}

}  // namespace

std::shared_ptr<MeetingStore> connect_store(const StoreClientOptions& options, net::Deadline deadline) {
  const std::string place = net::to_string(options.endpoint);
  if (!options.endpoint.is_unix() && !options.secret) {
    raise(ErrorCode::InvalidArgument, "connecting to the store at {} needs a secret", place);
  }
  return keep_trying(place, deadline, [&](net::Deadline limit) { return attempt(options, limit); });
}

std::shared_ptr<MeetingStore> connect_store_at_any(std::span<const net::Endpoint> endpoints,
                                                   const StoreClientOptions& options, net::Deadline deadline) {
  if (!options.secret)
    raise(ErrorCode::InvalidArgument, "connecting to the store at one of its addresses needs a secret");
  return keep_trying("any of its addresses", deadline,
                     [&](net::Deadline limit) { return attempt_at_any(endpoints, options, limit); });
}

std::shared_ptr<MeetingStore> connect_tcp_store(const std::string& host, std::uint16_t port, const net::Secret& secret,
                                                net::Deadline deadline) {
  return connect_store({.endpoint = {{host, port}, {}}, .secret = secret}, deadline);
}

}  // namespace cohort::store
