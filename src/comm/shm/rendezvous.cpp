#include "comm/shm/rendezvous.h"

#include "base/parse.h"
#include "base/records.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "rendezvous/meeting.h"

#include <fmt/ranges.h>

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <thread>

namespace cohort::comm::local {

Mesh::Mesh(int rank, std::vector<Peer> peers)
    : rank_(rank), peers_(std::move(peers)), incoming_(peers_.size()), queues_(peers_.size()) {}

Result<std::shared_ptr<sys::Mapping>> Mesh::create_segment(std::size_t bytes, std::uint32_t& id) {
  auto made = sys::create_shared_segment("cohort", bytes);  // without the lock, since this may take long
  if (!made) return tl::unexpected(made.error());
  auto mapping = std::make_shared<sys::Mapping>(std::move(made->mapping));
  const std::lock_guard lock(mutex_);
  id = ++last_segment_;
  own_.emplace(reinterpret_cast<std::uintptr_t>(mapping->data()), std::make_pair(id, mapping));
  send_locked({{Type::Segment, id, mapping->bytes()}, std::make_shared<sys::UniqueFd>(std::move(made->fd))});
  return mapping;
}

void Mesh::free_segment(std::uint32_t id) noexcept {
  const std::lock_guard lock(mutex_);
  for (auto entry = own_.begin(); entry != own_.end(); ++entry) {
    if (entry->second.first != id) continue;
    own_.erase(entry);
    break;
  }
  send_locked({{Type::Freed, id, 0}, nullptr});
}

std::optional<Location> Mesh::locate(const void* data, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto entry = own_.upper_bound(address);
  if (entry == own_.begin()) return std::nullopt;
  --entry;
  const std::uint64_t offset = address - entry->first;
  const std::size_t whole = entry->second.second->bytes();
  if (offset > whole || bytes > whole - offset) return std::nullopt;
  return Location{entry->second.first, offset};
}

void Mesh::flush() noexcept {
  if (!pending_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  bool rest = false;
  for (std::size_t peer = 0; peer < queues_.size(); ++peer) {
    flush_locked(peer);
    rest = rest || !queues_[peer].empty();
  }
  pending_.store(rest, std::memory_order_relaxed);
}

void Mesh::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (auto& queue : queues_) queue.clear();
  for (Peer& peer : peers_) peer.socket.reset();
}

void Mesh::send_locked(Outgoing outgoing) {
  if (closed_) return;
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (static_cast<int>(peer) == rank_) continue;
    queues_[peer].push_back(outgoing);
    flush_locked(peer);
    if (!queues_[peer].empty()) pending_.store(true, std::memory_order_relaxed);
  }
  announcements_.fetch_add(1, std::memory_order_release);
}

void Mesh::flush_locked(std::size_t peer) noexcept {
  auto& queue = queues_[peer];
  while (!queue.empty()) {
    Outgoing& next = queue.front();
    const ssize_t sent = sys::send_with_fd(peers_[peer].socket.get(), &next.message, sizeof next.message,
                                           next.fd ? next.fd->get() : -1, MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    // If there is no space, or too many descriptors are in flight, the message is sent later. Any other failure means
    // that the peer is gone; the operation that waits for it reports that.
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ETOOMANYREFS || errno == ENOBUFS)) return;
    if (sent < 0) {
      queue.clear();
      return;
    }
    queue.pop_front();
  }
}

Result<void> Mesh::receive(int rank, std::uint64_t announcements) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(rank)];
  while (incoming.received < announcements && !incoming.ended) {
    Message message{};
    sys::UniqueFd fd;
    const ssize_t length = sys::receive_with_fd(peers_[static_cast<std::size_t>(rank)].socket.get(), &message,
                                                sizeof message, fd, MSG_DONTWAIT);
    if (length < 0 && errno == EINTR) continue;
    if (length < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
    if (length <= 0) {
      incoming.ended = true;
      return {};
    }
    if (length != sizeof message) return fail(ErrorCode::Corrupt, "rank {} sent a message of {} bytes", rank, length);
    ++incoming.received;
    if (message.type == Type::Segment) {
      if (!fd) {
        return fail(ErrorCode::Unavailable,
                    "no descriptor left for memory of rank {} -- raise the limit of open files (ulimit -n)", rank);
      }
      Remote remote;
      remote.bytes = message.bytes;
      if (auto mapping = sys::map_shared_segment(fd.get(), message.bytes)) {
        remote.mapping = std::make_shared<sys::Mapping>(*std::move(mapping));  // needs no descriptor any more
      } else {
        remote.fd = std::move(fd);
      }
      incoming.segments.insert_or_assign(message.segment, std::move(remote));
    } else if (message.type == Type::Freed) {
      incoming.segments.erase(message.segment);
    } else {
      return fail(ErrorCode::Corrupt, "rank {} sent an unknown message", rank);
    }
  }
  return {};
}

Result<std::optional<void*>> Mesh::address(int rank, const Location& location, std::size_t bytes) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(rank)];
  const auto found = incoming.segments.find(location.segment);
  if (found == incoming.segments.end()) return std::optional<void*>();
  Remote& remote = found->second;
  if (location.offset > remote.bytes || bytes > remote.bytes - location.offset) {
    return fail(ErrorCode::Corrupt, "rank {} named {} bytes at {} of a segment of {}", rank, bytes, location.offset,
                remote.bytes);
  }
  if (!remote.mapping) {
    auto mapping = sys::map_shared_segment(remote.fd.get(), remote.bytes);
    if (!mapping) return tl::unexpected(mapping.error());
    remote.mapping = std::make_shared<sys::Mapping>(*std::move(mapping));
    remote.fd.reset();
  }
  if (!remote.populated) {
    sys::populate(*remote.mapping);
    remote.populated = true;
  }
  return std::optional<void*>(static_cast<std::byte*>(remote.mapping->data()) + location.offset);
}

std::shared_ptr<const sys::Mapping> Mesh::mapping(int rank, std::uint32_t segment) const {
  const auto& segments = incoming_[static_cast<std::size_t>(rank)].segments;
  const auto found = segments.find(segment);
  return found != segments.end() ? found->second.mapping : nullptr;
}

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr std::uint64_t kMagic = 0x314f4c4548484f43;  // "COHHELO1"
constexpr std::size_t kTokenBytes = 32;
constexpr auto kSlice = 100ms;
// Additional time to wait for a rank that itself waits, so that the rank that knows who is missing reports it first.
constexpr auto kGrace = 1s;

using Token = std::array<char, kTokenBytes>;

struct Hello {
  std::uint64_t magic = kMagic;
  Token token{};  ///< the token in the receiver's entry
  std::int32_t rank = 0;
  std::int32_t pid = 0;
  std::uint64_t start_time = 0;
};

[[noreturn]] void throw_system(std::string_view what) {
  raise(ErrorCode::Io, "cannot form the world on this host -- {}: {}", what, errno_text(errno));
}

std::uint64_t random_id() {
  std::uint64_t id = 0;
  if (::getrandom(&id, sizeof id, 0) != static_cast<ssize_t>(sizeof id)) throw_system("getrandom");
  return id | 1;
}

/// The peer's pid as this process sees it; nullopt if the process belongs to another user.
std::optional<pid_t> trusted_pid(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return std::nullopt;
  if (credentials.uid != ::geteuid()) return std::nullopt;
  return credentials.pid;
}

}  // namespace

struct Rendezvous::Listener {
  sys::UniqueFd socket;
  std::string name;  // abstract, without the leading zero byte
  Token token{};
};

Rendezvous::Rendezvous(int ranks) : listener_(std::make_unique<Listener>()) {
  Listener& listener = *listener_;
  if (::getrandom(listener.token.data(), kTokenBytes, 0) != static_cast<ssize_t>(kTokenBytes))
    throw_system("getrandom");
  listener.socket.reset(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.socket) throw_system("socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // If only the family is given, the kernel picks a free abstract name, so nothing appears in the file system.
  if (::bind(listener.socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address.sun_family) != 0) {
    throw_system("bind");
  }
  socklen_t length = sizeof address;
  if (::getsockname(listener.socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw_system("getsockname");
  }
  listener.name.assign(address.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
  // The name is no secret, so processes of other users may connect too, and stay in the queue until they are rejected.
  if (::listen(listener.socket.get(), std::max(ranks, SOMAXCONN)) != 0) throw_system("listen");
}

Rendezvous::~Rendezvous() = default;

std::string Rendezvous::entry() const { return listener_->name + std::string(listener_->token.data(), kTokenBytes); }

namespace {

struct Values {
  std::vector<std::string> values;
};
void visit_fields(auto& m, auto& a, const Values*) { a(codec::most(m.values, store::kMostKeys, store::kLongestValue)); }

// The rank's number in the whole world, for messages.
int name_of(const FormOptions& options, int rank) { return options.label ? options.label->name_of(rank) : rank; }

// Throws the recorded reason why the forming of the world has ended: a rank has failed, or it has died.
[[noreturn]] void raise_recorded(const FormOptions& options, std::string_view recorded) {
  const Error failure = rendezvous::decode_failure(recorded);
  ErrorContext context;
  context.peer = failure.context().peer;
  throw Error(
      failure.code(),
      fmt::format("rank {} could not form the world -- {}", name_of(options, options.placement.rank), failure.what()),
      context);
}

}  // namespace

std::string encode_values(const std::vector<std::string>& values) { return codec::encode(Values{values}); }
Result<std::vector<std::string>> decode_values(std::string_view bytes) {
  auto decoded = codec::decode<Values>(bytes);
  if (!decoded) return tl::unexpected(decoded.error());
  return std::move(decoded->values);
}

std::string pack_values(const std::vector<std::string>& values) {
  const std::string plain = encode_values(values);
  std::string packed = codec::encode(static_cast<std::uint64_t>(plain.size()));
  const std::size_t head = packed.size();
  uLongf length = ::compressBound(plain.size());
  packed.resize(head + length);
  if (::compress2(reinterpret_cast<Bytef*>(packed.data() + head), &length, reinterpret_cast<const Bytef*>(plain.data()),
                  plain.size(), Z_BEST_SPEED) != Z_OK) {
    throw std::bad_alloc();  // compression fails only for lack of memory
  }
  packed.resize(head + length);
  return packed;
}

Result<std::vector<std::string>> unpack_values(std::string_view bytes) {
  codec::Reader in(bytes);
  const auto size = in.number<std::uint64_t>();
  if (!size || *size > store::kLongestValue || *size / 1100 > in.rest().size())  // zlib compresses to 1/1032 at best
    return fail(ErrorCode::Corrupt, "values of no size that may be");
  std::string plain(*size, '\0');
  uLongf length = plain.size();
  if (::uncompress(reinterpret_cast<Bytef*>(plain.data()), &length, reinterpret_cast<const Bytef*>(in.rest().data()),
                   in.rest().size()) != Z_OK ||
      length != plain.size()) {
    return fail(ErrorCode::Corrupt, "values that cannot be decompressed");
  }
  return decode_values(plain);
}

std::vector<std::string> exchange(const FormOptions& options, const Exchange& exchange, const std::string& mine) {
  if (exchange.ranks.size() == 1) return {mine};
  const auto key_of = [&](std::size_t number) { return fmt::format("{}/{}", exchange.key, number); };
  const bool collects = exchange.number == 0;
  std::vector<std::string> keys = {exchange.key};
  if (collects) {
    keys.clear();
    for (std::size_t number = 1; number < exchange.ranks.size(); ++number) keys.push_back(key_of(number));
  } else {
    options.store->set(key_of(static_cast<std::size_t>(exchange.number)), mine);
  }
  const std::string unless[] = {std::string(rendezvous::kFailedKey)};
  auto found = options.store->get_all(keys, unless, exchange.deadline + (collects ? 0s : kGrace));
  if (found.ended) raise_recorded(options, found.ended->value);
  std::vector<int> missing;
  for (const int at : found.missing())
    missing.push_back(exchange.ranks[static_cast<std::size_t>(at) + (collects ? 1 : 0)]);
  if (!missing.empty()) {
    raise(ErrorCode::Timeout,
          "cannot form the world -- rank {} on {} waited {} ms for rank{} {} -- were all ranks started?",
          exchange.ranks[static_cast<std::size_t>(exchange.number)], options.placement.host,
          options.init_timeout.count(), missing.size() == 1 ? "" : "s", to_ranges(missing));
  }
  if (!collects) {
    auto values = value_or_throw(unpack_values(*found.values.front()));
    if (values.size() == exchange.ranks.size()) return values;
    raise(ErrorCode::Corrupt, "cannot form the world -- {} values of {} ranks", values.size(), exchange.ranks.size());
  }
  std::vector<std::string> values = {mine};
  for (auto& value : found.values) values.push_back(*std::move(value));
  options.store->set(exchange.key, pack_values(values));
  return values;
}

void raise_if_recorded(const FormOptions& options) {
  std::optional<std::string> failure;
  try {
    if (options.store) failure = options.store->try_get(rendezvous::kFailedKey);
  } catch (const std::exception&) {  // the store may have ended with its host
  }
  if (failure) raise_recorded(options, *failure);
}

void record_failure(const FormOptions& options, const Error& error) noexcept {
  if (!options.store || error.code() == ErrorCode::Aborted) return;  // Aborted: another rank has recorded its reason
  try {
    const Error told(ErrorCode::Aborted,
                     fmt::format("rank {}: {}", name_of(options, options.placement.rank), error.what()));
    options.store->compare_and_set(rendezvous::kFailedKey, std::nullopt, rendezvous::encode_failure(told));
  } catch (const std::exception&) {  // the store may have ended with its host; the original error matters more
  }
}

class Gathering {
 public:
  Gathering(const FormOptions& options, std::unique_ptr<Rendezvous> point)
      : options_(options),
        point_(std::move(point)),
        rank_(options.placement.rank),
        size_(options.placement.size),
        deadline_(Clock::now() + options.init_timeout),
        self_(sys::own_process()),
        peers_(static_cast<std::size_t>(size_)),
        met_(static_cast<std::size_t>(size_)) {}

  Meeting run() {
    std::vector<std::string> entries = options_.entries;
    if (!point_) {
      point_ = std::make_unique<Rendezvous>(size_);
      Exchange all{"entries", std::vector<int>(static_cast<std::size_t>(size_)), rank_, deadline_};
      std::iota(all.ranks.begin(), all.ranks.end(), 0);
      entries = exchange(options_, all, point_->entry());
    }
    const Rendezvous::Listener& listener = *point_->listener_;
    for (int rank = 0; rank < rank_; ++rank) connect_to(rank, entries[static_cast<std::size_t>(rank)]);
    while (std::count(met_.begin(), met_.end(), true) < size_ - 1) accept_one(listener);
    Meeting meeting;
    meeting.control = rank_ == 0 ? give_control() : take_control();
    meeting.mesh = std::make_unique<Mesh>(rank_, std::move(peers_));
    return meeting;
  }

 private:
  void check(std::string_view waiting_for) {
    if (options_.store) {  // an error of a store that has ended counts, too
      if (const auto failure = options_.store->try_get(rendezvous::kFailedKey)) raise_recorded(options_, *failure);
    }
    for (int rank = 0; rank < size_ && options_.lost; ++rank) {
      if (rank == rank_ || met_[static_cast<std::size_t>(rank)]) continue;
      if (const auto how = options_.lost(rank)) {
        raise(ErrorCode::PeerLost, "cannot form a group -- rank {} on {} lost rank {} -- {} -- see its output",
              number_of(rank_), options_.placement.host, number_of(rank), *how);
      }
    }
    for (int rank = 0; rank < size_; ++rank) {
      if (met_[static_cast<std::size_t>(rank)] && sys::PeerProcess(peer(rank).process).gone()) {
        raise(
            ErrorCode::PeerLost,
            "cannot form the world -- rank {} on {} lost rank {} (pid {}) while the ranks met -- its process ended -- "
            "see its output",
            number_of(rank_), options_.placement.host, number_of(rank), peer(rank).process.pid);
      }
    }
    if (Clock::now() < deadline_) return;
    raise(ErrorCode::Timeout, "cannot form the world -- rank {} on {} waited {} ms for {} -- were all ranks started?",
          number_of(rank_), options_.placement.host, options_.init_timeout.count(), waiting_for);
  }

  [[noreturn]] void lost_while_meeting(int rank) {
    check(fmt::format("rank {}", number_of(rank)));
    raise(ErrorCode::PeerLost,
          "cannot form the world -- rank {} on {} lost rank {} while the ranks met -- see its output", number_of(rank_),
          options_.placement.host, number_of(rank));
  }

  void connect_to(int rank, const std::string& entry) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (entry.size() <= kTokenBytes || entry.size() - kTokenBytes >= sizeof address.sun_path) {
      raise(ErrorCode::Corrupt, "cannot form the world -- rank {}'s entry has {} bytes", number_of(rank), entry.size());
    }
    const std::size_t name = entry.size() - kTokenBytes;
    std::memcpy(address.sun_path + 1, entry.data(), name);
    sys::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) throw_system("socket");
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name);
    while (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
      if (errno != EAGAIN && errno != EINTR) {
        const std::string why = errno_text(errno);
        check(fmt::format("rank {}", number_of(rank)));
        raise(ErrorCode::PeerLost,
              "cannot form the world -- rank {} on {} cannot connect to rank {}: {} -- it may have ended, or be in "
              "another network namespace",
              number_of(rank_), options_.placement.host, number_of(rank), why);
      }
      check(fmt::format("rank {}", number_of(rank)));  // the peer's queue is full, until it accepts
      std::this_thread::sleep_for(1ms);
    }
    Hello hello;
    std::memcpy(hello.token.data(), entry.data() + name, kTokenBytes);
    hello.rank = rank_;
    hello.pid = self_.pid;
    hello.start_time = self_.start_time;
    if (::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) {
      if (errno != EPIPE && errno != ECONNRESET) throw_system("send");
      lost_while_meeting(rank);
    }
    // The answer proves that the peer is this rank, and gives its process's start time.
    await(socket.get(), fmt::format("rank {}", number_of(rank)));
    Hello answer;
    const ssize_t got = ::recv(socket.get(), &answer, sizeof answer, 0);
    const auto pid = trusted_pid(socket.get());
    if (got != sizeof answer || answer.magic != kMagic || answer.rank != rank || answer.token != hello.token || !pid) {
      check(fmt::format("rank {}", number_of(rank)));
      raise(ErrorCode::PeerLost,
            "cannot form the world -- rank {} did not answer rank {} as it should -- it may have ended",
            number_of(rank), number_of(rank_));
    }
    admit(rank, std::move(socket), *pid, answer);
  }

  void accept_one(const Rendezvous::Listener& listener) {
    await(listener.socket.get(), missing());
    sys::UniqueFd socket(::accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
      throw_system("accept");
    }
    const auto pid = trusted_pid(socket.get());
    if (!pid) {  // the peer is a process of another user
      if (Clock::now() >= deadline_) check(missing());
      return;
    }
    Hello hello;
    pollfd event{socket.get(), POLLIN, 0};
    if (::poll(&event, 1, 2000) <= 0) return;  // this is no rank, since ranks send their hello immediately
    if (::recv(socket.get(), &hello, sizeof hello, 0) != sizeof hello || hello.magic != kMagic) return;
    if (hello.token != listener.token || hello.rank <= rank_ || hello.rank >= size_) return;
    if (met_[static_cast<std::size_t>(hello.rank)]) return;
    Hello answer;
    answer.token = listener.token;
    answer.rank = rank_;
    answer.pid = self_.pid;
    answer.start_time = self_.start_time;
    if (::send(socket.get(), &answer, sizeof answer, MSG_NOSIGNAL) != sizeof answer) return;
    admit(hello.rank, std::move(socket), *pid, hello);
  }

  void admit(int rank, sys::UniqueFd socket, pid_t pid, const Hello& hello) {
    // If the peer is in another PID namespace, the kernel's pid is 0 or differs from the peer's own. Then only its
    // socket can show that the peer has ended.
    sys::ProcessId process;
    if (pid == hello.pid && pid != self_.pid) process = {pid, hello.start_time};
    peers_[static_cast<std::size_t>(rank)] = Peer{std::move(socket), process, pid == self_.pid};
    met_[static_cast<std::size_t>(rank)] = true;
  }

  void await(int fd, const std::string& whom) {
    while (true) {
      pollfd event{fd, POLLIN, 0};
      if (::poll(&event, 1, static_cast<int>(std::chrono::milliseconds(kSlice).count())) > 0) return;
      check(whom);
    }
  }

  std::string missing() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_ && !met_[static_cast<std::size_t>(rank)]) ranks.push_back(number_of(rank));
    }
    return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
  }

  int number_of(int rank) const { return name_of(options_, rank); }
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  sys::Mapping give_control() {
    const ControlLayout layout(size_);
    auto segment = value_or_throw(sys::create_shared_segment("cohort-control", layout.bytes()));
    void* const base = segment.mapping.data();
    Header* const header = new (base) Header{};
    header->magic = Header::kMagic;
    header->id = random_id();
    header->ranks = static_cast<std::uint32_t>(size_);
    header->chunk_bytes = static_cast<std::uint32_t>(layout.chunk_bytes());
    for (int rank = 0; rank < size_; ++rank) new (&layout.state(base, rank)) RankState{};
    for (int rank = 1; rank < size_; ++rank) {
      while (sys::send_with_fd(peer(rank).socket.get(), "C", 1, segment.fd.get()) < 0) {
        if (errno == EPIPE || errno == ECONNRESET) lost_while_meeting(rank);
        if (errno != EAGAIN && errno != EINTR && errno != ETOOMANYREFS) throw_system("sendmsg");
        check(fmt::format("rank {}", number_of(rank)));
        std::this_thread::sleep_for(1ms);
      }
    }
    return std::move(segment.mapping);
  }

  sys::Mapping take_control() {
    const int socket = peer(0).socket.get();
    await(socket, fmt::format("rank {}", number_of(0)));
    char byte = 0;
    sys::UniqueFd fd;
    if (sys::receive_with_fd(socket, &byte, 1, fd) != 1 || !fd) {
      lost_while_meeting(0);
    }
    const ControlLayout layout(size_);
    sys::Mapping mapping = value_or_throw(sys::map_shared_segment(fd.get(), layout.bytes()));
    sys::populate(mapping);
    const Header& header = ControlLayout::header(mapping.data());
    if (header.magic != Header::kMagic || header.ranks != static_cast<std::uint32_t>(size_) ||
        header.chunk_bytes != layout.chunk_bytes()) {
      raise(ErrorCode::Mismatch,
            "cannot form the world -- rank {} made control memory for {} ranks and chunks of {} bytes, rank {} expects "
            "{} "
            "and {} -- do all ranks run the same build?",
            number_of(0), header.ranks, header.chunk_bytes, number_of(rank_), size_, layout.chunk_bytes());
    }
    return mapping;
  }

  const FormOptions& options_;
  std::unique_ptr<Rendezvous> point_;
  const int rank_;
  const int size_;
  const Clock::time_point deadline_;
  const sys::ProcessId self_;
  std::vector<Peer> peers_;
  std::vector<bool> met_;
};

Meeting meet(const FormOptions& options, std::unique_ptr<Rendezvous> point) {
  try {
    return Gathering(options, std::move(point)).run();
  } catch (const Error& error) {
    record_failure(options, error);
    throw;
  }
}

}  // namespace cohort::comm::local
