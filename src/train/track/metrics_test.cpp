#include "telemetry/record.h"

#include <cohort/error.h>
#include <cohort/track.h>

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <map>
#include <memory>
#include <thread>

namespace cohort::track {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "cohort-metrics-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    file_ = folder_ / "run.jsonl";
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::vector<RecordLine> metrics() const {
    std::vector<RecordLine> found = read_record(file_).events;
    std::erase_if(found, [](const RecordLine& line) { return line.event != "metric"; });
    return found;
  }

  fs::path folder_, file_;
};

TEST_F(MetricsTest, AreInTheRecordAtTheEnd) {
  RunRecord record(file_);
  {
    Metrics metrics(&record);
    metrics.log(1, {{"loss", 0.5}, {"val/accuracy", 0.25}});
    metrics.log(2, {{"loss", std::nan("")}});
  }
  const auto lines = metrics();
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0].integer("step"), 1);
  EXPECT_EQ(lines[0].number("values/loss"), 0.5);
  EXPECT_EQ(lines[0].number("values/val/accuracy"), 0.25);
  EXPECT_EQ(lines[0].find("rank"), nullptr);
  EXPECT_TRUE(std::isnan(lines[1].number("values/loss").value()));
}

TEST_F(MetricsTest, AreWrittenAtIntervalsAndByFlush) {
  RunRecord record(file_);
  Metrics metrics(&record, {.interval = milliseconds(20)});
  metrics.log(1, {{"loss", 0.5}});
  const auto until = steady_clock::now() + std::chrono::seconds(20);
  while (this->metrics().empty() && steady_clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_EQ(this->metrics().size(), 1U);
  Metrics slow(&record, {.interval = std::chrono::hours(1)});
  slow.log(2, {{"loss", 0.25}});
  slow.flush();
  EXPECT_EQ(this->metrics().size(), 2U);
}

TEST_F(MetricsTest, OfSeveralRanksAreReduced) {
  constexpr int kRanks = 3;
  run_on_threads(kRanks, [this](Communicator comm) {
    std::optional<RunRecord> record;
    if (comm.rank() == 0) record.emplace(file_);
    Metrics metrics(record ? &*record : nullptr, {.communicator = comm, .interval = milliseconds(10)});
    for (int step = 1; step <= 50; ++step) {
      const double value = step + comm.rank();
      metrics.log(step, {{"mean", value}, {"ones", 1}}, Reduce::Mean);
      metrics.log(step, {{"max", value}}, Reduce::Max);
      metrics.log(step, {{"min", value}}, Reduce::Min);
      metrics.log(step, {{"sum", value}}, Reduce::Sum);
      metrics.log(step, {{"each", value}}, Reduce::Each);
      metrics.log(step, {{"own", value}});
      if (step == 25) std::this_thread::sleep_for(milliseconds(10 * comm.rank()));
    }
  });
  std::map<std::string, std::vector<double>> values;
  for (const RecordLine& line : metrics()) {
    const auto rank = line.integer("rank");
    for (const auto& field : line.fields) {
      if (field.name.starts_with("values/")) {
        values[field.name.substr(7) + (rank ? std::to_string(*rank) : "")].push_back(number_of(field).value());
      }
    }
  }
  ASSERT_EQ(values.size(), 9U);
  for (int step = 1; step <= 50; ++step) {
    const auto i = static_cast<std::size_t>(step - 1);
    for (const auto& [name, of] : values) ASSERT_EQ(of.size(), 50U) << name;
    EXPECT_EQ(values["mean"][i], step + 1);
    EXPECT_EQ(values["ones"][i], 1);
    EXPECT_EQ(values["max"][i], step + 2);
    EXPECT_EQ(values["min"][i], step);
    EXPECT_EQ(values["sum"][i], 3 * step + 3);
    EXPECT_EQ(values["own"][i], step);
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(values["each" + std::to_string(rank)][i], step + rank);
  }
}

TEST_F(MetricsTest, WhatOneRankAloneHasLoggedIsKeptAsRankZeros) {
  const auto begin = steady_clock::now();
  run_on_threads(2, [this](Communicator comm) {
    std::optional<RunRecord> record;
    if (comm.rank() == 0) record.emplace(file_);
    Metrics metrics(record ? &*record : nullptr, {.communicator = comm, .interval = milliseconds(5)});
    for (int step = 1; step <= (comm.rank() == 0 ? 10 : 4); ++step)
      metrics.log(step, {{"v", 2.0 * step}}, Reduce::Mean);
  });
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(9)) << "nobody had to be waited for";
  const auto lines = metrics();
  ASSERT_EQ(lines.size(), 10U);
  for (std::size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(lines[i].integer("step"), i + 1);
    EXPECT_EQ(lines[i].number("values/v"), 2.0 * static_cast<double>(i + 1));
    EXPECT_EQ(lines[i].integer("rank"), i < 4 ? std::nullopt : std::optional<std::int64_t>(0));
  }
}

TEST_F(MetricsTest, RanksThatLogDifferentThingsAreNotMixed) {
  run_on_threads(2, [this](Communicator comm) {
    std::optional<RunRecord> record;
    if (comm.rank() == 0) record.emplace(file_);
    Metrics metrics(record ? &*record : nullptr,
                    {.communicator = comm, .interval = milliseconds(5), .patience = milliseconds(100)});
    metrics.log(1, {{comm.rank() == 0 ? "a" : "b", 1.0 + comm.rank()}}, Reduce::Sum);
  });
  const auto lines = metrics();
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].number("values/a"), 1);
  EXPECT_EQ(lines[0].integer("rank"), 0);
}

TEST_F(MetricsTest, TheTrainingGoesOnWhereRanksLogDifferentThings) {
  for (const bool other_number : {false, true}) {
    run_on_threads(2,
                   [&](Communicator comm) {
                     std::optional<RunRecord> record;
                     if (comm.rank() == 0) record.emplace(file_);
                     Metrics metrics(
                         record ? &*record : nullptr,
                         {.communicator = comm, .interval = milliseconds(5), .patience = milliseconds(100)});
                     metrics.log(1, {{"a", 1}}, Reduce::Sum);
                     if (comm.rank() == 1 && other_number)
                       metrics.log(2, {{"a", 1}, {"b", 2}}, Reduce::Sum);
                     else
                       metrics.log(2, {{comm.rank() == 0 ? "a" : "b", 1}}, Reduce::Sum);
                     std::this_thread::sleep_for(milliseconds(700));  // longer than an operation's timeout
                     comm.barrier({.timeout = std::chrono::seconds(20)}).wait();
                     std::this_thread::sleep_for(milliseconds(700));
                     comm.barrier({.timeout = std::chrono::seconds(20)}).wait();
                   },
                   {.timeout = milliseconds(500)});
  }
}

TEST_F(MetricsTest, ARankThatDoesNotEndIsNotWaitedForForLong) {
  run_on_threads(2, [this](Communicator comm) {
    std::optional<RunRecord> record;
    if (comm.rank() == 0) record.emplace(file_);
    auto metrics = std::make_unique<Metrics>(
        record ? &*record : nullptr,
        MetricsOptions{.communicator = comm, .interval = milliseconds(5), .patience = milliseconds(1000)});
    metrics->log(1, {{"v", 1}}, Reduce::Sum);
    comm.barrier().wait();                  // both have
    if (comm.rank() == 0) metrics.reset();  // the other rank ends its Metrics only after this barrier
    comm.barrier().wait();
  });
  ASSERT_EQ(metrics().size(), 1U);
  EXPECT_EQ(metrics()[0].number("values/v"), 2);
}

TEST_F(MetricsTest, ReducedValuesNeedACommunicator) {
  RunRecord record(file_);
  Metrics metrics(&record);
  EXPECT_THROW(metrics.log(1, {{"v", 1}}, Reduce::Mean), Error);
}

TEST_F(MetricsTest, AFullDiskIsNoErrorOfTheTraining) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    RunRecord record(file_);
    const rlimit tight{static_cast<rlim_t>(fs::file_size(file_) + 100), RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &tight);
    Metrics metrics(&record, {.interval = milliseconds(5)});
    for (int step = 1; step <= 20; ++step) metrics.log(step, {{"some value", step}});
    std::this_thread::sleep_for(milliseconds(50));
    const rlimit wide{RLIM_INFINITY, RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &wide);  // the disk has space again
    metrics.close();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  const auto lines = metrics();
  ASSERT_EQ(lines.size(), 20U);
  for (std::size_t i = 0; i < 20; ++i) EXPECT_EQ(lines[i].integer("step"), i + 1);
  EXPECT_EQ(read_record(file_).damaged, 0U);
}

TEST_F(MetricsTest, LoggingTakesMicroseconds) {
  RunRecord record(file_);
  Metrics metrics(&record, {.interval = std::chrono::hours(1)});
  std::vector<std::chrono::nanoseconds> times;
  for (int step = 0; step < 20'000; ++step) {
    const auto begin = steady_clock::now();
    metrics.log(step, {{"train_loss", 0.5}, {"learning_rate", 0.1}});
    times.push_back(steady_clock::now() - begin);
  }
  std::sort(times.begin(), times.end());
  EXPECT_LT(times[times.size() / 2], std::chrono::microseconds(5));
  RecordProperty("median_ns", static_cast<int>(times[times.size() / 2].count()));
}

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

std::string content(std::FILE* file) {
  std::rewind(file);
  std::string text;
  std::array<char, 4096> bytes;
  for (std::size_t got = 0; (got = std::fread(bytes.data(), 1, bytes.size(), file)) > 0;)
    text.append(bytes.data(), got);
  return text;
}

TEST(Progress, PlainLinesOffATerminal) {
  const File file(std::tmpfile());
  Progress progress({.steps_per_epoch = 10, .epochs = 2, .stream = file.get(), .interval = milliseconds(0)});
  progress.update(11, 0.5, 64);
  progress.line("epoch 1: done");
  progress.finish();
  progress.update(12, 0.25, 64);  // after the end: prints nothing
  const std::string text = content(file.get());
  EXPECT_EQ(text.find('\x1b'), std::string::npos) << text;
  EXPECT_EQ(text.find('\r'), std::string::npos) << text;
  EXPECT_NE(text.find("epoch 2/2  step 11/20  loss 0.5000"), std::string::npos) << text;
  EXPECT_NE(text.find("\nepoch 1: done\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("step 12"), std::string::npos) << text;
}

TEST(Progress, GoesOnAfterARunWhoseEpochsHadOtherNumbersOfSteps) {
  const File file(std::tmpfile());
  // 2 epochs of 23 steps and 11 steps of the third, whose other half is 8 steps of this run's 15.
  Progress progress({.steps_per_epoch = 15,
                     .epochs = 4,
                     .first_step = 57,
                     .first_epoch = 2,
                     .steps_left_in_first_epoch = 8,
                     .stream = file.get(),
                     .interval = milliseconds(0)});
  progress.update(58, 0.5, 64);
  progress.update(65, 0.5, 64);
  progress.update(66, 0.5, 64);
  progress.update(80, 0.5, 64);
  const std::string text = content(file.get());
  for (const char* line :
       {"epoch 3/4  step 58/80", "epoch 3/4  step 65/80", "epoch 4/4  step 66/80", "epoch 4/4  step 80/80"})
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
}

TEST(Progress, OneLineThatIsDrawnOverOnATerminal) {
  const File file(std::tmpfile());
  {
    Progress progress(
        {.steps_per_epoch = 2, .epochs = 1, .stream = file.get(), .terminal = true, .interval = milliseconds(0)});
    progress.update(1, 1.0, 8);
    progress.line("kept");
    progress.update(2, 1.0, 8);
  }
  const std::string text = content(file.get());
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_NE(text.find(" 50 %"), std::string::npos) << text;
  EXPECT_NE(text.find("100 %"), std::string::npos) << text;
  EXPECT_NE(text.find("\r\x1b[2Kkept\n"), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("\r\x1b[2K")) << text;
}

TEST(Progress, DrawsOncePerInterval) {
  const File file(std::tmpfile());
  Progress progress({.steps_per_epoch = 100, .epochs = 1, .stream = file.get(), .interval = std::chrono::hours(1)});
  for (int step = 1; step <= 100; ++step) progress.update(step, 1.0, 8);
  EXPECT_EQ(content(file.get()), "");
}

TEST(Progress, SkippedTimeIsNoTrainingTime) {
  const File file(std::tmpfile());
  Progress progress({.steps_per_epoch = 10, .epochs = 1, .stream = file.get(), .interval = milliseconds(0)});
  std::this_thread::sleep_for(milliseconds(300));
  progress.skip_time();
  progress.update(1, 1.0, 3'000'000);  // had the 300 ms counted, at most 10 million a second
  const std::string text = content(file.get());
  const std::size_t at = text.find("loss 1.0000  ");
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_GT(std::stod(text.substr(at + 13)), 10e6) << text;
}

}  // namespace
}  // namespace cohort::track
