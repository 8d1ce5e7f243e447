#include "comm/local/engine.h"

#include "base/log.h"
#include "base/result.h"
#include "comm/local/meet.h"
#include "comm/local/waiting.h"
#include "sys/cpus.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <poll.h>

#include <algorithm>
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

Engine::Engine(const FormOptions& options)
    : rank_(options.placement.rank), size_(options.placement.size), host_(options.placement.host), layout_(size_) {
  round_.brought.resize(static_cast<std::size_t>(size_));
  timeout_ = options.join_timeout;
  deadline_ = Clock::now() + timeout_;
  attended_ = 1;  // forming is waited for
  if (size_ == 1) {
    control_ = value_or_throw(sys::create_shared_segment("cohort-control", layout_.bytes())).mapping;
    new (control_.data()) Header{};
    new (&state(0)) RankState{};
    std::vector<Peer> nobody(1);
    mesh_ = std::make_shared<Mesh>(0, std::move(nobody));
    attended_ = 0;
    return;
  }
  Meeting meeting = meet(options);
  control_ = std::move(meeting.control);
  mesh_ = std::move(meeting.mesh);
  for (int rank = 0; rank < size_; ++rank) {
    processes_.push_back(rank == rank_ ? sys::PeerProcess() : sys::PeerProcess(mesh_->peer(rank).process));
  }
  try {
    note_cores();
  } catch (...) {
    state(rank_).left.store(1);
    throw;
  }
  attended_ = 0;
}

Engine::~Engine() {
  state(rank_).left.store(1);
  ring();
  mesh_->close();
}

// Whether there is a core for each rank: ranks may be bound to different ones, so all of them say where they may run.
void Engine::note_cores() {
  state(rank_).cores = sys::allowed_cores();
  state(rank_).ready.store(1);
  ring();
  wait_for_all([&](int rank) { return state(rank).ready.load() != 0; });
  sys::CoreSet all{};
  for (int rank = 0; rank < size_; ++rank) {
    for (std::size_t i = 0; i < all.size(); ++i) all[i] |= state(rank).cores[i];
  }
  // Fewer than the affinity allows: a quota of the control group.
  const int usable = sys::usable_cores();
  const bool quota = usable < sys::count(state(rank_).cores);
  crowded_ = size_ > (quota ? usable : sys::count(all));
}

void Engine::run(const Operation& operation, CollectiveEvent* event) {
  throw_if_ended();
  deadline_ = operation.deadline();
  timeout_ = operation.timeout;
  if (size_ == 1) {
    ++sequence_;
    if (event != nullptr) event->sequence = sequence_;
    run_alone(operation);
    return;
  }
  const bool with_payload = is_small(operation) && (operation.kind != Kind::Broadcast || operation.root == rank_);
  begin(describe(operation), operation.input, with_payload ? operation.input_bytes : 0);
  const auto published = event != nullptr ? Clock::now() : Clock::time_point{};
  if (event != nullptr) event->sequence = sequence_;
  gather();
  if (event != nullptr) event->waited = Clock::now() - published;
  check_agreement();
  execute(operation, event);
}

int Engine::join(std::chrono::milliseconds patience) {
  throw_if_ended();
  if (size_ == 1) return 0;
  timeout_ = patience;
  const std::int64_t ticket = header().join_tickets.fetch_add(1);
  while (true) {
    Descriptor own;
    own.kind = Kind::Joined;
    own.count = ticket;
    deadline_ = Clock::now() + patience;
    begin(own, nullptr, 0);
    gather();
    if (round_.active.empty()) break;
    try {
      check_agreement();
    } catch (const Error&) {  // the active ranks are told; this one brought nothing that could be wrong
      continue;
    }
    Operation served;
    served.kind = round_.agreed.kind;
    served.dtype = round_.agreed.dtype;
    served.op = round_.agreed.op;
    served.count = round_.agreed.count;
    served.input_bytes = static_cast<std::size_t>(served.count) * size_of(served.dtype);
    served.output_bytes = served.input_bytes;
    execute(served, nullptr);
  }
  const auto last = std::max_element(round_.brought.begin(), round_.brought.end(),
                                     [](const Descriptor& a, const Descriptor& b) { return a.count < b.count; });
  return static_cast<int>(last - round_.brought.begin());
}

void Engine::abort(std::string_view reason) noexcept {
  try {
    record(ErrorCode::Aborted, -1, fmt::format("aborted by rank {} on {} -- {}", rank_, host_, reason));
  } catch (...) {
    record(ErrorCode::Aborted, -1, reason);
  }
}

Descriptor Engine::describe(const Operation& operation) const {
  Descriptor own;
  own.kind = operation.kind;
  own.dtype = operation.dtype;
  own.op = operation.op;
  own.weighted = operation.weight ? 1 : 0;
  own.root = operation.root;
  own.count = operation.count;
  own.weight = operation.weight.value_or(0);
  if (is_small(operation)) return own;  // nobody will look at the memory itself
  if (const auto place = mesh_->locate(operation.input, operation.input_bytes)) {
    own.input_segment = place->segment;
    own.input_offset = place->offset;
  }
  if (const auto place = mesh_->locate(operation.output, operation.output_bytes)) {
    own.output_segment = place->segment;
    own.output_offset = place->offset;
  }
  return own;
}

void Engine::begin(const Descriptor& own, const void* payload, std::size_t bytes) {
  ++sequence_;
  Slot& slot = state(rank_).slots[sequence_ % 2];
  slot.descriptor = own;
  slot.descriptor.announcements = mesh_->announcements();
  if (bytes > 0) std::memcpy(slot.payload, payload, bytes);
  slot.sequence.store(sequence_);
  state(rank_).begun.store(sequence_, std::memory_order_relaxed);
  ring();
}

void Engine::gather() {
  round_.active.clear();
  round_.agreed = Descriptor{};
  round_.agreed.kind = Kind::Joined;
  wait_for_all([&](int rank) { return state(rank).slots[sequence_ % 2].sequence.load() == sequence_; });
  for (int rank = 0; rank < size_; ++rank) {
    Descriptor& brought = round_.brought[static_cast<std::size_t>(rank)];
    brought = state(rank).slots[sequence_ % 2].descriptor;
    if (rank != rank_ && mesh_->received(rank) < brought.announcements) {
      if (const auto got = mesh_->receive(rank, brought.announcements); !got) {
        end_world(got.error().code(), rank, got.error().what());
      }
    }
    if (brought.kind == Kind::Joined) continue;
    if (round_.active.empty()) round_.agreed = brought;
    round_.active.push_back(rank);
  }
  const auto root = std::find(round_.active.begin(), round_.active.end(), round_.agreed.root);
  if (!round_.active.empty()) round_.root = root != round_.active.end() ? *root : round_.active.front();
}

void Engine::check_agreement() const {
  int first = -1;
  int differing = 0;
  for (const int rank : round_.active) {
    if (agree(round_.brought[static_cast<std::size_t>(rank)], round_.agreed)) continue;
    if (first < 0) first = rank;
    ++differing;
  }
  if (first >= 0) {
    const Descriptor& other = round_.brought[static_cast<std::size_t>(first)];
    const bool own_differs = !agree(round_.brought[static_cast<std::size_t>(rank_)], round_.agreed);
    refuse(fmt::format("rank {} brought {}, rank {} brought {}{}", first, to_string(other), round_.active.front(),
                       to_string(round_.agreed),
                       differing > 1 ? fmt::format(" ({} ranks differ from rank {})", differing, round_.active.front())
                                     : std::string()),
           own_differs || rank_ != round_.active.front() ? round_.active.front() : first);
  }
  const bool needs_all = round_.agreed.kind == Kind::AllGather || round_.agreed.kind == Kind::ReduceScatter;
  if (needs_all && static_cast<int>(round_.active.size()) < size_) {
    int joined = 0;
    while (round_.brought[static_cast<std::size_t>(joined)].kind != Kind::Joined) ++joined;
    refuse(fmt::format("rank {} has joined (it has no more input), and {} needs something of every rank", joined,
                       to_string(round_.agreed)),
           joined);
  }
}

void Engine::refuse(const std::string& why, int peer) const {
  const Descriptor& own = round_.brought[static_cast<std::size_t>(rank_)];
  ErrorContext context;
  context.rank = rank_;
  context.host = host_;
  context.peer = peer;
  context.operation = to_string(own);
  context.sequence = sequence_;
  context.cause = why;
  throw Error(
      ErrorCode::Mismatch,
      fmt::format("{} refused -- rank {} ({}), operation {} -- {} -- all ranks must call the same operations in "
                  "the same order with the same shape and type",
                  name_of(own.kind), rank_, host_, sequence_, why),
      std::move(context));
}

std::string Engine::doing() const {
  if (sequence_ == 0) return "forming the world";
  return to_string(state(rank_).slots[sequence_ % 2].descriptor);
}

// Says why a peer that others wait for will not come; nullopt if it may.
std::optional<std::string> Engine::lost(int rank) {
  if (rank == rank_) return std::nullopt;
  const sys::PeerProcess& process = processes_[static_cast<std::size_t>(rank)];
  std::string how;
  if (state(rank).left.load() != 0) {
    how = "it left the world (its communicator was destroyed)";
  } else if (process.gone()) {
    how = fmt::format("its process {} has ended or is ending", process.pid());
  } else {
    pollfd event{mesh_->peer(rank).socket.get(), 0, 0};
    if (::poll(&event, 1, 0) <= 0 || (event.revents & (POLLHUP | POLLERR)) == 0) return std::nullopt;
    if (state(rank).left.load() != 0) return lost(rank);
    how = "its connection has ended";
  }
  const std::uint64_t begun = state(rank).begun.load();
  return fmt::format(
      "{} failed -- rank {} ({}) lost rank {} ({}{}) in operation {} -- {}; it {} operation {} -- see the "
      "output of rank {}; the communicator has to be formed anew",
      doing(), rank_, host_, rank, host_, process.pid() > 0 ? fmt::format(", pid {}", process.pid()) : "", sequence_,
      how, begun >= sequence_ ? "did not finish" : "did not bring", sequence_, rank);
}

// Ends the world if the deadline has passed. `missing` are the ranks that are waited for.
void Engine::judge(const std::vector<int>& missing) {
  const auto limit = Clock::time_point(Clock::duration(waiting_limit_.load(std::memory_order_relaxed)));
  if (missing.empty() || Clock::now() < std::min(deadline_, limit)) return;
  std::vector<std::string> who;
  for (const int rank : missing) {
    const std::uint64_t begun = state(rank).begun.load();
    const pid_t pid = rank == rank_ ? 0 : processes_[static_cast<std::size_t>(rank)].pid();
    std::string text = fmt::format("rank {}", rank);
    if (pid > 0) text += fmt::format(" (pid {})", pid);
    if (begun >= sequence_) {
      text += " came but did not finish";
    } else if (begun == 0) {
      text += " did not come; it has brought nothing yet";
    } else {
      text += fmt::format(" did not come; its last was operation {}, {}", begun,
                          to_string(state(rank).slots[begun % 2].descriptor));
    }
    who.push_back(std::move(text));
    if (who.size() == 8 && missing.size() > 8) {
      who.push_back(fmt::format("and {} more", missing.size() - who.size()));
      break;
    }
  }
  const std::string after =
      deadline_ <= limit ? fmt::format("after {} ms", timeout_.count()) : std::string("(an operation behind it did)");
  end_world(
      ErrorCode::Timeout, missing.front(),
      fmt::format("{} timed out {} -- rank {} ({}), operation {} -- {} -- is it stopped, slow, or in another branch "
                  "of the program? give a longer timeout if it is only slow",
                  doing(), after, rank_, host_, sequence_, fmt::join(who, "; ")));
}

void Engine::end_world(ErrorCode code, int peer, const std::string& text) {
  record(code, peer, text);
  throw recorded();
}

bool Engine::record(ErrorCode code, int peer, std::string_view text) noexcept {
  AbortRecord& abort = header().abort;
  std::uint32_t none = AbortRecord::kNone;
  if (!abort.state.compare_exchange_strong(none, AbortRecord::kWriting)) return false;
  abort.code = code;
  abort.reporter = rank_;
  abort.peer = peer;
  abort.sequence = state(rank_).begun.load();
  copy_text(abort.text, sizeof abort.text, text);
  abort.state.store(AbortRecord::kSet);
  header().bell.fetch_add(1);
  sys::futex_wake_all(header().bell);
  return true;
}

void Engine::throw_if_ended() const {
  if (header().abort.state.load() != AbortRecord::kNone) throw recorded();
}

// The first cause, as this rank reports it.
Error Engine::recorded() const {
  const AbortRecord& abort = header().abort;
  for (int i = 0; i < 1000 && abort.state.load() != AbortRecord::kSet; ++i) std::this_thread::sleep_for(1ms);
  ErrorContext context;
  context.rank = rank_;
  context.host = host_;
  context.operation = doing();
  context.sequence = sequence_;
  if (abort.state.load() != AbortRecord::kSet) {  // whoever began to write it died
    return Error(
        ErrorCode::Aborted,
        fmt::format("{} failed -- rank {} ({}) -- a rank died while it ended the world", doing(), rank_, host_),
        std::move(context));
  }
  const std::string cause(abort.text);
  context.peer = abort.code == ErrorCode::Aborted ? abort.reporter : abort.peer;
  context.cause = cause;
  // A rank that others waited for in vain is not late itself: it was given up.
  const ErrorCode code = abort.code == ErrorCode::Timeout && abort.peer == rank_ ? ErrorCode::Aborted : abort.code;
  if (abort.reporter == rank_ && abort.code != ErrorCode::Aborted) return Error(code, cause, std::move(context));
  return Error(code,
               fmt::format("{} failed -- rank {} ({}), operation {} -- {}", doing(), rank_, host_, sequence_, cause),
               std::move(context));
}

}  // namespace cohort::comm::local
