#include "comm/hosts/engine.h"

#include "base/ranges.h"
#include "base/result.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace cohort::comm::hosts {
namespace {

using namespace std::chrono_literals;

constexpr auto kDriving = 2ms;       // how often a rank drives the transport that waits for those beside it
constexpr auto kGrace = 1000ms;      // for another host's own report of who is missing
constexpr auto kShortGrace = 100ms;  // for the report of one of those who are missing

}  // namespace

Engine::Engine(World& world, Waiters& waiters, std::function<void()> meanwhile)
    : world_(world),
      layout_(world.layout()),
      local_(world.local().core().engine()),
      transport_(world.transport()),
      lane_(world.status().collectives),
      waiters_(waiters),
      meanwhile_(std::move(meanwhile)),
      // All leaders send all to all: beyond two, twice as many bytes as by owners soon cost more than a round trip.
      beside_bytes_(layout_.hosts == 2 ? std::size_t{32} << 10
                                       : std::max<std::size_t>(
                                             1024, (std::size_t{16} << 10) / static_cast<std::size_t>(layout_.hosts))),
      tuner_(layout_),
      round_(layout_.size),
      infos_(static_cast<std::size_t>(layout_.hosts)),
      scratch_(8) {
  local_.serve_larger(waiters, [this] { while_with_neighbours(); });
}

void Engine::run(const Request& request, Clock::time_point called, CollectiveEvent* event) {
  world_.throw_if_ended();
  called_ = called;
  timeout_ = request.timeout;
  transport_.forget(sequence_);
  ++sequence_;
  waited_ = 0ns;
  wire_bytes_ = 0;
  local_.called_at(called_, timeout_);
  const Descriptor own = describe(request);
  world_.label().begin(sequence_, own);
  announce(own);
  if (event != nullptr) event->sequence = sequence_;
  try {
    round(&request, own);
    if (event != nullptr) event->waited = waited_;
    blocked_ = 0ns;
    refuse_if(disagreement());
    if (request.kind == Kind::AllToAllV) refuse_if(compare_counts(request));
    if (!delivered_) execute(request, false);
    if (event != nullptr) {
      event->wire = blocked_;
      event->wire_bytes = wire_bytes_;
    }
    // A rank that comes late can complete what others have given up, from what they sent before. What they said then
    // lies behind that on the same connection; whoever reads it holds the mutex until all of it is read.
    const std::lock_guard lock(transport_.mutex());
    world_.throw_if_ended();
    lane_.end(sequence_);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::Mismatch) throw;
    world_.tell_if_ended();
    if (!world_.ended()) world_.end(error.code(), -1, sequence_, error.what());
    throw;
  }
}

int Engine::join(std::chrono::milliseconds patience) {
  world_.throw_if_ended();
  // Who came in a later round came later; within one, clocks have to tell.
  const auto ticket = static_cast<std::int64_t>(sequence_ + 1);
  const auto clock = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  while (true) {
    called_ = Clock::now();
    timeout_ = patience;
    local_.called_at(called_, timeout_);
    transport_.forget(sequence_);
    lane_.end(sequence_);
    ++sequence_;
    Descriptor own;
    own.kind = Kind::Joined;
    own.count = ticket;
    own.detail = clock;
    world_.label().begin(sequence_, own);
    announce(own);
    round(nullptr, own);
    if (round_.active.empty()) break;
    if (disagreement()) continue;  // the active ranks are told; this one brought nothing that could be wrong
    Request served;
    served.kind = round_.agreed.kind;
    served.dtype = round_.agreed.dtype;
    served.op = round_.agreed.op;
    served.weighted = round_.agreed.weighted != 0;
    served.bf16_wire = round_.agreed.bf16_wire != 0;
    served.prescale = round_.agreed.prescale;
    served.postscale = round_.agreed.postscale;
    served.root = round_.agreed.root;
    served.input_count = served.output_count = round_.agreed.count;
    served.timeout = patience;
    execute(served, true);
  }
  lane_.end(sequence_);
  const auto last =
      std::max_element(round_.brought.begin(), round_.brought.end(), [](const Descriptor& a, const Descriptor& b) {
        return std::pair(a.count, a.detail) < std::pair(b.count, b.detail);
      });
  return static_cast<int>(last - round_.brought.begin());
}

// --- what is said of it outside ---

void Engine::announce(const Descriptor& own) noexcept {
  lane_.begin(sequence_, status::LaneStatus::pack(static_cast<std::uint8_t>(own.kind), own.dtype, own.op), own.count);
}

void Engine::Waiting::tell() noexcept {
  told_ = true;
  // Threads of the program may come and go while this one, which may be the communicator's, waits.
  const bool awaited = engine_.waiters_.awaited.load(std::memory_order_relaxed) > 0;
  engine_.lane_.waiting.store(awaited ? 1 : 0, std::memory_order_relaxed);
}

Engine::Waiting::~Waiting() {
  if (!told_) return;
  engine_.lane_.waiting.store(0, std::memory_order_relaxed);
  engine_.lane_.note_wait(static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - since_).count()));
}

// --- waiting ---

Engine::Clock::time_point Engine::deadline() const noexcept {
  return std::min(called_ + timeout_, Clock::time_point(Clock::duration(limit_.load(std::memory_order_relaxed))));
}

/// Of a wait for ranks on other hosts. One that has ranks beside it may wait for them, and then its host tells first.
/// Of several who have not come to the operation one may still wait for the other in the last one, and knows better.
Engine::Clock::time_point Engine::deadline_of(const std::vector<int>& missing) const noexcept {
  if (layout_.on(layout_.host_of(missing.front())).size() > 1) return deadline() + kGrace;
  return deadline() + (missing.size() > 1 && !over_ ? kShortGrace : 0ms);
}

void Engine::look_after(const std::function<std::vector<int>()>& missing_now) {
  meanwhile_();
  world_.tell_if_ended();
  if (world_.ended()) world_.throw_ended();
  std::vector<int> missing = missing_now();
  for (const int rank : missing) {
    const auto how = transport_.lost(rank);
    if (!how) continue;
    const std::vector<int> still = missing_now();
    if (std::find(still.begin(), still.end(), rank) == still.end()) continue;
    if (world_.ended()) world_.throw_ended();  // it may have said why before it went
    world_.end_lost(rank, *how);
  }
  if (missing.empty() || Clock::now() < deadline_of(missing)) return;
  if (over_) {
    // The rank that this one waits for may itself wait for another one, from which something is expected here as well.
    const std::vector<int> owing = transport_.owing();
    std::vector<int> all;
    std::set_union(owing.begin(), owing.end(), missing.begin(), missing.end(), std::back_inserter(all));
    missing = std::move(all);
  }
  const auto limit = Clock::time_point(Clock::duration(limit_.load(std::memory_order_relaxed)));
  const std::string after = called_ + timeout_ <= limit ? fmt::format("after {} ms", timeout_.count())
                                                        : std::string("(an operation behind it did)");
  world_.end_and_throw(
      ErrorCode::Timeout, missing.size() > 1 && over_ ? -1 : missing.front(), sequence_,  // -1: nobody is accused
      fmt::format("{} timed out {} -- rank {} ({}), operation {} -- {} -- is it stopped, slow, or in another branch of "
                  "the program? give a longer timeout if it is only slow",
                  world_.label().doing(), after, layout_.rank, world_.options().placement.host, sequence_,
                  omission(missing)));
}

/// What ranks that are waited for did not do. A rank may be late because another one of its host is.
std::string Engine::omission(const std::vector<int>& missing) const {
  std::vector<std::string> who;
  for (const int rank : missing) {
    const auto& there = layout_.on(layout_.host_of(rank));
    const std::string pid = world_.pid_text(rank);
    const std::string beside =
        there.size() == 1 ? "" : fmt::format(", or another of ranks {} on its host,", to_ranges(there));
    const std::string what = over_ ? fmt::format("has not done all that operation {} needs of it", sequence_)
                                   : fmt::format("did not come to operation {}", sequence_);
    who.push_back(fmt::format("rank {}{}{} {} (host {})", rank, pid.empty() ? "" : fmt::format(" ({})", pid), beside,
                              what, world_.host_name(rank)));
    if (who.size() == 8 && missing.size() > 8) {
      who.push_back(fmt::format("and {} more", missing.size() - who.size()));
      break;
    }
  }
  const char* const chain = over_ && missing.size() > 1 ? "; one of them may wait for another" : "";
  return fmt::format("{}{}", fmt::join(who, "; "), chain);
}

void Engine::wait_for(transport::Incoming& frame) {
  const auto done = [&] { return frame.done.load(std::memory_order_acquire); };
  wait(done, [&] { return done() ? std::vector<int>() : std::vector<int>{frame.peer}; });
  if (frame.bytes > frame.room) {
    world_.end_and_throw(
        ErrorCode::Corrupt, frame.peer, sequence_,
        fmt::format("rank {} sent {} bytes where at most {} were expected", frame.peer, frame.bytes, frame.room));
  }
}

void Engine::wait_for(transport::Outgoing& frame) {
  const auto done = [&] { return frame.done.load(std::memory_order_acquire); };
  wait(done, [&] { return done() ? std::vector<int>() : std::vector<int>{frame.peer}; });
}

void Engine::send(transport::Outgoing& frame, int peer, std::uint32_t tag, const void* data, std::size_t bytes) {
  frame.peer = peer;
  frame.operation = sequence_;
  frame.tag = tag;
  frame.data = static_cast<const std::byte*>(data);
  frame.bytes = bytes;
  frame.authenticated = moves_objects();
  frame.done.store(false, std::memory_order_relaxed);
  wire_bytes_ += bytes;
  const auto begun = Clock::now();
  transport_.send(frame);
  blocked_ += Clock::now() - begun;  // much of a wire's work may be done by who hands it the bytes
}

void Engine::receive(transport::Incoming& frame, int peer, std::uint32_t tag, void* to, std::size_t room) {
  frame.peer = peer;
  frame.operation = sequence_;
  frame.tag = tag;
  frame.to = static_cast<std::byte*>(to);
  frame.room = room;
  frame.bytes = 0;
  frame.authenticated = moves_objects();
  frame.done.store(false, std::memory_order_relaxed);
  transport_.receive(frame);
}

// --- the local world ---

void Engine::while_with_neighbours() {
  const auto now = Clock::now();
  if (here_ == nullptr || now - drove_ < kDriving) return;
  drove_ = now;
  here_->tell();
  transport_.progress();
  meanwhile_();
}

void Engine::run_local(const Request& request) {
  with_neighbours([&] { local_.run_part(request); });
}

Request Engine::local_request(Kind kind, DType dtype) const {
  Request request;
  request.kind = kind;
  request.dtype = dtype;
  return request;
}

void Engine::local_broadcast(int root, void* data, std::size_t bytes) {
  Request request = local_request(Kind::Broadcast, DType::UInt8);
  request.root = root;
  request.input = request.output = data;
  request.input_count = request.output_count = static_cast<std::int64_t>(bytes);
  run_local(request);
}

}  // namespace cohort::comm::hosts
