#include "comm/shm/world.h"

#include "base/result.h"
#include "base/thread.h"
#include "comm/shm/rendezvous.h"
#include "comm/transport/transport.h"

#include <fmt/format.h>

#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

namespace cohort::comm::local {
namespace {

using namespace std::chrono_literals;

void copy_text(char* to, std::size_t room, std::string_view text) noexcept {
  const std::size_t length = std::min(room - 1, text.size());
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

}  // namespace

status::GroupStatus& open_status(std::uint64_t id, int rank, int size, bool background) noexcept {
  auto& page = status::StatusPage::own();
  for (std::uint8_t kind = 0; kind <= static_cast<std::uint8_t>(Kind::Recv); ++kind) {
    page.name_kind(kind, name_of(static_cast<Kind>(kind)));
  }
  return page.open(id, rank, size, background);
}

World::World(const FormOptions& options, std::unique_ptr<Rendezvous> point)
    : rank_(options.placement.rank),
      size_(options.placement.size),
      host_(options.placement.host),
      label_(options.label),
      layout_(size_) {
  if (size_ > kMostRanks) {
    raise(ErrorCode::InvalidArgument, "a world of {} ranks on one host -- {} are the most", size_, kMostRanks);
  }
  if (size_ == 1) {
    control_ = value_or_throw(sys::create_shared_segment("cohort-control", layout_.bytes())).mapping;
    new (control_.data()) Header{};
    new (&state(0)) RankState{};
    status_ = &status::StatusPage::own().open(0, 0, 1);
    std::vector<Peer> nobody(1);
    mesh_ = std::make_shared<Mesh>(0, std::move(nobody));
    return;
  }
  Meeting meeting = meet(options, std::move(point));
  control_ = std::move(meeting.control);
  mesh_ = std::move(meeting.mesh);
  status_ =
      &open_status(label_ ? 0 : header().id, rank_, size_, options.background);  // 0: only the larger world reports
  for (int rank = 0; rank < size_; ++rank) {
    processes_.push_back(rank == rank_ ? sys::PeerProcess() : sys::PeerProcess(mesh_->peer(rank).process));
  }
}

World::~World() {
  status::StatusPage::own().close(*status_);
  state(rank_).left.store(1);
  ring();
  mesh_->close();
}

pid_t World::pid(int rank) const noexcept {
  if (rank == rank_ || mesh_->peer(rank).same_process) return ::getpid();
  return processes_[static_cast<std::size_t>(rank)].pid();
}

bool World::record(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text, int reporter) noexcept {
  AbortRecord& abort = header().abort;
  if (!begin_end(abort.state, AbortRecord::kNone, AbortRecord::kWriting)) return false;
  abort.code = code;
  abort.reporter = reporter;
  abort.peer = peer;
  abort.sequence = sequence;
  copy_text(abort.text, sizeof abort.text, text);
  abort.state.store(AbortRecord::kSet);
  header().bell.fetch_add(1);
  sys::futex_wake_all(header().bell);
  return true;
}

void World::abort(std::string_view reason) noexcept {
  const std::uint64_t begun = state(rank_).begun();
  try {
    record(ErrorCode::Aborted, -1, begun, fmt::format("aborted by rank {} on {} -- {}", name(rank_), host_, reason));
  } catch (...) {
    record(ErrorCode::Aborted, -1, begun, reason);
  }
}

Error World::recorded(const std::string& doing, std::uint64_t sequence) const {
  Error error = as_error(doing, sequence);
  status::StatusPage::own().note_failure(error);
  return error;
}

Error World::as_error(const std::string& doing, std::uint64_t sequence) const {
  const AbortRecord& abort = header().abort;
  for (int i = 0; i < 1000 && abort.state.load() != AbortRecord::kSet; ++i) std::this_thread::sleep_for(1ms);
  ErrorContext context;
  const int own = name(rank_);
  context.rank = own;
  context.host = host_;
  context.operation = doing;
  context.sequence = sequence;
  if (abort.state.load() != AbortRecord::kSet) {  // the rank that wrote the record died
    return Error(ErrorCode::Aborted,
                 fmt::format("{} failed -- rank {} ({}) -- a rank died while it ended the world", doing, own, host_),
                 std::move(context));
  }
  const std::string cause(abort.text);
  context.peer = abort.code == ErrorCode::Aborted ? abort.reporter : abort.peer;
  context.cause = cause;
  // The rank for which the others waited did not time out. It was given up, so it fails with Aborted.
  const ErrorCode code = abort.code == ErrorCode::Timeout && abort.peer == own ? ErrorCode::Aborted : abort.code;
  if (abort.reporter == own && abort.code != ErrorCode::Aborted) return Error(code, cause, std::move(context));
  return Error(code, fmt::format("{} failed -- rank {} ({}), operation {} -- {}", doing, own, host_, sequence, cause),
               std::move(context));
}

std::optional<std::string> World::lost(int rank) const {
  if (rank == rank_) return std::nullopt;
  const sys::PeerProcess& process = processes_[static_cast<std::size_t>(rank)];
  if (state(rank).left.load() != 0) return std::string(transport::kLeft);
  if (process.gone()) return fmt::format("its process {} has ended or is ending", process.pid());
  pollfd event{mesh_->peer(rank).socket.get(), 0, 0};
  if (::poll(&event, 1, 0) <= 0 || (event.revents & (POLLHUP | POLLERR)) == 0) return std::nullopt;
  if (state(rank).left.load() != 0) return lost(rank);
  return "its connection has ended";
}

std::function<std::optional<std::string>(int)> World::losses_of(std::vector<int> ranks) const {
  return [this, ranks = std::move(ranks)](int number) {
    auto how = lost(ranks[static_cast<std::size_t>(number)]);
    // (A rank that failed has recorded why, before it left.)
    if ((!how || *how == transport::kLeft) && ended()) throw recorded("forming a group", state(rank_).begun());
    return how;
  };
}

bool World::are_over(std::uint64_t number) const noexcept {
  if (ended()) return true;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && state(rank).over.load() < number && !lost(rank)) return false;
  }
  return true;
}

std::string World::pid_text(int rank) const {
  if (rank == rank_ || mesh_->peer(rank).same_process || pid(rank) <= 0) return "";
  return fmt::format("pid {}", pid(rank));
}

void World::wake() noexcept {
  header().bell.fetch_add(1);
  sys::futex_wake_all(header().bell);
}

bool World::try_reading_peers() const noexcept {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    std::uint64_t magic = 0;
    if (!read_peer(rank, &magic, state(rank).control_address, sizeof magic) || magic != Header::kMagic) return false;
  }
  return true;
}

Result<void> World::read_peer(int rank, void* to, std::uint64_t address, std::size_t bytes) const {
  const pid_t peer = pid(rank);
  if (peer <= 0) return fail(ErrorCode::Unavailable, "rank {} is in another PID namespace", rank);
  auto* local = static_cast<std::byte*>(to);
  while (bytes > 0) {
    iovec here{local, bytes};
    iovec there{reinterpret_cast<void*>(address), bytes};
    const ssize_t got = ::process_vm_readv(peer, &here, 1, &there, 1, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      const int error = got < 0 ? errno : EFAULT;
      return fail(error == ESRCH ? ErrorCode::PeerLost : ErrorCode::Unavailable,
                  "reading the memory of rank {} (pid {}): {}", rank, peer, errno_text(error));
    }
    local += got;
    address += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return {};
}

}  // namespace cohort::comm::local
