// The example as a user runs it: alone and under `cohort run`, on the shipped digits and on files of MNIST's kind.
#include "base/files.h"
#include "telemetry/record.h"
#include "train/formats/idx.h"
#include "train/formats/testing.h"

#include <cohort/preemption.h>

#include <gtest/gtest.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <thread>

namespace cohort {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

// For a machine that compiles at the same time; nothing here waits so long on a quiet one.
constexpr auto kPatience = 240s;

struct Finished {
  int status = -1;     ///< exit code, or 128 + signal
  std::string output;  ///< stdout and stderr
};

class Process {
 public:
  Process(const std::vector<std::string>& command, const fs::path& output) : output_(output) {
    pid_ = ::fork();
    if (pid_ != 0) return;
    for (const char* name : {"COHORT_RUN_DIR", "COHORT_STORE", "RANK", "WORLD_SIZE", "LOCAL_RANK"}) ::unsetenv(name);
    ::setenv("OMP_NUM_THREADS", "1", 1);
    const int file = ::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
    ::dup2(file, 1);
    ::dup2(file, 2);
    std::vector<char*> arguments;
    for (const auto& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  ~Process() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  Finished wait() {
    const int handle = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
    pollfd events{handle, POLLIN, 0};
    const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(kPatience).count();
    if (::poll(&events, 1, static_cast<int>(limit)) != 1) {
      ADD_FAILURE() << "still running after " << limit << " ms: " << output();
      ::kill(pid_, SIGTERM);
    }
    ::close(handle);
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), output()};
  }
  void signal(int number) const { ::kill(pid_, number); }
  std::string output() const {
    const auto bytes = sys::read_file(output_.string());
    return bytes ? std::string(bytes->text()) : std::string();
  }

 private:
  fs::path output_;
  pid_t pid_ = -1;
};

class DigitsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "cohort-digits-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override {
    if (!HasFailure()) fs::remove_all(folder_);
  }

  /// Under `cohort run`, or by itself if `processes` is 1.
  std::vector<std::string> command(int processes, const fs::path& out, const std::vector<std::string>& more) const {
    std::vector<std::string> words;
    if (processes > 1) {
      words = {COHORT_COMMAND, "run", "-np", std::to_string(processes), "--run-dir", out.string() + "-job", "--"};
    }
    words.insert(words.end(), {DIGITS_PROGRAM, "--out", out.string()});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  Finished run(int processes, const std::string& name, const std::vector<std::string>& more) const {
    return Process(command(processes, folder_ / name, more), folder_ / (name + ".txt")).wait();
  }
  track::RecordLines record(const std::string& name) const { return track::read_record(folder_ / name / "run.jsonl"); }
  track::RecordLine last_line(const std::string& name) const {
    const auto lines = record(name);
    return lines.events.empty() ? track::RecordLine() : lines.events.back();
  }
  std::string weights(const std::string& name) const {
    const auto bytes = sys::read_file((folder_ / name / "weights.safetensors").string());
    return bytes ? std::string(bytes->text()) : std::string();
  }

  /// A folder like MNIST's (gzip, 28x28), made of some of the shipped digits: each pixel becomes 3x3, the border 0.
  fs::path mnist_like(std::int64_t train, std::int64_t test) const {
    const fs::path to = folder_ / "mnist";
    fs::create_directories(to);
    const std::pair<std::string, std::int64_t> parts[] = {{"train", train}, {"t10k", test}};
    for (const auto& [part, count] : parts) {
      const auto images = value_or_throw(formats::read_idx(DIGITS_DATA "/" + part + "-images-idx3-ubyte"));
      auto labels = value_or_throw(formats::read_idx(DIGITS_DATA "/" + part + "-labels-idx1-ubyte"));
      formats::IdxArray large;
      large.shape = {count, 28, 28};
      large.data.resize(static_cast<std::size_t>(count) * 28 * 28);
      for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
        for (std::size_t y = 0; y < 24; ++y) {
          for (std::size_t x = 0; x < 24; ++x) {
            large.data[i * 784 + (y + 2) * 28 + x + 2] = images.data[i * 64 + y / 3 * 8 + x / 3];
          }
        }
      }
      labels.shape = {count};
      labels.data.resize(static_cast<std::size_t>(count));
      for (const auto& [name, array] :
           {std::pair("-images-idx3-ubyte.gz", &large), std::pair("-labels-idx1-ubyte.gz", &labels)})
        value_or_throw(
            sys::write_file_atomically((to / (part + name)).string(), formats::gzip(formats::idx_bytes(*array))));
    }
    return to;
  }

  fs::path folder_;
};

TEST_F(DigitsTest, LearnsTheShippedDigitsOnTwoProcesses) {
  const Finished done = run(2, "run", {"--epochs", "8", "--threads", "1"});
  ASSERT_EQ(done.status, 0) << done.output;
  const auto end = last_line("run");
  EXPECT_EQ(end.event, "end");
  EXPECT_GE(end.number("test_accuracy").value(), 0.97);
  EXPECT_GT(end.number("samples_per_second").value(), 0);
  EXPECT_NE(done.output.find("accuracy    "), std::string::npos) << done.output;

  const auto lines = record("run");
  EXPECT_EQ(lines.damaged, 0U);
  EXPECT_EQ(lines.events.at(0).number("world_size"), 2);
  std::size_t epochs = 0, zero_copy = 0;
  for (const auto& event : lines.events) {
    if (event.event == "epoch") ++epochs;
    if (event.event == "communication")
      zero_copy += static_cast<std::size_t>(event.number("operations/all_reduce/zero_copy").value());
  }
  EXPECT_EQ(epochs, 8U);
  EXPECT_GE(zero_copy, 8U * 23U) << "gradients were not reduced in place";
  for (const char* name : {"checkpoint", "weights"}) EXPECT_TRUE(fs::exists(end.text(name))) << name;
}

#ifdef FAKE_CUDA_TENSORS
TEST_F(DigitsTest, OnGpusThatPretendItLearnsTheSame) {
  const std::vector<std::string> options = {"--data", mnist_like(96, 20).string(), "--epochs", "1", "--threads", "1"};
  const Finished host = run(2, "host", options);
  ASSERT_EQ(host.status, 0) << host.output;
  std::vector<std::string> words = {"/usr/bin/env", "LD_PRELOAD=" FAKE_CUDA_TENSORS, "LD_LIBRARY_PATH=" FAKE_FOLDER};
  for (const std::string& word : command(2, folder_ / "gpus", options)) words.push_back(word);
  words.insert(words.end(), {"--device", "cuda"});
  const Finished gpus = Process(words, folder_ / "gpus.txt").wait();
  ASSERT_EQ(gpus.status, 0) << gpus.output;
  EXPECT_GT(weights("gpus").size(), 1'000'000U);
  EXPECT_NEAR(last_line("gpus").number("test_loss").value(), last_line("host").number("test_loss").value(), 1e-4);
}
#endif

TEST_F(DigitsTest, GpusThatAreNotThereAreAnError) {
  const Finished done = run(1, "none", {"--device", "cuda"});
  EXPECT_EQ(done.status, 1) << done.output;
  EXPECT_NE(done.output.find("--device cuda: libtorch sees no GPU"), std::string::npos) << done.output;
}

TEST_F(DigitsTest, OneTwoAndThreeProcessesAgreeAndRunsRepeatToTheBit) {
  const std::string data = mnist_like(290, 50).string();  // 290: the last batch of an epoch is smaller, and uneven
  const std::vector<std::string> options = {"--data", data, "--epochs", "2", "--batch-size", "48", "--threads", "1"};
  const std::pair<int, std::string> runs[] = {{1, "one"}, {2, "two"}, {2, "again"}, {3, "three"}};
  for (const auto& [processes, name] : runs) {
    const Finished done = run(processes, name, options);
    ASSERT_EQ(done.status, 0) << name << ": " << done.output;
  }
  ASSERT_GT(weights("two").size(), 1'000'000U);
  EXPECT_TRUE(weights("two") == weights("again")) << "two runs differ";
  const auto one = last_line("one");
  for (const char* name : {"two", "three"}) {
    const auto many = last_line(name);
    EXPECT_EQ(many.number("step"), one.number("step"));
    EXPECT_NEAR(many.number("test_loss").value(), one.number("test_loss").value(),
                1e-4 * one.number("test_loss").value())
        << name;
    EXPECT_NEAR(many.number("test_accuracy").value(), one.number("test_accuracy").value(), 1.01 / 50) << name;
  }
}

TEST_F(DigitsTest, KilledInMidEpochAndResumedEqualsUninterruptedToTheBit) {
  const std::string data = mnist_like(320, 32).string();
  const std::vector<std::string> options = {"--data", data, "--epochs", "6", "--batch-size", "16", "--threads", "1"};
  ASSERT_EQ(run(2, "whole", options).status, 0);
  {
    Process job(command(2, folder_ / "cut", options), folder_ / "cut.txt");
    // 20 steps an epoch: kill rank 0 once the record tells of a step in the middle of the third.
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    pid_t rank_0 = 0;
    while (rank_0 == 0) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << job.output();
      std::this_thread::sleep_for(5ms);
      if (!fs::exists(folder_ / "cut" / "run.jsonl")) continue;
      for (const auto& event : record("cut").events) {
        if (event.event == "step" && event.number("epoch").value() > 2.1) {
          rank_0 = static_cast<pid_t>(record("cut").events.at(0).integer("pid").value());
        }
      }
    }
    ::kill(rank_0, SIGKILL);
    EXPECT_NE(job.wait().status, 0);
  }
  ASSERT_NE(last_line("cut").event, "end");
  std::vector<std::string> again = options;
  again.push_back("--resume");
  const Finished done = run(2, "cut", again);
  ASSERT_EQ(done.status, 0) << done.output;
  bool resumed = false;
  for (const auto& event : record("cut").events)
    resumed = resumed || (event.event == "resume" && event.number("step") >= 40);
  EXPECT_TRUE(resumed);
  EXPECT_EQ(record("cut").damaged, 0U);
  EXPECT_EQ(last_line("cut").number("test_loss"), last_line("whole").number("test_loss"));
  EXPECT_TRUE(weights("cut") == weights("whole")) << "the resumed run differs";
}

TEST_F(DigitsTest, EpochsAreEpochsAlsoAfterAResumeOnAnotherNumberOfProcesses) {
  const std::string data = mnist_like(160, 32).string();  // 10 steps an epoch on 2 processes, 7 on 3
  const std::vector<std::string> options = {"--data", data, "--batch-per-process", "8", "--threads", "1", "--epochs"};
  const auto with = [&options](std::initializer_list<std::string> more) {
    std::vector<std::string> all = options;
    all.insert(all.end(), more);
    return all;
  };
  ASSERT_EQ(run(2, "moved", with({"1"})).status, 0);
  const Finished done = run(3, "moved", with({"2", "--resume"}));
  ASSERT_EQ(done.status, 0) << done.output;
  double last = 0;
  for (const auto& event : record("moved").events) {
    if (event.event != "step") continue;
    EXPECT_GT(event.number("epoch").value(), last);
    last = event.number("epoch").value();
  }
  EXPECT_EQ(last, 2);
  EXPECT_EQ(last_line("moved").number("step"), 17);
}

TEST_F(DigitsTest, ToldToMakeRoomAndStartedAgainByTheSameCommandEqualsUninterruptedToTheBit) {
  const std::string data = mnist_like(320, 32).string();
  const std::vector<std::string> options = {"--data",       data, "--epochs",  "6", "--batch-size", "16",
                                            "--save-every", "7",  "--threads", "1", "--resume"};
  ASSERT_EQ(run(2, "whole", options).status, 0);
  {
    Process job(command(2, folder_ / "cut", options), folder_ / "cut.txt");
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    bool begun = false;
    while (!begun) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << job.output();
      std::this_thread::sleep_for(5ms);
      if (!fs::exists(folder_ / "cut" / "run.jsonl")) continue;
      for (const auto& event : record("cut").events)
        begun = begun || (event.event == "step" && event.number("epoch").value() > 1.1);
    }
    job.signal(SIGUSR1);
    const Finished ended = job.wait();
    EXPECT_EQ(ended.status, kRequeueStatus) << ended.output;
    EXPECT_NE(ended.output.find("exit status 75 asks for a requeue"), std::string::npos) << ended.output;
  }
  const auto saved = last_line("cut");
  ASSERT_EQ(saved.event, "preempted");
  const Finished done = run(2, "cut", options);
  ASSERT_EQ(done.status, 0) << done.output;
  bool resumed = false;
  for (const auto& event : record("cut").events)
    resumed = resumed || (event.event == "resume" && event.number("step") == saved.number("step"));
  EXPECT_TRUE(resumed) << "not a step was to be done again";
  EXPECT_EQ(last_line("cut").number("test_loss"), last_line("whole").number("test_loss"));
  EXPECT_TRUE(weights("cut") == weights("whole")) << "the resumed run differs";
}

TEST_F(DigitsTest, BadDataAreNamed) {
  const auto expect_error = [this](const fs::path& data, const std::string& part) {
    const Finished done = run(1, "bad", {"--data", data.string(), "--epochs", "1"});
    EXPECT_EQ(done.status, 1) << done.output;
    EXPECT_NE(done.output.find(part), std::string::npos) << done.output;
  };
  fs::path data = mnist_like(64, 8);
  fs::resize_file(data / "train-images-idx3-ubyte.gz", 1000);
  expect_error(data, "train-images-idx3-ubyte.gz");

  data = mnist_like(64, 8);
  fs::remove(data / "t10k-labels-idx1-ubyte.gz");
  expect_error(data, "t10k-labels-idx1-ubyte");

  data = mnist_like(64, 8);
  fs::copy_file(data / "t10k-labels-idx1-ubyte.gz", data / "train-labels-idx1-ubyte.gz",
                fs::copy_options::overwrite_existing);
  expect_error(data, "64 images and 8 labels");
}

TEST_F(DigitsTest, BadOptionsAreNamed) {
  Finished done = run(2, "odd", {"--batch-size", "63"});
  EXPECT_NE(done.status, 0);
  EXPECT_NE(done.output.find("cannot be spread evenly over 2 processes -- try 64"), std::string::npos) << done.output;
  done = run(1, "unknown", {"--epoch", "3"});
  EXPECT_NE(done.status, 0);
  EXPECT_NE(done.output.find("--epoch"), std::string::npos) << done.output;
  EXPECT_FALSE(fs::exists(folder_ / "unknown"));
}

}  // namespace
}  // namespace cohort
