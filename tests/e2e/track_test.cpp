// --track: the record of a job goes elsewhere while it runs, and whatever becomes of that is nothing to the job.
#include "launch_harness.h"

#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <thread>
#include <utility>

namespace cohort::test {
namespace {

constexpr const char* kLines =
    R"(echo '{"event":"start","time":1,"program":"p","parameters":{}}' > $COHORT_RUN_DIR/run.jsonl; )"
    R"(echo '{"event":"metric","time":2,"step":3,"values":{"loss":0.5}}' >> $COHORT_RUN_DIR/run.jsonl; )";

bool comes(const Job& job, const std::string& text) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (job.err().find(text) == std::string::npos) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(10ms);
  }
  return true;
}

TEST(Track, ARecordGoesElsewhereWhileTheJobRuns) {
  // The rank ends once its line is there, in both.
  Job job({{"run", "-np", "1", "--track", "csv:out.csv", "--track", "prometheus:out.prom", "sh", "-c",
            std::string(kLines) + "while ! grep -q loss,0.5 out.csv || ! grep -q loss out.prom; do sleep 0.05; done"}});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.file("out.csv"), "time,step,rank,name,value\r\n2.000,3,,loss,0.5\r\n");
  EXPECT_NE(job.file("out.prom").find("cohort_up{job=\"p\"} 0"), std::string::npos) << job.file("out.prom");
}

TEST(Track, ThePictureOfTheNewestRunAndAWrongDestination) {
  Job job({{"run", "-np", "1", "sh", "-c",  // Once the launcher has shown the run.
            std::string(kLines) + "while ! ls runs/*/live.json; do sleep 0.05; done >/dev/null 2>&1; " COHORT_COMMAND
                                  " plot"}});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_NE(job.out().find("/curves.svg"), std::string::npos) << job.out();
  const auto typo = run({{"export", "no/such/run", "--to", "tensorbord:x"}});
  EXPECT_EQ(typo.status, 2);
  EXPECT_NE(typo.err.find("'tensorbord:x' failed -- it is none of tensorboard:DIR"), std::string::npos) << typo.err;
}

TEST(Track, ARunHasTheNameOfItsScript) {
  Job job({{"run", "-np", "1", "python3", "-m", "this"}});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_NE(job.err().find("-this-"), std::string::npos) << job.err();
}

TEST(Track, GoesOnWhenTheRanksAreStartedAgain) {
  const std::string first = std::string(kLines) + "while ! grep -q loss,0.5 out.csv; do sleep 0.05; done; exit 1";
  const std::string second =
      R"(echo '{"event":"metric","time":3,"step":4,"values":{"loss":0.25}}' >> $COHORT_RUN_DIR/run.jsonl; )"
      "while ! grep -q loss,0.25 out.csv; do sleep 0.05; done";
  Job job({{"run", "-np", "1", "--max-restarts", "1", "--track", "csv:out.csv", "sh", "-c",
            "if [ $COHORT_RESTART = 0 ]; then " + first + "; else sleep 1; " + second + "; fi"}});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.file("out.csv"), "time,step,rank,name,value\r\n2.000,3,,loss,0.5\r\n3.000,4,,loss,0.25\r\n");
}

TEST(Track, OneThatFailsIsNoFailureOfTheJob) {
  for (const int status : {0, 3}) {
    JobOptions options{{"run", "-np", "2", "--track", "tensorboard:tb", "sh", "-c",
                        std::string(kLines) + "exit " + std::to_string(status)}};
    options.shell_before = "mkdir -p tb && : > tb/events.out.tfevents.1.somebody";
    Job job(options);
    EXPECT_EQ(job.wait(), status);
    EXPECT_NE(job.err().find("--track tensorboard:tb: ended with exit code"), std::string::npos) << job.err();
    EXPECT_NE(job.err().find("cohort export runs/"), std::string::npos) << job.err();
  }
}

/// A client of MLflow that says on stderr that it was asked, and then does `what`.
std::string with_mlflow(const std::string& what) {
  return "mkdir mlflow && echo 'class MlflowException(Exception): pass' > mlflow/exceptions.py && "
         "echo 'Metric = Param = RunTag = None' > mlflow/entities.py && printf '%s\n' 'import sys, time' "
         "'class MlflowClient:' '    def __init__(self, uri): pass' '    def get_experiment_by_name(self, name):' "
         "'        print(\"asked\", file=sys.stderr, flush=True)' '        " +
         what + "' > mlflow/__init__.py && export PYTHONPATH=$PWD";
}

TEST(Track, AServerThatIsAwayIsWaitedForUntilSomebodyHasEnough) {
  JobOptions options{{"run", "-np", "1", "--track", "mlflow:http://127.0.0.1:1", "sh", "-c", kLines}};
  options.shell_before = with_mlflow("raise OSError(\"Connection refused\")");
  Job job(std::move(options));
  ASSERT_TRUE(comes(job, "waiting for --track mlflow:http://127.0.0.1:1")) << job.err();
  EXPECT_TRUE(comes(job, "Connection refused; trying on")) << job.err();
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(), 0) << job.err();
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (!job.processes().empty() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(10ms);
  EXPECT_TRUE(job.processes().empty());
}

TEST(Track, AServerThatNeverAnswersDoesNotHoldACommandThatIsToldToEnd) {
  JobOptions options{{"export", "run.jsonl", "--to", "mlflow:http://127.0.0.1:1", "--follow"}};
  options.shell_before = with_mlflow("time.sleep(600)");
  Job job(std::move(options));
  ASSERT_TRUE(comes(job, "asked")) << job.err();
  job.signal(SIGTERM);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(job.wait(), 1);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 15s);
  EXPECT_NE(job.err().find("not all of run.jsonl is there: cohort export run.jsonl --to"), std::string::npos)
      << job.err();
}

TEST(Track, AClientThatIsMissingIsNamed) {
  for (const auto& [to, package] : {std::pair("mlflow:http://127.0.0.1:1", "mlflow"),
                                    std::pair("tensorboard:tb", "tensorboard"), std::pair("wandb:p", "wandb")}) {
    JobOptions options{{"export", "run.jsonl", "--to", to}};
    options.shell_before =
        "echo '{\"event\":\"start\",\"time\":1}' > run.jsonl && for one in mlflow tensorboard "
        "tensorboardX wandb; do mkdir -p $one && echo 'raise ImportError(\"not here\")' > $one/__init__.py; done && "
        "export PYTHONPATH=$PWD";
    const Finished done = run(std::move(options));
    EXPECT_EQ(done.status, 1);
    EXPECT_NE(done.err.find("ImportError: not here -- the "), std::string::npos) << done.err;
    EXPECT_NE(done.err.find(std::string("of python3 in PATH is used (pip install ") + package), std::string::npos)
        << done.err;
  }
}

TEST(Track, WhatCannotBeIsRefusedBeforeAnythingStarts) {
  for (const char* wrong : {"comet:x", "mlflow:postgresql://h/runs", "mlflow:http://user:secret@h", "csv:"}) {
    const Finished done = run({{"run", "-np", "1", "--track", wrong, "echo", "started"}});
    EXPECT_EQ(done.status, 2) << wrong;
    EXPECT_EQ(done.out, "");
    EXPECT_NE(done.err.find("--track"), std::string::npos) << done.err;
  }
}

}  // namespace
}  // namespace cohort::test
