#include "comm/local/engine.h"

#include "base/log.h"
#include "base/result.h"
#include "comm/local/plan.h"
#include "sys/cpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace cohort::comm::local {

namespace {

// For a partner to begin measuring: it may still be asleep.
constexpr auto kPatienceAtStart = std::chrono::milliseconds(20);
// While a job starts, ranks are interrupted; a measurement that is interrupted does not count.
constexpr int kMeasurements = 3;

}  // namespace

Engine::Engine(World& world, Waiters& waiters, const FormOptions& options)
    : Waiter(world, waiters), rank_(world.rank()), size_(world.size()), distance_(world), round_(world.size()) {
  if (size_ == 1) return;
  set_deadline(Clock::now(), options.join_timeout);
  waiters_->attended = 1;  // forming is waited for
  note_cores();
  state(rank_).reads_peers.store(world_.try_reading_peers() ? 1 : 2);
  posted();
  wait_for_all([&](int rank) { return state(rank).reads_peers.load() != 0; });
  bool cross = true;
  for (int rank = 0; rank < size_; ++rank) cross = cross && state(rank).reads_peers.load() == 1;
  for (int i = 0; i < kMeasurements; ++i) {
    distance_.measure(kPatienceAtStart);
    if (cross) distance_.measure_reading(kPatienceAtStart);
  }
  if (rank_ == 0) {
    header().plan = make_plan(world_, cross, distance_);
    header().plan_ready.store(1);
    posted();
  }
  wait_for_all([&](int rank) { return rank != 0 || header().plan_ready.load() != 0; });
  plan_ = header().plan;
  if (rank_ == 0) log_plan(world_, plan_, cross, distance_);
  if (plan_.cross_reduce_bytes != kNever || plan_.cross_copy_bytes != kNever) {
    // A rank's slice of a chunk, whose borders lie on cache lines, or a piece of a larger slice.
    scratch_bytes_ = std::max(kPullPiece, plan_.chunk_bytes / static_cast<std::size_t>(size_) + 4 * kLine);
    scratch_.resize(static_cast<std::size_t>(size_) * scratch_bytes_);
  }
  waiters_->attended = 0;
}

// Whether there is a core for each rank: ranks may be bound to different ones, so all of them say where they may run.
void Engine::note_cores() {
  RankState& own = state(rank_);
  own.cores = sys::allowed_cores();
  own.control_address = reinterpret_cast<std::uint64_t>(world_.control());
  own.ready.store(1);
  posted();
  wait_for_all([&](int rank) { return state(rank).ready.load() != 0; });
  sys::CoreSet all{};
  for (int rank = 0; rank < size_; ++rank) {
    for (std::size_t i = 0; i < all.size(); ++i) all[i] |= state(rank).cores[i];
  }
  // Fewer than the affinity allows: a quota of the control group.
  const int usable = sys::usable_cores();
  const bool quota = usable < sys::count(own.cores);
  world_.set_crowded(size_ > (quota ? usable : sys::count(all)));
}

// --- rounds ---

void Engine::size_up(const Request& request) noexcept {
  const std::size_t beside = bytes_beside(request, size_);
  const std::uint64_t most = !is_reduction(request.kind)    ? plan_.inline_copy_bytes
                             : request.kind == Kind::Reduce ? plan_.inline_root_bytes
                                                            : plan_.inline_bytes;
  small_ = beside <= most && request.kind != Kind::AllToAllV;
  tiny_ = beside <= Slot::kTiny;
}

void Engine::announce(const Request& request) {
  if (world_.ended()) throw_if_ended();
  ++sequence_;
  if (size_ == 1) return;
  size_up(request);
  Descriptor& own = own_slot().descriptor;
  own = describe(request);
  lane().begin(sequence_, status::LaneStatus::pack(static_cast<std::uint8_t>(own.kind), own.dtype, own.op), own.count);
  if (!small_) note_memory(own, request);  // else nobody will look at the memory itself
  if (request.kind == Kind::AllToAllV) note_counts(*request.counts);
  publish(brings(request) ? &request : nullptr);
}

void Engine::note_memory(Descriptor& own, const Request& request) const {
  const auto& mesh = world_.mesh();
  own.input_offset = reinterpret_cast<std::uint64_t>(request.input);
  own.output_offset = reinterpret_cast<std::uint64_t>(request.output);
  if (const auto place = mesh->locate(request.input, request.input_bytes())) {
    own.input_segment = place->segment;
    own.input_offset = place->offset;
  }
  if (request.output == request.input && request.output_count == request.input_count) {
    own.output_segment = own.input_segment;
    own.output_offset = own.input_offset;
  } else if (const auto there = mesh->locate(request.output, request.output_bytes())) {
    own.output_segment = there->segment;
    own.output_offset = there->offset;
  }
}

// Whether this rank's input lies beside its announcement.
bool Engine::brings(const Request& request) const noexcept {
  if (request.input_count == 0 || !small_) return false;
  const bool is_root = request.root == rank_;
  const bool from_root =
      request.kind == Kind::Broadcast || request.kind == Kind::Scatter || request.kind == Kind::ScatterV;
  return from_root ? is_root : request.kind != Kind::Reduce || !is_root;
}

void Engine::note_counts(const Counts& counts) noexcept {
  std::byte* const to = layout().payload(world_.control(), rank_, sequence_);
  const std::size_t row = static_cast<std::size_t>(size_) * sizeof(std::int64_t);
  if (!has_room_for_counts()) return;
  std::memcpy(to, counts.input.data(), row);
  std::memcpy(to + row, counts.output.data(), row);
}

// The descriptor is in the slot already. `beside`: whose input goes with it, if any.
void Engine::publish(const Request* beside) {
  Slot& slot = own_slot();
  slot.descriptor.announcements = world_.mesh()->announcements();
  slot.fingerprint = fingerprint_of(slot.descriptor);
  if (beside != nullptr && tiny_) {
    std::memcpy(slot.tiny, beside->input, beside->input_bytes());
  } else if (beside != nullptr) {
    copy(layout().payload(world_.control(), rank_, sequence_), beside->input, beside->input_bytes(),
         stores_for(beside->input_bytes()));
  }
  local::publish(slot.sequence, sequence_);
  posted();
}

bool Engine::await_peers(std::chrono::microseconds patience) {
  return size_ == 1 || wait_a_while_for_all([&](int rank) { return has_announced(rank); }, patience);
}

bool Engine::await_peers(std::chrono::steady_clock::time_point limit) {
  return size_ == 1 || wait_for_all([&](int rank) { return has_announced(rank); }, limit);
}

void Engine::complete(const Request& request, CollectiveEvent* event) {
  if (event != nullptr) {
    event->sequence = sequence_;
    event->group = world_.group();
  }
  if (size_ == 1) return run_alone(request);
  gather();
  if (event != nullptr) event->waited = Clock::now() - event->begun;
  if (!round_.uniform) {
    auto found = disagreement();
    if (!found && request.kind == Kind::AllToAllV) found = compare_counts();
    if (found) {
      const std::string own = to_string(round_.brought[static_cast<std::size_t>(rank_)]);
      throw refusal(own, rank_, world_.host(), sequence_, *std::move(found));
    }
  }
  execute(request, event);
  // A rank that comes late can complete what others have given up, with what their memory holds by then.
  if (!small_ && world_.ended_before_reads()) throw_if_ended();
  if (request.finite_check) report_finite(*request.finite_check);
  lane().end(sequence_);
}

void Engine::gather() {
  const std::uint64_t sequence = sequence_;
  wait_for_all([&](int rank) { return has_announced(rank); });
  const Slot& own = own_slot();
  serving_ = own.descriptor.kind == Kind::Joined;
  bool uniform = small_ && own.descriptor.weighted == 0;
  for (int rank = 0; rank < size_ && uniform; ++rank) {
    uniform = state(rank).slots[sequence % 2].fingerprint == own.fingerprint;
  }
  if (uniform) return round_.settle_on(own.descriptor);
  for (int rank = 0; rank < size_; ++rank) {
    Descriptor& brought = round_.brought[static_cast<std::size_t>(rank)];
    brought = state(rank).slots[sequence % 2].descriptor;
    if (rank != rank_ && world_.mesh()->received(rank) < brought.announcements) {
      if (const auto got = world_.mesh()->receive(rank, brought.announcements); !got) {
        end_world(got.error().code(), rank, got.error().what());
      }
    }
  }
  round_.settle();
}

std::optional<Disagreement> Engine::disagreement() const {
  return round_.disagreement(rank_, [](int) { return std::string(); });
}

void Engine::check_room_for_counts() const {
  if (has_room_for_counts()) return;
  throw Error(ErrorCode::Unavailable,
              fmt::format("all_to_all_v failed -- rank {} ({}) -- {} ranks on one host are more than it can serve ({})",
                          rank_, world_.host(), size_, layout().payload_bytes() / 2 / sizeof(std::int64_t)),
              ErrorContext{});
}

std::optional<Disagreement> Engine::compare_counts() const {
  check_room_for_counts();
  const auto ranks = static_cast<std::size_t>(size_);
  const auto row = [&](int rank) {
    return reinterpret_cast<const std::int64_t*>(layout().payload(world_.control(), rank, sequence_));
  };
  return comm::compare_counts(
      size_, rank_, [&](int from, int to) { return row(from)[to]; },
      [&](int to, int from) { return row(to)[ranks + static_cast<std::size_t>(from)]; });
}

std::string Engine::doing() const {
  if (sequence_ == 0) return "forming the world";
  if (const OperationLabel* const label = world_.label()) return label->doing();
  return to_string(state(rank_).slots[sequence_ % 2].descriptor);
}

std::string Engine::omission(int rank) const {
  const Slot* const slots = state(rank).slots;
  const std::uint64_t begun = std::max(slots[0].sequence.load(), slots[1].sequence.load());
  if (const OperationLabel* const label = world_.label()) {
    return begun >= sequence_ ? fmt::format("did not finish its part of operation {}", label->number())
                              : fmt::format("did not come to operation {}, or to a later step of it", label->number());
  }
  if (begun >= sequence_) return fmt::format("came to operation {} but did not finish it", sequence_);
  if (begun == 0) return fmt::format("did not come to operation {}; it has brought nothing yet", sequence_);
  return fmt::format("did not come to operation {}; its last was operation {}, {}", sequence_, begun,
                     to_string(slots[begun % 2].descriptor));
}

// --- join, abort ---

int Engine::join(std::chrono::milliseconds patience) {
  throw_if_ended();
  if (size_ == 1) return 0;
  const std::int64_t ticket = header().join_tickets.fetch_add(1);
  while (true) {
    set_deadline(Clock::now(), patience);
    lane().end(sequence_);
    ++sequence_;
    small_ = false;
    Descriptor& own = own_slot().descriptor;
    own = Descriptor{};
    own.kind = Kind::Joined;
    own.count = ticket;
    lane().begin(sequence_, status::LaneStatus::pack(static_cast<std::uint8_t>(own.kind), own.dtype, own.op), 0);
    publish(nullptr);
    gather();
    if (round_.active.empty()) break;
    if (disagreement()) continue;  // the active ranks are told; this one brought nothing that could be wrong
    Request served;
    served.kind = round_.agreed.kind;
    served.dtype = round_.agreed.dtype;
    served.op = round_.agreed.op;
    served.input_count = round_.agreed.count;
    served.output_count = round_.agreed.count;
    size_up(served);
    execute(served, nullptr);
  }
  lane().end(sequence_);
  const auto last = std::max_element(round_.brought.begin(), round_.brought.end(),
                                     [](const Descriptor& a, const Descriptor& b) { return a.count < b.count; });
  return static_cast<int>(last - round_.brought.begin());
}

void Engine::abort(std::string_view reason) noexcept {
  const std::uint64_t begun = std::max(state(rank_).slots[0].sequence.load(), state(rank_).slots[1].sequence.load());
  try {
    world_.record(ErrorCode::Aborted, -1, begun,
                  fmt::format("aborted by rank {} on {} -- {}", world_.name(rank_), world_.host(), reason));
  } catch (...) {
    world_.record(ErrorCode::Aborted, -1, begun, reason);
  }
}

}  // namespace cohort::comm::local
