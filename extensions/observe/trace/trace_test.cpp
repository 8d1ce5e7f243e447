#include "base/files.h"
#include "observe/trace/merge.h"
#include "observe/trace/report.h"
#include "observe/trace/trace_set.h"
#include "telemetry/trace_writer.h"

#include <cohort/error.h>

#include <gtest/gtest.h>
#include <stdlib.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

namespace cohort::track {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using status::HostTrace;
using status::RankTrace;
using status::TimelineEntry;
using status::TimelineKind;

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kMillisecond = 1'000'000;

/// The folder of a run on two hosts with one rank each. The hosts' clocks differ by hours, and drift. Each rank does
/// ten steps of 20 ms by the true clock; rank 1 comes 3 ms late to each collective.
class TraceTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "trace-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    run_ = pattern;
    fs::create_directories(run_ / "trace");
  }
  void TearDown() override { fs::remove_all(run_); }

  struct Host {
    HostTrace trace;
    std::int64_t ahead_ns = 0;
    double drift = 0;  ///< seconds per second
    std::int64_t there(std::int64_t true_ns) const {
      return true_ns + ahead_ns + static_cast<std::int64_t>(static_cast<double>(true_ns) * drift);
    }
  };

  static TimelineEntry entry(const Host& host, TimelineKind kind, std::int64_t begun, std::int64_t ended) {
    TimelineEntry out;
    out.kind = kind;
    out.begun_ns = host.there(begun);
    out.ended_ns = host.there(ended);
    return out;
  }

  std::string record(const Host& host, int rank, bool measured = true) const {
    std::string out;
    const std::int64_t base = host.there(kStart - kSecond / 2);
    host.trace.append_description(out);
    out = status::begin_list(out);
    host.trace.append_clocks(out, base, host.there(kStart), kDay + kStart);
    for (const std::int64_t at : {kStart, kStart + kSecond}) {
      if (measured) host.trace.append_offset(out, base, host.there(at), host.there(at) - at + 3000, 20'000);
    }
    // This measurement is much worse than the others, so it is not used.
    if (measured) host.trace.append_offset(out, base, host.there(kStart + 2 * kSecond), 77 * kSecond, kSecond);
    RankTrace trace({static_cast<std::uint32_t>(rank), 0, host.trace.name, 100 + rank, base});
    for (int step = 0; step < 10; ++step) {
      const std::int64_t begin = kStart + step * 20 * kMillisecond;
      const std::int64_t late = rank == 1 ? 3 * kMillisecond : 0;
      TimelineEntry forward = entry(host, TimelineKind::Span, begin, begin + 5 * kMillisecond);
      forward.lane = static_cast<std::uint32_t>(100 + rank);
      trace.append(out, forward, "forward");
      // The operation begins when this rank comes, and ends on both ranks at the same moment.
      TimelineEntry reduce =
          entry(host, TimelineKind::Operation, begin + 10 * kMillisecond + late, begin + 16 * kMillisecond);
      reduce.lane = 42;
      reduce.number = static_cast<std::uint64_t>(step + 1);
      reduce.bytes = 1 << 20;
      reduce.waited_ns = rank == 1 ? 0 : 3 * kMillisecond;
      reduce.wire_bytes = 1000;
      reduce.wire_us = 10;
      trace.append(out, reduce, "all_reduce");
      TimelineEntry wait = entry(host, TimelineKind::Wait, begin + 14 * kMillisecond, begin + 16 * kMillisecond);
      wait.lane = forward.lane;
      trace.append(out, wait, "wait");
      TimelineEntry whole = entry(host, TimelineKind::Step, begin, begin + 20 * kMillisecond);
      whole.number = static_cast<std::uint64_t>(step + 1);
      trace.append(out, whole, "step");
    }
    if (rank == 1) trace.append_lost(out, host.there(kStart), 5);
    return out;
  }

  fs::path write(const std::string& name, const std::string& text) const {
    const fs::path file = run_ / name;
    value_or_throw(sys::write_file_atomically(file.string(), text));
    return file;
  }
  static Json events_of(const fs::path& file) {
    return Json::parse(value_or_throw(sys::read_file(file.string())).text())["traceEvents"];
  }
  void write_both() const {
    write("trace/host-0.json", record(a_, 0));
    write("trace/host-1.json", record(b_, 1));
  }

  static std::string message_of(const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was thrown";
  }

  static constexpr std::int64_t kStart = 5000 * kSecond;
  static constexpr std::int64_t kDay = 1'700'000'000 * kSecond;
  const Host a_{{0, "a"}, 0, 0};
  const Host b_{{1, "b"}, 7 * 3600 * kSecond, 40e-6};
  fs::path run_;
};

TEST_F(TraceTest, HostsWithClocksHoursApartAreOnOneTimeBase) {
  write_both();
  const TraceSet set = open_traces(run_);
  ASSERT_EQ(set.pieces.size(), 2U);
  EXPECT_EQ(set.pieces[1].host, "b");
  EXPECT_EQ(set.pieces[1].clock.uncertainty_ns(), 20'000);
  std::vector<std::vector<std::int64_t>> ends(2);
  for (const HostPiece& piece : set.pieces) {
    each_slice(set, piece, [&](const Slice& slice) {
      if (slice.event.name == "all_reduce") ends[slice.track.rank].push_back(slice.ended_ns);
    });
  }
  ASSERT_EQ(ends[0].size(), 10U);
  ASSERT_EQ(ends[1].size(), 10U);
  for (std::size_t i = 0; i < 10; ++i) EXPECT_LE(std::llabs(ends[0][i] - ends[1][i]), 20'000) << i;
}

TEST_F(TraceTest, TheReportNamesTheLateRank) {
  write_both();
  const TraceReport report = make_report(open_traces(run_));
  ASSERT_EQ(report.ranks.size(), 2U);
  const RankFigures& first = report.ranks[0];
  const RankFigures& late = report.ranks[1];
  EXPECT_EQ(first.steps, 10);
  EXPECT_NEAR(first.step_seconds, 0.2, 1e-6);
  EXPECT_NEAR(first.seconds, 0.2, 1e-6);
  EXPECT_NEAR(first.communication_seconds, 0.06, 1e-6);
  EXPECT_NEAR(first.exposed_seconds, 0.02, 1e-6);
  EXPECT_NEAR(first.hidden_seconds, 0.04, 1e-6);
  EXPECT_NEAR(first.waited_seconds, 0.03, 1e-6);
  EXPECT_EQ(first.last, 0);
  EXPECT_EQ(late.last, 10);
  EXPECT_NEAR(late.made_wait_seconds, 0.03, 1e-6);
  EXPECT_EQ(late.lost, 5U);
  ASSERT_EQ(report.operations.size(), 1U);
  EXPECT_EQ(report.operations[0].count, 20);
  EXPECT_EQ(report.operations[0].bytes, 1U << 20);
  const std::string text = to_text(report);
  EXPECT_NE(text.find("all_reduce"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1: 5 events are missing"), std::string::npos) << text;
  const Json json = Json::parse(to_json(report));
  EXPECT_EQ(json["ranks"][1]["last"], 10);
  EXPECT_EQ(json["hosts"][1]["uncertainty_ns"], 20'000);
}

TEST_F(TraceTest, MergedTracesHaveAllEventsAndBytesUnderWay) {
  write_both();
  const fs::path merged = run_ / "all.json";
  const MergeSummary summary = merge_traces(open_traces(run_), {}, merged);
  EXPECT_EQ(summary.ranks, 2);
  EXPECT_TRUE(summary.remarks.empty());
  EXPECT_NE(message_of([&] { open_traces(merged); }).find("this is no trace of one host"), std::string::npos);
  int slices = 0, counters = 0;
  std::map<std::string, int> flows, begun;
  std::vector<std::string> processes;
  for (const Json& event : events_of(merged)) {
    if (event["name"] == "process_name") processes.push_back(event["args"]["name"]);
    slices += event["ph"] == "X" ? 1 : 0;
    counters += event["ph"] == "C" ? 1 : 0;
    if (!event.contains("bind_id")) continue;
    ++flows[event["bind_id"]];
    if (event.contains("flow_in")) continue;
    ++begun[event["bind_id"]];
    EXPECT_EQ(event["pid"], 0);  // rank 1 comes later
  }
  EXPECT_EQ(slices, 2 * 10 * 4);
  EXPECT_EQ(counters, 2 * 10 * 2);
  EXPECT_EQ(flows.size(), 10U);  // each collective is the same one on both ranks
  EXPECT_EQ(begun.size(), 10U);
  for (const auto& [flow, ranks] : flows) EXPECT_EQ(ranks, 2);
  EXPECT_EQ(processes, (std::vector<std::string>{"clock of a", "rank 0 (a, pid 100; clock ± 20 us)", "clock of b",
                                                 "rank 1 (b, pid 101; clock ± 20 us)"}));
}

TEST_F(TraceTest, AHostWhoseClockIsNotKnownIsMarked) {
  write("trace/host-0.json", record(a_, 0));
  write("trace/host-1.json", record(b_, 1, /*measured=*/false));
  const MergeSummary summary = merge_traces(open_traces(run_), {}, run_ / "all.json");
  ASSERT_EQ(summary.remarks.size(), 1U);
  EXPECT_NE(summary.remarks[0].find("b: its clock was not measured"), std::string::npos);
  const sys::FileBytes bytes = value_or_throw(sys::read_file((run_ / "all.json").string()));
  EXPECT_NE(bytes.text().find("rank 1 (b, pid 101; clock not measured"), std::string::npos);
}

TEST_F(TraceTest, ATornTraceIsReadUpToTheTear) {
  const std::string whole = record(a_, 0);
  std::mt19937 random(1);
  for (int trial = 0; trial < 100; ++trial) {
    const std::string torn = whole.substr(0, 200 + random() % (whole.size() - 200));
    const TraceSet set = open_traces(write("trace/host-0.json", torn));
    (void)make_report(set);
    const MergeSummary summary = merge_traces(set, {}, run_ / "all.json");
    const bool at_an_end = !set.pieces[0].torn;
    EXPECT_EQ(summary.remarks.empty(), at_an_end);
  }
}

TEST_F(TraceTest, OtherProgramsTracesLieOnTheSameTimeBase) {
  write_both();
  const auto kineto = [&](int rank, bool says_rank) {
    Json trace{{"schemaVersion", 1}, {"baseTimeNanoseconds", kDay}};
    if (says_rank) trace["distributedInfo"] = {{"rank", rank}, {"world_size", 2}};
    const double microseconds = static_cast<double>(kStart + 10 * kMillisecond) / 1000;
    trace["traceEvents"] = Json::array(
        {{{"ph", "M"}, {"name", "thread_name"}, {"pid", 100}, {"tid", 7}, {"args", {{"name", "thread 7 (python)"}}}},
         {{"ph", "X"}, {"name", "inner"}, {"pid", 100}, {"tid", 7}, {"ts", microseconds}, {"dur", 100}},
         {{"ph", "X"}, {"name", "outer"}, {"pid", 100}, {"tid", 7}, {"ts", microseconds}, {"dur", 1000}},
         {{"ph", "X"}, {"name", "not within"}, {"pid", 100}, {"tid", 7}, {"ts", microseconds + 900}, {"dur", 1000}},
         {{"ph", "f"}, {"name", "ac2g"}, {"ts", microseconds}}});
    return read_chrome_trace(write("kineto-" + std::to_string(rank) + ".json", trace.dump()));
  };
  const TraceSet set = open_traces(run_);
  merge_traces(set, {kineto(0, true), kineto(1, true)}, run_ / "all.json");
  std::vector<std::int64_t> ours(2), theirs;
  const auto ns_of = [](const Json& event) { return std::llround(event["ts"].get<double>() * 1000); };
  for (const Json& event : events_of(run_ / "all.json")) {
    if (event["name"] == "all_reduce" && ours[event["pid"]] == 0) ours[event["pid"]] = ns_of(event);
    if (event["name"] == "outer") theirs.push_back(ns_of(event));
    if (event["name"] == "inner") {
      EXPECT_EQ(ns_of(event), theirs.back());  // within the outer one, which comes later in their file
    }
  }
  ASSERT_EQ(theirs.size(), 2U);
  EXPECT_LE(std::llabs(theirs[0] - ours[0]), 30'000);
  EXPECT_LE(std::llabs(theirs[1] + 3 * kMillisecond - ours[1]), 30'000);

  EXPECT_NE(message_of([&] { merge_traces(set, {kineto(0, false)}, run_ / "x"); }).find("name the rank: 3="),
            std::string::npos);
  EXPECT_NE(message_of([&] { merge_traces(set, {kineto(5, true)}, run_ / "x"); }).find("it is of rank 5"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(run_ / "x"));
}

TEST_F(TraceTest, HorovodsTimelineIsTakenAlsoWhereItsEndIsMissing) {
  const std::string text =
      "[\n{\"name\": \"start_time\", \"ph\": \"M\", \"pid\": 0, \"args\": {\"start_time_since_epoch_in_micros\": "
      "1000000, "
      "\"rank\": 1}},\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": 1, \"args\": {\"name\": "
      "\"allreduce.w\"}},\n"
      "{\"name\": \"ALLREDUCE\", \"ph\": \"B\", \"ts\": 5.5, \"pid\": 1, \"tid\": 0},\n"
      "{\"name\": \"ALLREDUCE\", \"ph\": \"E\", \"ts\": 7, \"pid\": 1, \"tid\": 0},\n{\"name\": \"ALL";
  const ChromeTrace trace = read_chrome_trace(write("horovod.json", text));
  EXPECT_EQ(trace.rank, 1U);
  ASSERT_EQ(trace.rows.size(), 1U);
  const auto& [row, slices] = *trace.rows.begin();
  ASSERT_EQ(slices.size(), 1U);
  EXPECT_EQ(slices[0].begun_ns, 1'000'005'500);
  EXPECT_EQ(slices[0].ended_ns, 1'000'007'000);
  EXPECT_EQ(trace.names.at(row), "allreduce.w");
}

TEST_F(TraceTest, JsonIsAsTorchsProfilerWritesIt) {
  write_both();
  const TraceSet set = open_traces(run_);
  merge_traces(set, {}, run_ / "all.json");
  const Json all = Json::parse(value_or_throw(sys::read_file((run_ / "all.json").string())).text());
  EXPECT_EQ(all["distributedInfo"]["world_size"], 2);
  // (Before the first measurement, the drift is not known.)
  EXPECT_NEAR(all["baseTimeNanoseconds"].get<double>(), static_cast<double>(kDay + kStart - kSecond / 2), 50'000);
  int slices = 0;
  for (const Json& event : all["traceEvents"]) slices += event["ph"] == "X" ? 1 : 0;
  EXPECT_EQ(slices, 2 * 10 * 4);

  fs::create_directories(run_ / "each");
  merge_traces(set, {}, run_ / "each");
  const ChromeTrace own = read_chrome_trace(run_ / "each/rank-1.json");  // our traces can be read like other programs'
  EXPECT_EQ(own.rank, 1U);
  EXPECT_FALSE(fs::exists(run_ / "each/rank-2.json"));
}

TEST_F(TraceTest, WhatIsNoTraceIsRefusedByName) {
  EXPECT_NE(message_of([&] { open_traces(run_); }).find("was the run started with `cohort run --trace`"),
            std::string::npos);
  EXPECT_NE(message_of([&] { open_traces(run_ / "nowhere"); }).find("there is no such run"), std::string::npos);
  const fs::path noise = write("noise", "this is no trace at all");
  EXPECT_NE(message_of([&] { open_traces(noise); }).find("this is no trace of one host"), std::string::npos);
  EXPECT_NE(message_of([&] { open_traces(write("empty", "")); }).find("this is no trace of one host"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              read_chrome_trace(write("deep.json", std::string(300'000, '[')));
            }).find("no trace in Chrome's JSON format"),
            std::string::npos);
  EXPECT_NE(message_of([&] { read_chrome_trace(noise); }).find("no trace in Chrome's JSON format"), std::string::npos);
  EXPECT_NE(message_of([&] { read_chrome_trace(write("old.json", "{\"traceEvents\": []}")); }).find("when it began"),
            std::string::npos);
}

}  // namespace
}  // namespace cohort::track
