#include "comm/shm/context.h"

#include "base/hardware.h"
#include "base/result.h"
#include "comm/engine/agreement.h"
#include "comm/shm/plan.h"
#include "comm/transport/transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

namespace cohort::comm::local {
namespace {

constexpr auto kKept = std::chrono::seconds(3);
constexpr auto kSliceOfServer = std::chrono::milliseconds(2);
constexpr auto kLook = std::chrono::milliseconds(10);

}  // namespace

void Waiter::serve(Waiters& waiters, std::function<void()> meanwhile) {
  waiters_ = &waiters;
  meanwhile_ = std::move(meanwhile);
  slice_ = kSliceOfServer;
}

// --- texts for messages ---

std::string Waiter::doing() const {
  if (sequence == 0) return "forming the world";
  if (const OperationLabel* const label = world.label()) return label->doing();
  return to_string(world.state(world.rank()).slots[sequence % 2].descriptor);
}

void Waiter::throw_ended_before(const std::string& what) const {
  if (world.label() != nullptr) throw world.recorded(doing(), number());
  throw world.recorded(what, sequence + 1);
}

// Describes what a rank that is waited for has not done yet.
std::string Waiter::omission(int rank) const {
  const Slot* const slots = world.state(rank).slots;
  const std::uint64_t begun = world.state(rank).begun();
  if (world.label() != nullptr) {
    return begun >= sequence ? fmt::format("did not finish its part of operation {}", number())
                             : fmt::format("did not come to operation {}, or to a later step of it", number());
  }
  if (begun >= sequence) return fmt::format("came to operation {} but did not finish it", sequence);
  if (begun == 0) return fmt::format("did not come to operation {}; it has brought nothing yet", sequence);
  return fmt::format("did not come to operation {}; its last was operation {}, {}", sequence, begun,
                     to_string(slots[begun % 2].descriptor));
}

void Waiter::end_world(ErrorCode code, int peer, const std::string& text) {
  world.record(code, peer, number(), text);
  throw world.recorded(doing(), number());
}

void Waiter::end_lost(int rank, const std::string& how) {
  end_world(ErrorCode::PeerLost, world.name(rank),
            lost_text(running(), world.name(rank), world.host(), world.pid_text(rank),
                      fmt::format("{}; it {}", how, omission(rank))));
}

// --- looking after peers ---

void Waiter::attend() {
  if (world.ended()) throw_if_ended();
  meanwhile();
  const auto now = Clock::now();
  if (now - attended_ < kLook) return;
  attended_ = now;
  for (int rank = 0; rank < world.size(); ++rank) {
    // A rank that left in order has done its part, so its end does not count as a loss.
    if (const auto how = world.lost(rank); how && *how != transport::kLeft) end_lost(rank, *how);
  }
}

// Ends the world if a rank that is waited for has died, or if the deadline has passed.
void Waiter::look_after(const std::function<std::vector<int>()>& missing_now) {
  Deadline& deadline = waiters_->deadline;
  deadline.begin_now();
  const std::vector<int> missing = missing_now();
  for (const int rank : missing) {
    const auto how = world.lost(rank);
    if (!how) continue;
    const std::vector<int> still = missing_now();  // the rank may have done its part before it ended
    if (std::find(still.begin(), still.end(), rank) == still.end()) continue;
    end_lost(rank, *how);
  }
  if (missing.empty() || Clock::now() < deadline.when()) return;
  // A rank that itself waits for another host is not late: ranks that wait for that host know more, and report it.
  const bool kept = std::all_of(missing.begin(), missing.end(),
                                [&](int rank) { return world.state(rank).away.load(std::memory_order_relaxed) != 0; });
  if (kept && Clock::now() < deadline.when() + kKept) return;
  const auto described = [&](int rank) {
    const std::string pid = world.pid_text(rank);
    return fmt::format("rank {}{} {}", world.name(rank), pid.empty() ? "" : " (" + pid + ")", omission(rank));
  };
  end_world(ErrorCode::Timeout, world.name(missing.front()),
            timeout_text(running(), deadline, list_missing(missing, described)));
}

namespace {

// Limit of waiting for a partner to begin measuring, since the partner may still be asleep.
constexpr auto kPatienceAtStart = std::chrono::milliseconds(20);
// Number of measurements while a job starts. Ranks are interrupted then, and an interrupted measurement does not count.
constexpr int kMeasurements = 3;
// Number of operations from one measurement of the cores' distance to the next.
constexpr std::uint64_t kMeasureEvery = 1024;
// Size beyond which little of a buffer is still in the core's caches when a peer reads it.
constexpr std::size_t kBeyondCaches = std::size_t{1} << 20;

}  // namespace

// --- forming ---

Context::Context(World& its_world, Waiters& waiters, const FormOptions& options)
    : Waiter(its_world, waiters),
      rank(world.rank()),
      size(world.size()),
      layout(world.layout()),
      distance(world),
      agreement(world.size()) {
  if (size == 1) return;
  deadline().begin(Clock::now(), options.init_timeout);
  waiters.attended = 1;  // this thread waits for the world to form
  note_cores();
  state(rank).reads_peers.store(world.try_reading_peers() ? 1 : 2);
  world.ring();
  wait_for_all([&](int which) { return state(which).reads_peers.load() != 0; });
  bool cross = true;
  for (int which = 0; which < size; ++which) cross = cross && state(which).reads_peers.load() == 1;
  for (int i = 0; i < kMeasurements; ++i) {
    distance.measure(kPatienceAtStart);
    if (cross) distance.measure_reading(kPatienceAtStart);
  }
  Header& header = world.header();
  if (rank == 0) {
    header.plan = make_plan(world, cross, distance);
    header.plan_ready.store(1);
    world.ring();
  }
  wait_for_all([&](int which) { return which != 0 || header.plan_ready.load() != 0; });
  plan = header.plan;
  if (rank == 0) log_plan(world, plan, cross, distance);
  if (plan.cross_reduce_bytes != kNever || plan.cross_copy_bytes != kNever) {
    // Holds a rank's slice of a chunk (slices end at cache lines), or a piece of a larger slice.
    aside_bytes_ = std::max(kPullPiece, plan.chunk_bytes / static_cast<std::size_t>(size) + 4 * kLine);
    aside_.resize(static_cast<std::size_t>(size) * aside_bytes_);
  }
  waiters.attended = 0;
}

// Notes whether there is a core for each rank. Each rank writes the cores on which it may run, since ranks may be bound
// to different cores.
void Context::note_cores() {
  RankState& own = state(rank);
  own.cores = sys::allowed_cores();
  own.control_address = reinterpret_cast<std::uint64_t>(world.control());
  own.ready.store(1);
  world.ring();
  wait_for_all([&](int which) { return state(which).ready.load() != 0; });
  sys::CoreSet all{};
  for (int which = 0; which < size; ++which) {
    for (std::size_t i = 0; i < all.size(); ++i) all[i] |= state(which).cores[i];
  }
  // A quota of the control group may allow fewer cores than the affinity.
  const int usable = sys::usable_cores();
  const bool quota = usable < sys::count(own.cores);
  world.set_crowded(size > (quota ? usable : sys::count(all)));
}

// --- how buffers are written ---

void Context::measure_again() {
  if (sequence % kMeasureEvery == 0) distance.measure(std::chrono::microseconds(0));
}

Stores Context::stores_for(std::size_t bytes) const noexcept {
  const auto policy = static_cast<StorePolicy>(plan.stores);
  if (policy == StorePolicy::Cached || bytes < kLeastNonTemporal) return Stores::Cached;
  if (policy == StorePolicy::NonTemporal || bytes >= kBeyondCaches) return Stores::NonTemporal;
  return distance.better();
}

// --- memory of ranks ---

bool Context::inputs_mapped() const noexcept {
  return std::all_of(agreement.active.begin(), agreement.active.end(), [&](int which) { return mapped(which); });
}

bool Context::outputs_mapped() const noexcept {
  return std::all_of(agreement.active.begin(), agreement.active.end(),
                     [&](int which) { return brought(which).output_segment != 0; });
}

const std::byte* Context::input_of(int which, const Request& request) {
  if (which == rank) return static_cast<const std::byte*>(request.input);
  return remote(which, brought(which).input(), request.input_bytes());
}

std::byte* Context::output_of(int which, const Request& request) {
  if (which == rank) return static_cast<std::byte*>(request.output);
  return remote(which, brought(which).output(), request.input_bytes());
}

// Returns the address of a peer's registered memory. The message about its segment may still be queued in the peer,
// which sends queued messages while it waits.
std::byte* Context::remote(int which, const Location& location, std::size_t bytes) {
  Mesh& mesh = *world.mesh();
  std::byte* found = nullptr;
  std::optional<Error> failed;
  const auto try_once = [&] {
    auto address = mesh.address(which, location, bytes);
    if (address && !*address) {
      const auto got = mesh.receive(which, brought(which).announcements);
      if (!got) {
        failed = got.error();
        return true;
      }
      address = mesh.address(which, location, bytes);
    }
    if (!address) {
      failed = address.error();
    } else if (*address) {
      found = static_cast<std::byte*>(**address);
    }
    return failed.has_value() || found != nullptr;
  };
  if (!try_once()) {
    wait_until([&] { return found != nullptr || failed.has_value() || try_once(); },
               [&] { return std::vector<int>{which}; });
  }
  if (failed) end_world(failed->code(), which, failed->what());
  return found;
}

const std::byte* Context::fetch(int which, const Location& location, std::size_t offset, std::size_t bytes) {
  if (location.segment != 0) return remote(which, {location.segment, location.offset + offset}, bytes);
  std::byte* const aside = aside_.data() + static_cast<std::size_t>(which) * aside_bytes_;
  read_peer(which, aside, location.offset + offset, bytes);
  return aside;
}

void Context::pull(int which, const Location& location, std::size_t offset, std::size_t bytes, std::byte* to) {
  if (bytes == 0) return;
  if (location.segment != 0) {
    return copy_pieces(to, remote(which, {location.segment, location.offset + offset}, bytes), bytes);
  }
  for (std::size_t done = 0; done < bytes; done += kPieceBytes) {
    if (done > 0) throw_if_ended();
    read_peer(which, to + done, location.offset + offset + done, std::min(kPieceBytes, bytes - done));
  }
}

void Context::read_peer(int which, void* to, std::uint64_t address, std::size_t bytes) {
  const auto read = world.read_peer(which, to, address, bytes);
  if (read) return;
  // A dying process loses its memory shortly before others can see that it is dying.
  for (int i = 0; i < 100; ++i) {
    throw_if_ended();
    if (const auto how = world.lost(which)) end_lost(which, *how);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  end_world(read.error().code(), which,
            fmt::format("{} failed -- rank {} ({}), operation {} -- {} -- COHORT_PLAN=cross=off does without it",
                        doing(), rank, world.host(), sequence, read.error().what()));
}

void Context::copy_pieces(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes && to != from; done += kPieceBytes) {
    if (done > 0) throw_if_ended();
    std::memmove(to + done, from + done, std::min(kPieceBytes, bytes - done));
  }
}

}  // namespace cohort::comm::local
