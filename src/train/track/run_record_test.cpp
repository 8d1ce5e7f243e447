#include "telemetry/record.h"

#include <cohort/error.h>
#include <cohort/track.h>

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <numeric>
#include <set>
#include <thread>

namespace cohort::track {
namespace {

namespace fs = std::filesystem;

class RunRecordTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "cohort-record-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    file_ = folder_ / "run.jsonl";
  }
  void TearDown() override { fs::remove_all(folder_); }

  void append_raw(std::string_view text) { std::ofstream(file_, std::ios::app | std::ios::binary) << text; }

  fs::path folder_, file_;
};

TEST_F(RunRecordTest, ReadsBackWhatWasWritten) {
  {
    RunRecord record(
        folder_ / "new" / "run.jsonl",
        {.program = "digits", .world_size = 2, .parameters = {{"lr", 0.5}, {"seed", 7}, {"resume", true}}});
    record.write("step", {{"step", 1}, {"train_loss", 2.25}});
    record.write("note", {{"text", "quotes \" and \\ and \n line ends and \xff no UTF-8"}});
  }
  const RecordLines lines = read_record(folder_ / "new" / "run.jsonl");
  ASSERT_EQ(lines.events.size(), 3U);
  EXPECT_EQ(lines.damaged, 0U);
  EXPECT_FALSE(lines.torn);
  EXPECT_EQ(lines.events[0].event, "start");
  EXPECT_EQ(lines.events[0].number("schema"), 1);
  EXPECT_EQ(lines.events[0].number("world_size"), 2);
  EXPECT_EQ(lines.events[0].number("parameters/lr"), 0.5);
  EXPECT_EQ(lines.events[0].number("parameters/seed"), 7);
  EXPECT_EQ(std::get<bool>(lines.events[0].find("parameters/resume")->value), true);
  EXPECT_EQ(lines.events[1].number("train_loss"), 2.25);
  EXPECT_GT(lines.events[1].time.value(), 1.6e9);
  EXPECT_EQ(lines.events[2].text("text"), "quotes \" and \\ and \n line ends and \xEF\xBF\xBD no UTF-8");
}

TEST_F(RunRecordTest, NumbersThatAreNotFiniteSurvive) {
  RunRecord(file_).write("step", {{"a", std::nan("")}, {"b", HUGE_VAL}, {"c", -HUGE_VAL}, {"d", 1e-300}});
  const auto step = read_record(file_).events.at(1);
  EXPECT_TRUE(std::isnan(step.number("a").value()));
  EXPECT_EQ(step.number("b"), HUGE_VAL);
  EXPECT_EQ(step.number("c"), -HUGE_VAL);
  EXPECT_EQ(step.number("d"), 1e-300);
  EXPECT_EQ(step.number("e"), std::nullopt);
  EXPECT_EQ(step.number("event"), std::nullopt);
}

TEST_F(RunRecordTest, WeightsAreDigestedByName) {
  std::vector<float> values = {1, 2, 3};
  const std::int64_t more = 7;
  const auto write = [&](RunRecord& record, std::int64_t step, Device device = {}) {
    const std::vector<Weight> weights = {{"fc.weight", {values.data(), 3, DType::Float32, device}},
                                         {"steps", {&more, 1, DType::Int64}}};
    record.write_weights(step, weights);
  };
  {
    RunRecord record(file_);
    write(record, 1);
    write(record, 2);
    values[2] = std::nextafter(3.0F, 4.0F);
    write(record, 3);
    EXPECT_THROW(write(record, 4, {DeviceType::CUDA, 0}), Error);
  }
  const RecordLines lines = read_record(file_);
  ASSERT_EQ(lines.events.size(), 4U);
  const auto at = [&lines](std::size_t line, std::string_view field) { return lines.events[line].text(field); };
  EXPECT_EQ(lines.events[2].event, "weights");
  EXPECT_EQ(lines.events[2].integer("step"), 2);
  EXPECT_EQ(at(1, "digest"), at(2, "digest"));
  EXPECT_EQ(at(1, "tensors/fc.weight"), at(2, "tensors/fc.weight"));
  EXPECT_NE(at(1, "tensors/fc.weight"), at(3, "tensors/fc.weight"));
  EXPECT_EQ(at(1, "tensors/steps"), at(3, "tensors/steps"));
  EXPECT_NE(at(1, "digest"), at(3, "digest"));
  EXPECT_EQ(at(1, "digest").size(), 32U);
  EXPECT_EQ(at(1, "tensors/steps"), "eafe63c56f4c62f4ab9d0271072b1c9c");
}

TEST_F(RunRecordTest, DigestsOfWeightsDifferWhereverValuesChangePlaces) {
  std::set<std::string> digests;
  {
    RunRecord record(file_);
    std::vector<float> values(32);
    std::iota(values.begin(), values.end(), 1.0F);
    for (std::size_t i = 0; i + 1 < values.size(); ++i) {
      std::vector<float> swapped = values;
      std::swap(swapped[i], swapped.back());
      const std::vector<Weight> weights = {{"w", {swapped.data(), 32, DType::Float32}}};
      record.write_weights(static_cast<std::int64_t>(i), weights);
    }
    const std::vector<Weight> twice = {{"w", {values.data(), 8, DType::Float32}},
                                       {"w", {values.data(), 4, DType::Float32}}};
    EXPECT_THROW(record.write_weights(40, twice), Error);
  }
  for (const RecordLine& line : read_record(file_).events) digests.emplace(line.text("digest"));
  EXPECT_EQ(digests.size(), 32U);  // of 31 lines and the start line, which has none
}

TEST_F(RunRecordTest, TornLastLineIsToleratedAndCutOffByTheNextWriter) {
  RunRecord(file_).write("step", {{"step", 1}});
  append_raw(R"({"event": "step", "ste)");
  RecordLines lines = read_record(file_);
  EXPECT_TRUE(lines.torn);
  EXPECT_EQ(lines.events.size(), 2U);

  RunRecord(file_).write("step", {{"step", 2}});
  lines = read_record(file_);
  EXPECT_FALSE(lines.torn);
  EXPECT_EQ(lines.damaged, 0U);
  ASSERT_EQ(lines.events.size(), 4U);
  EXPECT_EQ(lines.events[3].number("step"), 2);
}

TEST_F(RunRecordTest, TornLineLongerThanABlockIsCutOffToo) {
  RunRecord(file_).write("step", {{"step", 1}});
  append_raw(R"({"event": ")" + std::string(10'000, 'x'));
  RunRecord(file_).write("step", {{"step", 2}});
  EXPECT_EQ(read_record(file_).events.size(), 4U);
  EXPECT_EQ(read_record(file_).damaged, 0U);
}

TEST_F(RunRecordTest, DamagedLinesAreCountedNotFatal) {
  RunRecord(file_).write("step", {{"step", 1}});
  append_raw("not json\n[1,2]\n{\"event\": 3}\n\n{\"event\": \"step\"}\n");
  const RecordLines lines = read_record(file_);
  EXPECT_EQ(lines.damaged, 3U);
  EXPECT_EQ(lines.events.size(), 3U);
}

TEST_F(RunRecordTest, FilesThatAreNoRecordAreRefused) {
  try {
    read_record(folder_ / "none");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Unavailable);
  }
  append_raw("hello\nworld\n");
  try {
    read_record(file_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Corrupt);
    EXPECT_NE(std::string(error.what()).find(file_.string()), std::string::npos) << error.what();
  }
}

TEST_F(RunRecordTest, TwoWritersOfOneFileAreRefused) {
  const RunRecord first(file_);
  try {
    const RunRecord second(file_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Unavailable);
  }
}

TEST_F(RunRecordTest, KilledWriterLosesNothingThatWasWritten) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    RunRecord record(file_);
    for (int step = 1;; ++step) {
      record.write("step", {{"step", step}});
      if (step == 100 && ::write(ready[1], "x", 1) != 1) ::_exit(1);
    }
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  const RecordLines lines = read_record(file_);
  EXPECT_EQ(lines.damaged, 0U);
  ASSERT_GE(lines.events.size(), 101U);
  for (std::size_t i = 1; i < lines.events.size(); ++i) ASSERT_EQ(lines.events[i].number("step"), i);
}

TEST_F(RunRecordTest, FullDiskIsAnErrorAndLeavesWholeLines) {
  // A limit on the file's size stands in for a full disk: the write that crosses it is cut short.
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    RunRecord record(file_);
    const rlimit limit{static_cast<rlim_t>(fs::file_size(file_) + 100), RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      record.write("long", {{"text", std::string(500, 'x')}});
      ::_exit(1);
    } catch (const Error& error) {
      ::_exit(error.code() == ErrorCode::Io ? 0 : 2);
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  const RecordLines lines = read_record(file_);
  EXPECT_FALSE(lines.torn);
  EXPECT_EQ(lines.events.size(), 1U);
}

TEST_F(RunRecordTest, FolderThatCannotBeMadeIsNamed) {
  append_raw("a file, no folder\n");
  try {
    const RunRecord record(file_ / "below" / "run.jsonl");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Io);
    EXPECT_NE(std::string(error.what()).find("below"), std::string::npos) << error.what();
  }
}

TEST_F(RunRecordTest, AddsUpWhatItObservesFromSeveralThreads) {
  using std::chrono::milliseconds;
  RunRecord record(file_);
  record.write_communication();  // no events, so no line
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&record] {
      const auto begin = std::chrono::steady_clock::time_point();
      for (int i = 0; i < 100; ++i) {
        CollectiveEvent event;
        event.operation = "all_reduce";
        event.bytes = 1000;
        event.called = begin;
        event.ended = begin + milliseconds(5);
        event.waited = milliseconds(2);
        event.zero_copy = i % 2 == 0;
        record.on_collective(event);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  record.on_step({.step = 1, .samples = 64, .seconds = 0.5, .exposed_communication_seconds = 0.125});
  record.on_bucket_ready({});
  record.write_communication();
  record.write_communication();  // no events since the last line

  const RecordLines lines = read_record(file_);
  ASSERT_EQ(lines.events.size(), 2U);
  const auto& line = lines.events[1];
  EXPECT_EQ(line.number("steps"), 1);
  EXPECT_EQ(line.number("samples"), 64);
  EXPECT_EQ(line.number("buckets"), 1);
  EXPECT_EQ(line.number("exposed_seconds"), 0.125);
  const auto all_reduce = [&line](const std::string& what) { return line.number("operations/all_reduce/" + what); };
  EXPECT_EQ(all_reduce("count"), 400);
  EXPECT_EQ(all_reduce("bytes"), 400'000);
  EXPECT_EQ(all_reduce("zero_copy"), 200);
  EXPECT_NEAR(all_reduce("seconds").value(), 2.0, 1e-9);
  EXPECT_NEAR(all_reduce("waited_seconds").value(), 0.8, 1e-9);
}

}  // namespace
}  // namespace cohort::track
