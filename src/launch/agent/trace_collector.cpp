#include "launch/agent/trace_collector.h"

#include <chrono>
#include <ctime>

namespace cohort::launch {
namespace {

constexpr auto kDrainEvery = std::chrono::milliseconds(100);
/// Interval for noting both clocks: NTP moves CLOCK_REALTIME, which other programs' traces use.
constexpr std::int64_t kNoteClocksEvery = 60'000'000'000;
/// Size from which events are sent as one message.
constexpr std::size_t kPiece = std::size_t{256} << 10;

std::int64_t now_of(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

const status::TimelineLayout& layout_of(const sys::SharedSegment& ring) {
  return *static_cast<const status::TimelineLayout*>(ring.mapping.data());
}

}  // namespace

Result<int> TraceCollector::add(int rank) {
  auto ring = status::create_timeline();
  if (!ring) return tl::unexpected(ring.error());
  const status::TimelineLayout& layout = layout_of(*ring);
  ranks_.push_back({*std::move(ring), status::TimelineReader(layout), nullptr, 0, rank});
  return ranks_.back().ring.fd.get();
}

void TraceCollector::wait() {
  again_ = Timer(loop_, kDrainEvery, [this] {
    if (upstream_.has_room()) drain(status::TimelineReader::Until::Now);
    wait();
  });
}

void TraceCollector::drain(status::TimelineReader::Until until) {
  std::string out;
  note_clocks(out);
  for (Rank& rank : ranks_) {
    drain(rank, until, out);
    if (out.size() >= kPiece) upstream_.send(TracePiece{options_.base_ns, std::exchange(out, {})});
  }
  if (!out.empty()) upstream_.send(TracePiece{options_.base_ns, std::move(out)});
}

void TraceCollector::drain(Rank& rank, status::TimelineReader::Until until, std::string& out) const {
  std::int64_t first_ns = 0;
  std::string events;
  rank.reader.drain(until, [&](const status::TimelineEntry& entry) {
    if (!rank.trace) {
      rank.trace = std::make_unique<status::RankTrace>(
          status::RankTrace::Options{static_cast<std::uint32_t>(rank.rank), options_.epoch, options_.host.name,
                                     layout_of(rank.ring).pid.load(), options_.base_ns});
    }
    if (first_ns == 0) first_ns = entry.ended_ns;
    rank.trace->append(events, entry, rank.reader.name(entry.name));
  });
  // The lost entries are older than these.
  if (const std::uint64_t lost = rank.reader.lost(); lost > rank.told_lost && rank.trace) {
    rank.trace->append_lost(out, first_ns != 0 ? first_ns : now_of(CLOCK_MONOTONIC), lost - rank.told_lost);
    rank.told_lost = lost;
  }
  out += events;
}

// Reads both clocks as close together as possible.
void TraceCollector::note_clocks(std::string& out) {
  const std::int64_t before = now_of(CLOCK_MONOTONIC);
  if (clocks_noted_ns_ != 0 && before - clocks_noted_ns_ < kNoteClocksEvery) return;
  clocks_noted_ns_ = before;
  std::int64_t shortest = INT64_MAX, monotonic = before, realtime = 0;
  for (int look = 0; look < 5; ++look) {
    const std::int64_t begun = now_of(CLOCK_MONOTONIC);
    const std::int64_t then = now_of(CLOCK_REALTIME);
    const std::int64_t ended = now_of(CLOCK_MONOTONIC);
    if (ended - begun >= shortest) continue;
    shortest = ended - begun;
    monotonic = begun + (ended - begun) / 2;
    realtime = then;
  }
  options_.host.append_clocks(out, options_.base_ns, monotonic, realtime);
}

}  // namespace cohort::launch
