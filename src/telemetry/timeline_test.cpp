#include "telemetry/timeline.h"

#include "base/env.h"
#include "telemetry/trace_writer.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace cohort::status {
namespace {

using namespace std::chrono_literals;
using timeline::Clock;

/// Runs `body` in a child that has this ring, as ranks do.
int in_rank(const sys::SharedSegment& ring, const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv(std::string(env::kTimelineFd).c_str(), std::to_string(ring.fd.get()).c_str(), 1);
    timeline::detail::state.store(timeline::detail::kUnknown);
    body();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

const TimelineLayout& layout_of(const sys::SharedSegment& ring) {
  return *static_cast<const TimelineLayout*>(ring.mapping.data());
}

timeline::Event span(std::string_view name, std::uint64_t number = 0) {
  const Clock::time_point now = Clock::now();
  return {TimelineKind::Span, name, now - 1us, now, timeline::this_thread(), number, 0, {}};
}

struct Ring {
  sys::SharedSegment segment = value_or_throw(create_timeline());
  TimelineReader reader{layout_of(segment)};
  std::vector<TimelineEntry> drain(TimelineReader::Until until = TimelineReader::Until::Now) {
    std::vector<TimelineEntry> all;
    reader.drain(until, [&all](const TimelineEntry& entry) { all.push_back(entry); });
    return all;
  }
};

TEST(TimelineTest, WhatARankWritesComesOutInOrderAlsoWhenItIsKilled) {
  Ring ring;
  const int status = in_rank(ring.segment, [] {
    CollectiveEvent event;
    event.operation = "all_reduce";
    event.begun = Clock::now();
    event.ended = event.begun + 5us;
    event.waited = 3us;
    event.wire = 2ms;
    event.bytes = 4096;
    event.wire_bytes = 100;
    event.sequence = 7;
    event.group = 0x100000002;
    event.failed = true;
    timeline::add(event);
    timeline::add_step(1);
    timeline::add_step(2);
    timeline::add(span("forward"));
    ::raise(SIGKILL);
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  const auto all = ring.drain(TimelineReader::Until::End);
  ASSERT_EQ(all.size(), 4U);
  EXPECT_EQ(all[0].kind, TimelineKind::Operation);
  EXPECT_EQ(ring.reader.name(all[0].name), "all_reduce");
  EXPECT_EQ(all[0].ended_ns - all[0].begun_ns, 5000);
  EXPECT_EQ(all[0].waited_ns, 3000U);
  EXPECT_EQ(all[0].wire_us, 2000U);
  EXPECT_EQ(all[0].bytes, 4096U);
  EXPECT_EQ(all[0].wire_bytes, 100U);
  EXPECT_EQ(all[0].number, 7U);
  EXPECT_EQ(all[0].lane, 3U);  // both halves of the group
  EXPECT_TRUE(all[0].failed);
  EXPECT_EQ(all[1].begun_ns, all[1].ended_ns);  // when the first step began is not known
  EXPECT_EQ(all[2].begun_ns, all[1].ended_ns);
  EXPECT_EQ(all[2].number, 2U);
  EXPECT_EQ(ring.reader.name(all[3].name), "forward");
  EXPECT_EQ(ring.reader.lost(), 0U);
}

TEST(TimelineTest, WithoutARingNothingHappens) {
  const sys::SharedSegment ring = value_or_throw(create_timeline());
  const int status = in_rank(ring, [] {
    ::unsetenv(std::string(env::kTimelineFd).c_str());
    if (timeline::on()) ::_exit(1);
    timeline::add(span("nobody's"));
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(layout_of(ring).head.load(), 0U);
}

TEST(TimelineTest, ChildrenOfARankDoNotWrite) {
  Ring ring;
  EXPECT_EQ(in_rank(ring.segment,
                    [] {
                      if (!timeline::on()) ::_exit(1);
                      if (const pid_t child = ::fork(); child == 0) {
                        timeline::add(span("of the child"));
                        ::_exit(timeline::on() ? 1 : 0);
                      } else {
                        int status = 0;
                        ::waitpid(child, &status, 0);
                        if (status != 0) ::_exit(2);
                      }
                      timeline::add(span("of the rank"));
                    }),
            0);
  const auto all = ring.drain();
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(ring.reader.name(all[0].name), "of the rank");
}

TEST(TimelineTest, TheOldestAreLostAndCountedWhereTheReaderLags) {
  Ring ring;
  constexpr std::uint64_t kEvents = TimelineLayout::kSlots + 1000;
  EXPECT_EQ(in_rank(ring.segment,
                    [] {
                      for (std::uint64_t i = 0; i < kEvents; ++i) timeline::add(span("event", i));
                    }),
            0);
  const auto all = ring.drain();
  ASSERT_EQ(all.size(), TimelineLayout::kSlots);
  EXPECT_EQ(ring.reader.lost(), 1000U);
  for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i].number, i + 1000);
}

TEST(TimelineTest, ManyThreadsWriteWhileOneReads) {
  Ring ring;
  constexpr int kThreads = 4;
  constexpr std::uint64_t kEach = 30'000;
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv(std::string(env::kTimelineFd).c_str(), std::to_string(ring.segment.fd.get()).c_str(), 1);
    timeline::detail::state.store(timeline::detail::kUnknown);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([thread] {
        const std::string name = "thread " + std::to_string(thread);
        for (std::uint64_t i = 0; i < kEach; ++i) timeline::add(span(name, i));
      });
    }
    for (auto& thread : threads) thread.join();
    ::_exit(0);
  }
  std::uint64_t taken = 0;
  std::map<std::string, std::uint64_t, std::less<>> next;
  int status = -1;
  const auto take = [&](const TimelineEntry& entry) {
    ++taken;
    const std::string name(ring.reader.name(entry.name));
    ASSERT_TRUE(name.starts_with("thread ")) << name;
    ASSERT_GE(entry.number, next[name]);  // a thread's events are in order; some may be lost
    ASSERT_LT(entry.number, kEach);
    next[name] = entry.number + 1;
    ASSERT_EQ(entry.ended_ns - entry.begun_ns, 1000);  // both words are of one event
  };
  while (::waitpid(child, &status, WNOHANG) == 0) ring.reader.drain(TimelineReader::Until::Now, take);
  ring.reader.drain(TimelineReader::Until::End, take);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(taken + ring.reader.lost(), kThreads * kEach);
  EXPECT_GT(taken, 0U);
}

TEST(TimelineTest, MoreNamesThanThereIsRoomForAreOneName) {
  Ring ring;
  EXPECT_EQ(in_rank(ring.segment,
                    [] {
                      for (std::size_t i = 0; i < 2 * TimelineLayout::kNames; ++i)
                        timeline::add(span("n" + std::to_string(i)));
                      timeline::add(span("n0"));
                      timeline::add(span(std::string(500, 'x')));
                    }),
            0);
  std::set<std::string> names;
  const auto all = ring.drain();
  for (const TimelineEntry& entry : all) names.emplace(ring.reader.name(entry.name));
  EXPECT_EQ(all.size(), 2 * TimelineLayout::kNames + 2);
  EXPECT_TRUE(names.contains(""));
  EXPECT_GT(names.size(), TimelineLayout::kNames / 2);
  EXPECT_EQ(ring.reader.name(all[all.size() - 2].name), "n0");  // early names keep their places
}

TEST(TimelineTest, AnEventThatIsNeverFinishedIsWaitedForOnce) {
  Ring ring;
  EXPECT_EQ(in_rank(ring.segment,
                    [] {
                      timeline::add(span("a", 1));
                      timeline::add(span("b", 2));
                    }),
            0);
  auto& layout = *static_cast<TimelineLayout*>(ring.segment.mapping.data());
  layout.slots[0].stamp.store(0);  // as if the writer had been killed before this store
  EXPECT_TRUE(ring.drain().empty());
  const auto all = ring.drain();
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(all[0].number, 2U);
  EXPECT_EQ(ring.reader.lost(), 1U);
}

TEST(TimelineTest, NothingThatAnotherProcessWritesIsBelieved) {
  Ring ring;
  auto& layout = *static_cast<TimelineLayout*>(ring.segment.mapping.data());
  layout.head.store(4);
  layout.slots[0].stamp.store(1);  // kind 0
  layout.slots[1].what.store(200);
  layout.slots[1].stamp.store(2);
  layout.slots[2].what.store(1 | std::uint64_t{0xffff} << 16);
  layout.slots[2].begun_ns.store(10);  // ends before it begins
  layout.slots[2].stamp.store(3);
  layout.slots[3].what.store(6 | std::uint64_t{0xffff} << 16);
  layout.slots[3].ended_ns.store(INT64_MAX);
  layout.slots[3].stamp.store(4);
  layout.names[5].state.store(0xffffffff);
  const auto all = ring.drain(TimelineReader::Until::End);
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(ring.reader.name(all[0].name), "");
  EXPECT_EQ(ring.reader.name(5).size(), TimelineName::kBytes);
  EXPECT_EQ(ring.reader.lost(), 3U);
  std::string trace;
  RankTrace({0, 0, "a", 1, 0}).append(trace, all[0], ring.reader.name(5));
  EXPECT_FALSE(trace.empty());
}

TEST(TraceWriterTest, EachEventIsJsonWhateverItsTextsAre) {
  std::string events;
  append_process(events, 3, "rank 3 (\"a\"\\, pid 1)");
  TraceEvent event{3, 4096, "a\xff\n\"b\""};
  event.begun_ns = 1234567;
  event.ended_ns = 1234568;
  event.flow = 0xfedcba9876543210;
  event.bytes = UINT64_MAX;
  append_event(events, event);
  append_counter(events, 3, "n", 5, -7);
  event.begun_ns = -5000;  // earlier than the base
  append_event(events, event);
  const auto list = nlohmann::json::parse(begin_list(events) + "\n]");
  ASSERT_EQ(list.size(), 5U);
  EXPECT_EQ(list[0]["args"]["name"], "rank 3 (\"a\"\\, pid 1)");
  EXPECT_EQ(list[2]["name"], "a\xef\xbf\xbd\n\"b\"");
  EXPECT_EQ(list[2]["ts"], 1234.567);
  EXPECT_EQ(list[2]["dur"], 0.001);
  EXPECT_EQ(list[2]["bind_id"], "0xfedcba9876543210");
  EXPECT_EQ(list[2]["args"]["bytes"], UINT64_MAX);
  EXPECT_EQ(list[3]["args"]["n"], -7);
  EXPECT_EQ(list[4]["ts"], 0);
  EXPECT_EQ(list[4]["dur"], 1234.568);
  EXPECT_EQ(std::ranges::count(events, '\n'), 5);  // one line each, so that a reader never needs more than a line
}

}  // namespace
}  // namespace cohort::status
