#include "comm/hosts/context.h"

#include "base/parse.h"
#include "base/result.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace cohort::comm::hosts {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kPieceOfOne = 32 * kKiB;
constexpr std::size_t kPieceOfMany = 64 * kKiB;  // if hosts have several ranks
constexpr std::size_t kMostPiece = 1024 * kKiB;
constexpr std::size_t kMostFrameOfOne = 128 * kKiB;
constexpr std::size_t kMostFrameOfMany = 64 * kKiB;  // the transport stores early frames of this size
constexpr std::size_t kTells = 1024 * kKiB;          // shorter sums underestimate the wire's rate,
constexpr std::size_t kHints = 128 * kKiB;           // but may show that the rate is higher than was known
constexpr std::size_t kLeastBlock = 32 * kKiB;
constexpr std::size_t kBlocks = 8;  // about the number of blocks of a sum, so that the wire starts early
constexpr std::int64_t kLeastAhead = 3;
constexpr std::chrono::duration<double> kOnTheWay = 1ms;  // time by which a rank alone on its host sends ahead,
constexpr double kPiecesOnTheWay = 8;                     // divided into this many pieces
constexpr double kMostOnTheWay = 255;
constexpr std::chrono::duration<double> kBlock = 600us;  // longest time of a block of several ranks

}  // namespace

ChunkTuner::ChunkTuner(const Layout& layout) noexcept
    : hosts_(std::min(layout.hosts, Levels::kRadix)),
      columns_(layout.stripes),
      alone_(layout.size == layout.hosts),
      least_bytes_(alone_ ? kPieceOfOne : kPieceOfMany) {
  const auto frames = static_cast<std::size_t>(columns_ * (hosts_ > 2 ? hosts_ : 1));  // frames per piece
  while (piece_bytes(most_ + 1) <= std::min(kMostPiece, (alone_ ? kMostFrameOfOne : kMostFrameOfMany) * frames))
    ++most_;
}

/// The length of pieces is a time on the wire, not a number of bytes: on a fast wire the overhead per piece matters, on
/// a slow one that stripes drift apart. With more than two hosts, each piece is divided further among the hosts.
void ChunkTuner::learn(std::size_t bytes, Duration took) noexcept {
  const std::size_t all = bytes * static_cast<std::size_t>(columns_);
  if (all < kHints || took <= Duration::zero()) return;
  const double rate = static_cast<double>(bytes) / std::chrono::duration<double>(took).count();
  if (all < kTells && rate <= rate_) return;
  rate_ = rate_ == 0 ? rate : (rate_ + rate) / 2;
  const int frames = hosts_ > 2 ? hosts_ : 1;
  const double wanted =
      alone_ ? rate_ * frames * kOnTheWay.count() / kPiecesOnTheWay : rate_ * columns_ * kBlock.count();
  doublings_ = 0;
  while (doublings_ < most_ && static_cast<double>(piece_bytes(doublings_ + 1)) <= wanted) ++doublings_;
}

std::size_t ChunkTuner::block_bytes(std::size_t sum_bytes, int doublings) const noexcept {
  if (alone_) return piece_bytes(doublings);
  return std::clamp(sum_bytes / kBlocks / kLeastBlock * kLeastBlock, kLeastBlock, piece_bytes(doublings));
}

int ChunkTuner::doublings_of(std::size_t sum_bytes, int doublings) const noexcept {
  if (!alone_ || hosts_ == 2) return doublings;
  const std::size_t longest = std::max(kPieceOfOne * static_cast<std::size_t>(hosts_), sum_bytes / kBlocks);
  while (doublings > 0 && piece_bytes(doublings) > longest) --doublings;
  return doublings;
}

int ChunkTuner::on_the_way() const noexcept {
  return static_cast<int>(std::min(rate_ * kOnTheWay.count() / static_cast<double>(least_bytes_), kMostOnTheWay));
}

std::int64_t ChunkTuner::ahead(int doublings, int on_the_way) const noexcept {
  if (!alone_) return kLeastAhead;
  return std::clamp<std::int64_t>(on_the_way >> doublings, kLeastAhead, kMostAhead);
}

namespace {

using namespace std::chrono_literals;

constexpr auto kDriving = 2ms;       // how often a rank that waits for others of its host drives the transport
constexpr auto kGrace = 1000ms;      // in which another host can report its missing ranks
constexpr auto kTurnGrace = 3000ms;  // in which a receiver can report for whom it waits, with all of its own grace
constexpr auto kLongWait = 200ms;    // longer waits are reported to peers
constexpr auto kShortGrace = 100ms;  // in which a missing rank can report for whom it waits

constexpr std::size_t kFast = 512 * kKiB;      // bytes in transit on a wire of 4 Gbit/s
constexpr std::size_t kPausesInOnTheWay = 10;  // pairs of extra trips that fit into the time of those bytes

/// Limit for inline sums, of which each leader sends the whole to all others. With more than two hosts that is twice as
/// many bytes as if each host folds a part, which soon costs more than a round trip.
std::size_t most_inline(int hosts) noexcept {
  if (hosts == 2) return std::size_t{32} << 10;
  return std::max<std::size_t>(1024, (std::size_t{16} << 10) / static_cast<std::size_t>(hosts));
}

}  // namespace

Context::Context(World& its_world, Waiters& waiters, std::function<void()> meanwhile)
    : world(its_world),
      layout(its_world.layout()),
      levels(its_world.levels()),
      local(its_world.local().core().context()),
      transport(its_world.transport()),
      inline_bytes(most_inline(layout.hosts)),
      tuner(layout),
      agreement(layout.size),
      lane_(its_world.status().collectives),
      waiters_(waiters),
      meanwhile_(std::move(meanwhile)),
      scratch_(8) {
  local.serve(waiters, [this] { while_with_neighbours(); });
}

std::size_t Context::sum_inline_bytes() const noexcept {
  const std::size_t on_wire = static_cast<std::size_t>(on_the_way) * tuner.piece_bytes();
  if (layout.size > layout.hosts || on_wire < kFast) return inline_bytes;
  std::size_t hosts = 1;  // the number of hosts that get this host's bytes, and itself
  for (int each = 0; each < levels.count(); ++each) hosts += static_cast<std::size_t>(levels.radix(each) - 1);
  const std::size_t pays = hosts == 2 ? kMostInline : on_wire * hosts / ((hosts - 1) * (hosts - 2) * kPausesInOnTheWay);
  return std::clamp(pays, inline_bytes, kMostInline);
}

void Context::begin(const Descriptor& own, Clock::time_point called, std::chrono::milliseconds timeout) {
  waiters_.deadline.begin(called, timeout);
  transport.forget(sequence);
  ++sequence;
  world.label().begin(sequence, own);
  lane_.begin(sequence, status::LaneStatus::pack(static_cast<std::uint8_t>(own.kind), own.dtype, own.op), own.count);
}

std::vector<std::byte>& Context::scratch(std::size_t which, std::size_t bytes) {
  std::vector<std::byte>& memory_of = scratch_[which];
  if (memory_of.size() < bytes) memory_of.resize(bytes);
  return memory_of;
}

// --- the status page ---

void Context::Waiting::tell() noexcept {
  told_ = true;
  // Other threads of the program may begin and end waits while this thread, possibly the communicator's, waits.
  const bool awaited = context_.waiters_.awaited.load(std::memory_order_relaxed) > 0;
  context_.lane_.waiting.store(awaited ? 1 : 0, std::memory_order_relaxed);
}

Context::Waiting::~Waiting() {
  if (!told_) return;
  context_.lane_.waiting.store(0, std::memory_order_relaxed);
  context_.lane_.note_wait(static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - since_).count()));
}

// --- waiting ---

/// Deadline of a wait for ranks on other hosts. A missing rank may itself wait for ranks of its host, or for a rank
/// that does, and is given time to report them first. If several ranks are missing, one of them may still wait for
/// another in the previous operation, and its report is more precise.
Context::Clock::time_point Context::deadline_of(const std::vector<int>& missing) const noexcept {
  const auto of_hosts = layout.size > layout.hosts ? kGrace : 0ms;
  return waiters_.deadline.when() + of_hosts + (missing.size() > 1 && !over ? kShortGrace : 0ms);
}

/// Tells the ranks that may wait for this one that it waits itself, so that they do not take it for the late rank.
void Context::tell_of_long_wait(Clock::time_point since, Clock::time_point now) {
  if (levels.count() == 1 || told_of_wait_) return;
  if (now - since < std::min<Clock::duration>(kLongWait, (waiters_.deadline.when() - since) / 4)) return;
  told_of_wait_ = true;
  world.tell_waiting(sequence);
}

void Context::end_wait() {
  if (std::exchange(told_of_wait_, false)) world.tell_waiting(0);
}

void Context::look_after(const std::function<std::vector<int>()>& missing_now) {
  meanwhile_();
  world.tell_if_ended();
  if (world.ended()) world.throw_ended();
  std::vector<int> missing = missing_now();
  for (const int rank : missing) {
    const auto how = transport.lost(rank);
    if (!how) continue;
    const std::vector<int> still = missing_now();
    if (std::find(still.begin(), still.end(), rank) == still.end()) continue;
    if (world.ended()) world.throw_ended();  // the rank may have sent the reason before it left
    world.end_lost(rank, *how);
  }
  if (missing.empty()) return;
  // A rank that is known to wait is late because of another rank, about which that rank's neighbours know more.
  const auto waits = [&](int rank) { return world.waits(rank, sequence); };
  const auto leave_out_those_that_wait = [&] {
    const bool all_wait = std::all_of(missing.begin(), missing.end(), waits);
    if (!all_wait) std::erase_if(missing, waits);
    return all_wait;
  };
  bool all_wait = leave_out_those_that_wait();
  if (Clock::now() < deadline_of(missing) + (for_turn_ ? kTurnGrace : all_wait ? kGrace : 0ms)) return;
  if (over) {
    // The missing rank may itself wait for another rank, from which this rank expects a frame too.
    const std::vector<int> owing = transport.owing();
    std::vector<int> all;
    std::set_union(owing.begin(), owing.end(), missing.begin(), missing.end(), std::back_inserter(all));
    missing = std::move(all);
    all_wait = leave_out_those_that_wait();
  }
  const RunningOperation running{world.label().doing(), sequence, layout.rank, world.options().placement.host};
  const int accused = all_wait || (missing.size() > 1 && over) ? -1 : missing.front();
  world.end_and_throw(ErrorCode::Timeout, accused, sequence,
                      timeout_text(running, waiters_.deadline, omission(missing, all_wait)));
}

void Context::attend() {
  transport.progress();
  meanwhile_();
  const auto now = Clock::now();
  if (now - looked_ < kLook && !world.ended()) return;
  looked_ = now;
  world.tell_if_ended();
  world.throw_if_ended();
  for (int rank = 0; rank < layout.size; ++rank) {
    if (rank == layout.rank) continue;
    // A rank that left in order has sent everything.
    if (const auto how = world.lost(rank); how && *how != transport::kLeft) world.end_lost(rank, *how);
  }
}

/// Describes what the missing ranks did not do. A rank may be late because another rank of its host is late.
std::string Context::omission(const std::vector<int>& missing, bool all_wait) const {
  const auto described = [&](int rank) {
    const auto& there = layout.on(layout.host_of(rank));
    const std::string pid = world.pid_text(rank);
    const std::string beside =
        there.size() == 1 ? "" : fmt::format(", or another of ranks {} on its host,", to_ranges(there));
    const std::string what =
        all_wait
            ? fmt::format("waits itself for a rank that this one does not know, in operation {} or before", sequence)
        : over ? fmt::format("has not done all that operation {} needs of it", sequence)
               : fmt::format("did not come to operation {}", sequence);
    return fmt::format("rank {}{}{} {} (host {})", rank, pid.empty() ? "" : fmt::format(" ({})", pid), beside, what,
                       world.host_name(rank));
  };
  const char* const chain = over && missing.size() > 1 ? "; one of them may wait for another" : "";
  return list_missing(missing, described) + chain;
}

void Context::wait_for(transport::Incoming& frame) {
  const auto done = [&] { return frame.done.load(std::memory_order_acquire); };
  wait(done, [&] { return done() ? std::vector<int>() : std::vector<int>{frame.peer}; });
  if (frame.bytes > frame.room) {
    world.end_and_throw(
        ErrorCode::Corrupt, frame.peer, sequence,
        fmt::format("rank {} sent {} bytes where at most {} were expected", frame.peer, frame.bytes, frame.room));
  }
}

void Context::wait_for(transport::Outgoing& frame) {
  const auto done = [&] { return frame.done.load(std::memory_order_acquire); };
  wait(done, [&] { return done() ? std::vector<int>() : std::vector<int>{frame.peer}; });
}

void Context::wait_for_turn(int receiver, std::int64_t number) {
  transport::Incoming turn;
  const FrameGuard guard(world);
  receive(turn, receiver, tag(Step::Turn, number), nullptr, 0);
  for_turn_ = true;
  const std::unique_ptr<bool, void (*)(bool*)> until_end(&for_turn_, [](bool* on) { *on = false; });
  wait_for(turn);
}

void Context::send(transport::Outgoing& frame, int peer, std::uint32_t tag, const void* data, std::size_t bytes) {
  frame.peer = peer;
  frame.operation = sequence;
  frame.tag = tag;
  frame.data = static_cast<const std::byte*>(data);
  frame.bytes = bytes;
  frame.authenticated = moves_objects();
  frame.done.store(false, std::memory_order_relaxed);
  wire_bytes += bytes;
  const auto begun = Clock::now();
  transport.send(frame);
  blocked += Clock::now() - begun;  // the sending thread may do much of the wire's work
}

void Context::receive(transport::Incoming& frame, int peer, std::uint32_t tag, void* to, std::size_t room) {
  frame.peer = peer;
  frame.operation = sequence;
  frame.tag = tag;
  frame.to = static_cast<std::byte*>(to);
  frame.room = room;
  frame.bytes = 0;
  frame.authenticated = moves_objects();
  frame.done.store(false, std::memory_order_relaxed);
  transport.receive(frame);
}

// --- the local world ---

void Context::while_with_neighbours() {
  const auto now = Clock::now();
  if (here_ == nullptr || now - drove_ < kDriving) return;
  drove_ = now;
  here_->tell();
  tell_of_long_wait(here_->since(), now);
  transport.progress();
  meanwhile_();
}

void Context::run_local(const Request& request) {
  with_neighbours([&] { local::run_part(local, request); });
}

Request local_request(Kind kind, DType dtype) {
  Request request;
  request.kind = kind;
  request.dtype = dtype;
  return request;
}

void Context::local_broadcast(int root, void* data, std::size_t bytes) {
  if (bytes <= local.plan.inline_copy_bytes) {
    return with_neighbours([&] { local::hand_out(local, root, data, bytes); });
  }
  Request request = local_request(Kind::Broadcast, DType::UInt8);
  request.root = root;
  request.input = request.output = data;
  request.input_count = request.output_count = static_cast<std::int64_t>(bytes);
  run_local(request);
}

}  // namespace cohort::comm::hosts
