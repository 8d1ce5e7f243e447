#include "comm/shm/plan.h"

#include "base/env.h"
#include "base/log.h"
#include "base/parse.h"
#include "base/result.h"
#include "comm/shm/context.h"

#include <fmt/format.h>

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace cohort::comm::local {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kTrips = 12;
constexpr std::uint64_t kRepeats = 3;
constexpr std::uint64_t kTurnsOfTrial = 3 * kRepeats;
constexpr std::uint64_t kTurnsOfReading = 3 * 10;  // more repeats than a trial, since reading is measured only once
constexpr std::size_t kLargeRead = std::size_t{32} << 10;
constexpr std::size_t kSmallRead = std::size_t{4} << 10;
constexpr std::uint64_t kMostReading = std::uint64_t{1} << 20;
constexpr std::uint64_t kLeastStaging = std::uint64_t{2} << 20;  // for less, filling the first chunk takes too long

double since(Clock::time_point begin, double unit) noexcept {
  return std::chrono::duration<double>(Clock::now() - begin).count() * unit;
}

}  // namespace

void Distance::measure(std::chrono::microseconds patience) noexcept {
  const std::uint64_t first = turns_ + 1;
  turns_ += 1 + kTrips + 2 * kTurnsOfTrial + 1;  // the last turn marks the end
  // If ranks shared a core, this would measure the scheduler.
  if ((world_.rank() ^ 1) >= world_.size() || world_.crowded()) return;
  if (buffer_.empty()) buffer_.resize(trial_bytes());
  double cached = 0;
  double streamed = 0;
  if (meet(first, patience) && trips(first + 1) && trial(first + 1 + kTrips, Stores::Cached, cached) &&
      trial(first + 1 + kTrips + kTurnsOfTrial, Stores::NonTemporal, streamed)) {
    cached_ = cached;
    streamed_ = streamed;
  }
  // Publishes the end even if this rank gave up, so that the partner does not wait for it.
  world_.state(world_.rank()).probe.value.store(turns_, std::memory_order_release);
}

void Distance::measure_reading(std::chrono::microseconds patience) noexcept {
  const std::uint64_t first = turns_ + 1;
  turns_ += 1 + 2 * kTurnsOfReading + 1;
  if ((world_.rank() ^ 1) >= world_.size() || world_.crowded()) return;
  if (buffer_.empty()) buffer_.resize(trial_bytes());
  double small = 0;
  double large = 0;
  if (meet(first, patience) && read_trial(first + 1, kSmallRead, small) &&
      read_trial(first + 1 + kTurnsOfReading, kLargeRead, large)) {
    read_byte_ = std::max(large - small, 0.0) / static_cast<double>(kLargeRead - kSmallRead);
    read_begin_ = std::max(small - read_byte_ * static_cast<double>(kSmallRead), 0.01);
  }
  world_.state(world_.rank()).probe.value.store(turns_, std::memory_order_release);
}

std::optional<std::uint64_t> Distance::reading_pays_from() const noexcept {
  if (cached_ <= 0 || read_begin_ <= 0) return std::nullopt;
  // Staging also waits for its chunks. So in whole operations, reading is faster unless it takes more than twice as
  // long for each byte. It pays from the size whose staging takes half as long as the fixed cost of reading.
  if (read_byte_ > 2 * staged_byte()) return kNever;
  const double bytes = read_begin_ / (2 * staged_byte());
  std::uint64_t least = kLeastReading;
  while (static_cast<double>(least) < bytes) {
    least *= 2;
    if (least > kMostReading) return kNever;
  }
  return least;
}

// Waits for the partner to begin the measurement, for about `patience`.
bool Distance::meet(std::uint64_t turn, std::chrono::microseconds patience) noexcept {
  world_.state(world_.rank()).probe.value.store(turn, std::memory_order_release);
  const auto begin = Clock::now();
  while (!await(turn)) {
    if (world_.ended() || Clock::now() - begin > patience) return false;
    ::sched_yield();
  }
  return true;
}

bool Distance::await(std::uint64_t turn) const noexcept {
  const std::atomic<std::uint64_t>& theirs = world_.state(world_.rank() ^ 1).probe.value;
  for (int spins = 0; spins < 10000; ++spins) {
    const std::uint64_t reached = theirs.load(std::memory_order_acquire);
    // A partner that reaches the end too early has given up; its answers would seem to take no time.
    if (reached >= turn) return reached < turns_ || turn + 1 == turns_;
    sys::cpu_relax();
  }
  return false;
}

bool Distance::trips(std::uint64_t first) noexcept {
  std::atomic<std::uint64_t>& own = world_.state(world_.rank()).probe.value;
  const bool leads = world_.rank() % 2 == 0;
  double least = 1e9;
  auto before = Clock::now();
  for (std::uint64_t turn = first; turn < first + kTrips; ++turn) {
    if (!leads && !await(turn)) return false;
    own.store(turn, std::memory_order_release);
    if (leads && !await(turn)) return false;
    if (turn > first + 1) least = std::min(least, since(before, 1e9));
    before = Clock::now();
  }
  round_trip_ = least;
  return true;
}

// Measures the time in which both ranks write a staging buffer of their own and read the other's.
bool Distance::trial(std::uint64_t first, Stores stores, double& microseconds) noexcept {
  const int rank = world_.rank();
  const ControlLayout& layout = world_.layout();
  std::atomic<std::uint64_t>& own = world_.state(rank).probe.value;
  microseconds = 1e9;
  for (std::uint64_t turn = first; turn < first + kTurnsOfTrial;) {
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    const auto begin = Clock::now();
    copy(layout.staging(world_.control(), rank, 0), buffer_.data(), trial_bytes(), stores);
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    copy(buffer_.data(), layout.staging(world_.control(), rank ^ 1, 0), trial_bytes(), Stores::Cached);
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    microseconds = std::min(microseconds, since(begin, 1e6));
  }
  return true;
}

// Both ranks write their own staging buffer and read the other's through the kernel. Measures only the reading.
bool Distance::read_trial(std::uint64_t first, std::size_t bytes, double& microseconds) noexcept {
  const int rank = world_.rank();
  const ControlLayout& layout = world_.layout();
  std::atomic<std::uint64_t>& own = world_.state(rank).probe.value;
  const auto* const theirs = layout.staging(world_.control(), rank ^ 1, 0);
  const std::uint64_t address = world_.state(rank ^ 1).control_address +
                                static_cast<std::uint64_t>(theirs - static_cast<const std::byte*>(world_.control()));
  microseconds = 1e9;
  bool readable = true;
  for (std::uint64_t turn = first; turn < first + kTurnsOfReading;) {
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    copy(layout.staging(world_.control(), rank, 0), buffer_.data(), bytes, Stores::Cached);
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    const auto begin = Clock::now();
    readable = readable && world_.read_peer(rank ^ 1, buffer_.data(), address, bytes).has_value();
    microseconds = std::min(microseconds, since(begin, 1e6));
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
  }
  return readable;
}

namespace {

/// Parses a size such as "64K", "1M" or "4096".
std::optional<std::uint64_t> parse_size(std::string_view text) {
  std::uint64_t unit = 1;
  if (!text.empty()) {
    const char last = text.back();
    if (last == 'K' || last == 'k') unit = std::uint64_t{1} << 10;
    if (last == 'M' || last == 'm') unit = std::uint64_t{1} << 20;
    if (unit != 1) text.remove_suffix(1);
  }
  const auto number = parse_integer<std::uint64_t>(text);
  if (!number || *number > (std::uint64_t{1} << 40)) return std::nullopt;
  return *number * unit;
}

std::string size_text(std::uint64_t bytes) {
  if (bytes == kNever) return "never";
  return bytes % 1024 == 0 ? fmt::format("{} KiB", bytes / 1024) : fmt::format("{} B", bytes);
}

Result<void> force_one(Plan& plan, std::string_view name, std::string_view value, const ControlLayout& layout,
                       bool cross) {
  const auto size = parse_size(value);
  if (name == "inline" && size && *size <= layout.payload_bytes()) {
    plan.inline_bytes = plan.inline_root_bytes = plan.inline_copy_bytes = *size;
  } else if (name == "chunk" && size && *size >= 4096 && *size <= layout.chunk_bytes()) {
    plan.chunk_bytes = *size / kLine * kLine;
  } else if (name == "zero-copy" && (value == "on" || value == "off")) {
    plan.zero_copy = value == "on" ? 1 : 0;
  } else if (name == "stores" && (value == "cached" || value == "nt" || value == "auto")) {
    const StorePolicy policy = value == "auto"     ? StorePolicy::Auto
                               : value == "cached" ? StorePolicy::Cached
                                                   : StorePolicy::NonTemporal;
    plan.stores = static_cast<std::uint32_t>(policy);
  } else if (name == "cross" && (value == "on" || value == "off" || size)) {
    if (value != "off" && !cross) {
      return fail(ErrorCode::Unavailable,
                  "COHORT_PLAN: cross={}: a rank may not read its peers' memory (process_vm_readv) -- see "
                  "/proc/sys/kernel/yama/ptrace_scope and the container's seccomp profile",
                  value);
    }
    const std::uint64_t least = value == "off" ? kNever : value == "on" ? 1 : *size;
    plan.cross_reduce_bytes = least;
    plan.cross_copy_bytes = least;
    plan.staged_copy_bytes = kNever;
  } else {
    return fail(
        ErrorCode::InvalidArgument,
        "COHORT_PLAN: cannot use '{}={}' -- give inline=SIZE (to {}), chunk=SIZE (4K to {}), cross=on|off|SIZE, "
        "zero-copy=on|off or stores=cached|nt|auto",
        name, value, size_text(layout.payload_bytes()), size_text(layout.chunk_bytes()));
  }
  return {};
}

}  // namespace

Result<void> force(Plan& plan, std::string_view text, const ControlLayout& layout, bool cross) {
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    if (item.empty()) continue;
    const std::size_t equals = item.find('=');
    const std::string_view value = equals == std::string_view::npos ? std::string_view() : item.substr(equals + 1);
    if (auto done = force_one(plan, item.substr(0, equals), value, layout, cross); !done) return done;
  }
  return {};
}

Plan make_plan(const World& world, bool cross, const Distance& distance) {
  const ControlLayout& layout = world.layout();
  Plan plan;
  // Limits measured on two machines (bench/RESULTS.md): up to these sizes it is faster if every rank folds everything.
  // With more ranks than cores a second wait costs more.
  plan.inline_bytes =
      std::min<std::uint64_t>(layout.payload_bytes(), std::uint64_t{world.size() <= 2 ? 8u : 16u} << 10);
  // If one rank folds everything, the others are done and may begin the next operation meanwhile.
  plan.inline_root_bytes = layout.payload_bytes();
  const std::uint64_t least_cross = cross ? distance.reading_pays_from().value_or(kLeastReading) : kNever;
  plan.inline_copy_bytes = std::min(least_cross - 1, std::max<std::uint64_t>(plan.inline_bytes, kLeastReading));
  plan.chunk_bytes = layout.usual_chunk_bytes();
  // Reductions do not read through the kernel, which is slower than staging for data that a peer has just written.
  plan.cross_reduce_bytes = kNever;
  plan.cross_copy_bytes = least_cross;
  if (cross && distance.staging_is_faster()) plan.staged_copy_bytes = kLeastStaging;
  if (const auto forced = env::get(env::kPlan)) value_or_throw(force(plan, *forced, layout, cross));
  return plan;
}

void log_plan(const World& world, const Plan& plan, bool cross, const Distance& distance) {
  log::info("plan", "{} ranks on {}{}; a cache line there and back {}", world.size(), world.host(),
            world.crowded() ? ", more than cores" : "",
            distance.round_trip() > 0 ? fmt::format("{:.0f} ns", distance.round_trip()) : std::string("not measured"));
  log::info(
      "plan",
      "beside the announcements: reductions up to {}, to one rank up to {}, what only moves up to {}; else chunks "
      "of {}; registered memory {}",
      size_text(plan.inline_bytes), size_text(plan.inline_root_bytes), size_text(plan.inline_copy_bytes),
      size_text(plan.chunk_bytes), plan.zero_copy ? "in place" : "staged");
  log::info(
      "plan",
      "through the kernel: {}; slices of reductions from {}, blocks that move from {}; broadcasts and gathers are "
      "staged again from {}",
      cross ? "allowed" : "not allowed", size_text(plan.cross_reduce_bytes), size_text(plan.cross_copy_bytes),
      size_text(plan.staged_copy_bytes));
  log::info("plan", "staging is written {}{}",
            plan.stores != 0                      ? "as forced"
            : distance.better() == Stores::Cached ? "through the caches"
                                                  : "past the caches",
            distance.cached() > 0
                ? fmt::format(": {} to the next core take {:.1f} us through them, {:.1f} us past them",
                              size_text(distance.trial_bytes()), distance.cached(), distance.streamed())
                : std::string());
  if (distance.read_begin() > 0) {
    log::info("plan", "a read through the kernel takes {:.2f} us and {:.1f} us for each 32 KiB", distance.read_begin(),
              distance.read_byte() * 32768);
  }
}

}  // namespace cohort::comm::local
