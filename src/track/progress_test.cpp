#include <cohort/track.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <thread>

namespace cohort::track {
namespace {

using std::chrono::milliseconds;

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
  progress.update(12, 0.25, 64);  // after the end: nothing
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
