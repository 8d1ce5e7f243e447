#include "observe/export/export.h"
#include "observe/export/kubeflow.h"
#include "observe/export/prometheus.h"
#include "observe/export/python_child.h"
#include "shared/destination.h"
#include "telemetry/record.h"

#include <cohort/error.h>
#include <cohort/track.h>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <thread>

namespace cohort::track {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

class SinksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "cohort-sinks-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    file_ = folder_ / "run.jsonl";
  }
  void TearDown() override { fs::remove_all(folder_); }

  void append(std::string_view text) { std::ofstream(file_, std::ios::app | std::ios::binary) << text; }
  void append_step(int step) {
    append(R"({"event":"metric","time":1.5,"step":)" + std::to_string(step) + R"(,"values":{"v":)" +
           std::to_string(step) + "}}\n");
  }
  ExportSummary export_to(const std::string& destination, const SinkOptions& options = {}) {
    const auto sink = make_sink(destination, options);
    return export_record({.record = file_, .sink = sink.get()});
  }
  static std::string content(const fs::path& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  fs::path folder_, file_;
};

/// Records the calls it gets, in words.
class Listener final : public Sink {
 public:
  explicit Listener(Replay replay = Replay::No) : replay_(replay) {}
  void take(const SinkLine& line) override {
    if (!line.superseded) told += line.line.event + std::to_string(line.line.integer("step").value_or(0)) + " ";
  }
  Replay go_back(std::int64_t step, double) override {
    told += "back" + std::to_string(step) + " ";
    return replay_;
  }
  void flush() override {}
  void finish(RunState state) override {
    told += state == RunState::Finished ? "finished"
            : state == RunState::Failed ? "failed"
            : state == RunState::Killed ? "killed"
                                        : "running";
  }
  std::string told;

 private:
  Replay replay_;
};

TEST_F(SinksTest, FollowerReadsWholeLinesOnlyAlsoWhereATornOneIsReplaced) {
  append("{\"event\":\"start\"}\n{\"event\":\"step\",\"st");
  RecordFollower follower(file_);
  ASSERT_TRUE(follower.next());
  EXPECT_EQ(follower.line().event, "start");
  EXPECT_FALSE(follower.next());
  // The next writer cuts the torn line off, and writes more than was cut off.
  fs::resize_file(file_, 18);
  append("{\"event\":\"other\",\"step\":7}\nno event\n\n{\"event\":\"last\"}\n");
  ASSERT_TRUE(follower.next());
  EXPECT_EQ(follower.line().event, "other");
  EXPECT_EQ(follower.line().integer("step"), 7);
  ASSERT_TRUE(follower.next());
  EXPECT_EQ(follower.line().event, "last");
  EXPECT_FALSE(follower.next());
  EXPECT_EQ(follower.damaged(), 1U);
  EXPECT_EQ(follower.offset(), fs::file_size(file_));
}

TEST_F(SinksTest, FollowerReadsLinesThatAreLongerThanItsBuffer) {
  append("{\"event\":\"note\",\"text\":\"" + std::string(3'000'000, 'x') + "\"}\n");
  append_step(1);
  RecordFollower follower(file_);
  ASSERT_TRUE(follower.next());
  EXPECT_EQ(follower.line().text("text").size(), 3'000'000U);
  ASSERT_TRUE(follower.next());
  EXPECT_FALSE(follower.next());
}

TEST_F(SinksTest, FollowerRefusesARecordThatBecameShorterAndAFolder) {
  append_step(1);
  append_step(2);
  RecordFollower follower(file_);
  while (follower.next()) {
  }
  fs::resize_file(file_, 3);
  EXPECT_THROW(follower.next(), Error);
  EXPECT_THROW(RecordFollower{folder_}, Error);
  EXPECT_THROW(RecordFollower{folder_ / "none"}, Error);
}

TEST_F(SinksTest, StepsThatWereDoneAgainAreLeftOut) {
  for (const int step : {1, 2, 3, 4}) append_step(step);
  append("{\"event\":\"resume\",\"step\":3}\n");
  append_step(4);
  append("{\"event\":\"resume\",\"step\":1}\n");
  for (const int step : {2, 3}) append_step(step);
  Listener listener;
  const ExportSummary summary = export_record({.record = file_, .sink = &listener});
  EXPECT_EQ(listener.told, "metric1 resume1 metric2 metric3 killed");
  EXPECT_EQ(summary.events, 9U);
  EXPECT_EQ(summary.superseded, 5U);  // 2, 3, 4, the resume at 3, 4
}

TEST_F(SinksTest, ARunThatGoesBackWhileItIsFollowedIsToldOrReplayed) {
  for (const auto replay : {Sink::Replay::No, Sink::Replay::Yes}) {
    fs::remove(file_);
    append_step(1);
    append_step(2);
    Listener listener(replay);
    int waits = 0;
    const auto wait = [&](milliseconds) {
      if (++waits == 1) {
        append("{\"event\":\"resume\",\"step\":1}\n");
        append_step(2);
        append("{\"event\":\"end\",\"step\":2}\n");
      }
      return waits == 2;
    };
    export_record({.record = file_, .sink = &listener, .wait = wait});
    EXPECT_EQ(listener.told, replay == Sink::Replay::No
                                 ? "metric1 metric2 back1 resume1 metric2 end2 finished"
                                 : "metric1 metric2 back1 metric1 resume1 metric2 end2 finished");
  }
}

TEST_F(SinksTest, TheJobSaysHowARunHasEnded) {
  append_step(1);
  const std::pair<const char*, const char*> cases[] = {{R"({"end":"x","exit_status":0})", "metric1 finished"},
                                                       {R"({"end":"x","exit_status":3})", "metric1 failed"},
                                                       {R"({"end":"x","exit_status":137})", "metric1 killed"}};
  for (const auto& [job, told] : cases) {
    std::ofstream(folder_ / "job.json") << job;
    Listener listener;
    // Nobody stops the export, since it is enough that the job has ended.
    export_record({.record = file_, .sink = &listener, .wait = [](milliseconds) { return false; }});
    EXPECT_EQ(listener.told, told);
  }
  std::ofstream(folder_ / "job.json") << R"({"start":"x"})";
  Listener listener;
  export_record({.record = file_, .sink = &listener, .wait = [](milliseconds) { return true; }});
  EXPECT_EQ(listener.told, "metric1 running");
}

TEST_F(SinksTest, AWriterThatIsKilledWhileItIsFollowedLosesNoWholeLine) {
  constexpr int kWriters = 25;
  std::vector<std::pair<int, int>> seen;  // writer and number of each line
  for (int writer = 0; writer < kWriters; ++writer) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      RunRecord record(file_);
      for (std::size_t i = 0;; ++i)
        record.write("step", {{"writer", writer}, {"i", i}, {"text", std::string(i % 3000, 'x')}});
    }
    while (!fs::exists(file_)) std::this_thread::yield();
    static RecordFollower follower(file_);
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(2000 + writer * 611);
    const auto read = [&](auto go_on) {
      while (go_on() && follower.next()) {
        if (follower.line().event != "step") continue;
        seen.emplace_back(static_cast<int>(follower.line().integer("writer").value()),
                          static_cast<int>(follower.line().integer("i").value()));
      }
    };
    const auto in_time = [until] { return std::chrono::steady_clock::now() < until; };
    while (in_time()) read(in_time);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    read([] { return true; });
    EXPECT_EQ(follower.damaged(), 0U);
  }
  std::vector<std::pair<int, int>> expected;
  std::ifstream in(file_);
  for (std::string line; std::getline(in, line);) {
    RecordLine event;
    if (in.eof() || !event.read(line) || event.event != "step") continue;
    expected.emplace_back(static_cast<int>(event.integer("writer").value()),
                          static_cast<int>(event.integer("i").value()));
  }
  EXPECT_GT(expected.size(), 100U);
  EXPECT_EQ(seen, expected);
}

TEST_F(SinksTest, CsvIsATableByTheStandard) {
  append(R"({"event":"start","program":"p"})"
         "\n");
  append(R"({"event":"metric","time":1.25,"step":3,"values":{"a,\"b\"\n":0.5,"nan":"NaN"},"rank":2})"
         "\n");
  append(R"({"event":"step","time":2,"step":4,"train_loss":1e300,"note":"text","best":true})"
         "\n");
  append(R"({"event":"communication","time":3,"steps":1,"operations":{"all_reduce":{"count":7}}})"
         "\n");
  export_to("csv:" + (folder_ / "new" / "out.csv").string());
  EXPECT_EQ(content(folder_ / "new" / "out.csv"),
            "time,step,rank,name,value\r\n"
            "1.250,3,2,\"a,\"\"b\"\"\n\",0.5\r\n"
            "1.250,3,2,nan,NaN\r\n"
            "2.000,4,,train_loss,1e+300\r\n"
            "3.000,4,,communication/steps,1\r\n"
            "3.000,4,,communication/all_reduce/count,7\r\n");
}

RunProgress progress_of(std::initializer_list<const char*> lines) {
  RunProgress progress;
  RecordLine line;
  for (const char* const text : lines) {
    EXPECT_TRUE(line.read(text)) << text;
    progress.take(line);
  }
  return progress;
}

TEST(RunProgress, FollowsFromEpochsOrSteps) {
  const char* const start = R"({"event":"start","time":100,"parameters":{"epochs":4,"steps":1000}})";
  EXPECT_EQ(progress_of({start}).done(), std::nullopt);
  EXPECT_EQ(progress_of({start, R"({"event":"step","time":101,"step":5,"epoch":1})"}).done(), 0.25) << "epochs first";
  EXPECT_EQ(progress_of({start, R"({"event":"step","time":101,"step":500})"}).done(), 0.5);
  EXPECT_EQ(progress_of({R"({"event":"step","time":101,"step":500})"}).done(), std::nullopt);
  EXPECT_EQ(progress_of({start, R"({"event":"metric","time":101,"step":9,"values":{"epoch":5}})"}).done(), 1);
  const RunProgress running = progress_of({start, R"({"event":"step","time":110,"step":5,"epoch":1})",
                                           R"({"event":"step","time":130,"step":9,"epoch":2,"train_loss":0.5})"});
  EXPECT_EQ(running.remaining_seconds(), 40) << "a quarter took 20 s";
  EXPECT_EQ(kubeflow_status(running, 1737628245),
            R"({"trainerStatus":{"progressPercentage":50,"estimatedRemainingSeconds":40,"metrics":[)"
            R"({"name":"train_loss","value":"0.5"}],"lastUpdatedTime":"2025-01-23T10:30:45Z"}})");
  const RunProgress resumed = progress_of(
      {start, R"({"event":"step","time":110,"epoch":2})", R"({"event":"start","time":900,"parameters":{"epochs":4}})",
       R"({"event":"resume","time":901,"step":5,"epoch":1})", R"({"event":"step","time":911,"epoch":2})"});
  EXPECT_EQ(resumed.remaining_seconds(), 20) << "of this start alone";
  EXPECT_EQ(progress_of({start, R"({"event":"end","time":101,"step":3})"}).done(), 1);
  EXPECT_EQ(kubeflow_status(progress_of({}), 0),
            R"({"trainerStatus":{"metrics":[],"lastUpdatedTime":"1970-01-01T00:00:00Z"}})");
}

TEST(KubeflowPlace, IsWhatItsVariablesSay) {
  const auto of = [](const char* url) {
    const env::Map variables{{"KUBEFLOW_TRAINER_SERVER_URL", url}};
    return kubeflow_place(variables);
  };
  EXPECT_EQ(of("https://a.b.svc:10443/apis/x/status").server, "https://a.b.svc:10443");
  EXPECT_EQ(of("https://a.b.svc:10443/apis/x/status").path, "/apis/x/status");
  for (const char* wrong : {"", "a.b/c", "https://a", "ftp://a/b"}) EXPECT_THROW((void)of(wrong), Error) << wrong;
}

TEST(MlflowPlace, IsReadAndRefused) {
  env::Map variables;
  const auto place = [&variables](std::string_view uri) { return mlflow_place(uri, variables); };
  const auto refusal = [&place](std::string_view uri) {
    try {
      (void)place(uri);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(place("http://h:5000").at("experiment"), "Default");
  EXPECT_EQ(place("https://[::1]:5000/a/b/?experiment_id=7").at("uri"), "https://[::1]:5000/a/b");
  EXPECT_EQ(place("http://h?experiment=a%2Fb%26c&run=r").at("experiment"), "a/b&c");
  const std::string here = std::filesystem::current_path().string();
  EXPECT_EQ(place("sqlite:///m.db?experiment=x").at("uri"), "sqlite:///" + here + "/m.db");
  EXPECT_EQ(place("sqlite:////abs/m.db").at("uri"), "sqlite:////abs/m.db");
  for (const char* folder : {"file:./runs", "file:runs"})
    EXPECT_EQ(place(folder).at("uri"), "file://" + here + "/runs");
  EXPECT_EQ(place("./runs").at("uri"), "file://" + here + "/runs");
  EXPECT_EQ(place("file:///abs/runs").at("uri"), "file:///abs/runs");
  for (const char* wrong : {"postgresql://h/runs", "runs", "sqlite:///", "sqlite:///:memory:", "file://host/runs"})
    EXPECT_NE(refusal(wrong).find("mlflow server --backend-store-uri"), std::string::npos) << wrong;
  EXPECT_NE(refusal("http://u:secret@h:5000").find("MLFLOW_TRACKING_PASSWORD"), std::string::npos);
  EXPECT_EQ(refusal("http://u:secret@h:5000").find("secret"), std::string::npos);
  for (const char* wrong : {"http://", "http://h:0", "http://h:x", "http://a b", "http://h?x=1", "http://h?run="})
    EXPECT_NE(refusal(wrong), "") << wrong;
  EXPECT_NE(refusal("").find("MLFLOW_TRACKING_URI"), std::string::npos);

  variables = {{"MLFLOW_TRACKING_URI", "http://u:s%40@h:5000"}, {"COHORT_MLFLOW_RUN", "drivers"}};
  EXPECT_EQ(place("").at("password"), "s@");
  EXPECT_EQ(place("").at("uri"), "http://h:5000");
  EXPECT_EQ(place("?experiment=e").at("run"), "drivers");
  variables = {};
  EXPECT_NE(refusal("databricks").find("experiment=/Users"), std::string::npos);
  EXPECT_EQ(place("databricks://profile?experiment=/Users/me/x").at("uri"), "databricks://profile");
}

TEST(WandbPlace, IsReadAndRefused) {
  const ClientPlace place = wandb_place("a%20b?entity=team&run=r");
  EXPECT_EQ(place, (ClientPlace{{"project", "a b"}, {"entity", "team"}, {"name", ""}, {"group", ""}, {"run", "r"}}));
  EXPECT_THROW((void)wandb_place("p?mode=offline"), Error);
}

// Anybody may have put a file into the working folder.
TEST(PythonChild, RunsNoFileOfTheWorkingFolder) {
  const fs::path folder = fs::temp_directory_path() / fmt::format("cohort-python-{}", ::getpid());
  fs::create_directory(folder);
  std::ofstream(folder / "json.py") << "raise SystemExit('theirs')\n";
  const fs::path before = fs::current_path();
  fs::current_path(folder);
  std::string said;
  {
    PythonChild child("import json\nprint(json.dumps([1]), flush=True)\n");
    said = child.line(std::chrono::seconds(60));
  }
  fs::current_path(before);
  fs::remove_all(folder);
  EXPECT_EQ(said, "[1]");
}

TEST_F(SinksTest, APlaceToServeAtIsToldFromAFile) {
  EXPECT_EQ(port_of(":9400"), (net::Address{"127.0.0.1", 9400}));
  EXPECT_EQ(port_of("0.0.0.0:9400"), (net::Address{"0.0.0.0", 9400}));
  EXPECT_EQ(port_of("[::]:0"), (net::Address{"::", 0}));
  for (const char* file : {"", "a.prom", "/metrics/a.prom", "a:b", "/x:y.prom", "/a:9400", ":99999", "a:9400:"})
    EXPECT_FALSE(port_of(file)) << file;
}

TEST_F(SinksTest, DestinationsThatThereAreNotAreNamed) {
  for (const char* wrong : {"", "csv", "csv:", "comet:x", "mlruns"}) {
    try {
      (void)make_sink(wrong);
      FAIL() << wrong;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      EXPECT_NE(std::string(error.what()).find("tensorboard:DIR"), std::string::npos) << error.what();
    }
  }
}

TEST_F(SinksTest, WhatIsNoRecordIsCorrupt) {
  append("hello\nworld\n");
  EXPECT_THROW(export_to("csv:" + (folder_ / "x.csv").string()), Error);
}

}  // namespace
}  // namespace cohort::track
