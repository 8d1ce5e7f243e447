// What `cohort run --json` writes, what a person is advised, and names in stacks.
#include "launch/show/events.h"
#include "launch/show/output_view.h"
#include "launch/watch/advice.h"
#include "launch/watch/demangle.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <string>

namespace cohort::launch {
namespace {

using nlohmann::json;

Ending killed(int signal) {
  Ending out;
  out.rank = 2;
  out.host = "h";
  out.pid = 17;
  out.status.signal = signal;
  out.after_seconds = 1.5;
  return out;
}

Ending saying(int code, const std::string& words) {
  Ending out;
  out.status.code = code;
  out.last_stderr = words;
  return out;
}

TEST(EventsTest, AFailureHasWhatThePostMortemSays) {
  PostMortem post_mortem;
  post_mortem.first = killed(SIGSEGV);
  post_mortem.first.last_stderr = "one\ntwo\n";
  post_mortem.first.last.joined = true;
  post_mortem.first.last.step = 7;
  post_mortem.others = {"rank 0: waiting"};
  post_mortem.world_size = 4;
  const json event = json::parse(failure_event(post_mortem));
  EXPECT_EQ(event.at("event"), "failure");
  EXPECT_EQ(event.at("rank"), 2);
  EXPECT_EQ(event.at("signal"), "SIGSEGV");
  EXPECT_FALSE(event.contains("exit_code"));
  EXPECT_EQ(event.at("step"), 7);
  EXPECT_EQ(event.at("last_stderr"), json({"one", "two"}));
  EXPECT_EQ(event.at("others").size(), 1U);
  EXPECT_NE(event.at("advice").get<std::string>().find("native code"), std::string::npos);
  EXPECT_EQ(json::parse(exit_event(saying(3, ""))).at("exit_code"), 3);
  EXPECT_FALSE(json::parse(exit_event(saying(3, ""))).contains("times"));
  Ending trained = saying(0, "");
  trained.last.step = 12;
  trained.last.times = {10, 2'500'000'000, 30, 4096, 1'000'000'000, 250'000'000, 125'000'000, 2048, 500'000'000};
  const auto times = json::parse(exit_event(trained)).at("times");
  EXPECT_EQ(times.at("steps"), 10);
  EXPECT_EQ(times.at("seconds"), 2.5);
  EXPECT_EQ(times.at("busy"), 1.0);
  EXPECT_EQ(times.at("waited"), 0.25);
  EXPECT_EQ(times.at("wire"), 0.125);
  EXPECT_EQ(times.at("wire_bytes"), 2048);
  EXPECT_EQ(times.at("exposed"), 0.5);
}

TEST(EventsTest, OutputIsALineEachWhateverItsBytes) {
  ViewOptions options;
  options.hosts = {"h", "h"};
  options.style = PrefixStyle::Json;
  OutputView view(options);
  std::string out;
  const auto take = [&out](const std::vector<Text>& texts) {
    for (const Text& text : texts) {
      EXPECT_EQ(text.fd, 1);
      out += text.bytes;
    }
  };
  take(view.feed(1, Stream::Stderr, "a \"quote\"\t\xff\nb", {}));
  take(view.feed(0, Stream::Stdout, std::string(kLongestLine + 10, 'x') + "\n", {}));
  take(view.finish());
  std::vector<json> events;
  while (!out.empty()) {
    const auto end = out.find('\n');
    ASSERT_NE(end, std::string::npos);
    events.push_back(json::parse(out.substr(0, end)));
    out.erase(0, end + 1);
  }
  ASSERT_EQ(events.size(), 4U);
  EXPECT_EQ(events[0].at("line"), "a \"quote\"\t\xef\xbf\xbd");
  EXPECT_EQ(events[0].at("stream"), "stderr");
  EXPECT_EQ(events[0].at("rank"), 1);
  EXPECT_FALSE(events[1].contains("continued"));
  EXPECT_TRUE(events[2].at("continued"));
  EXPECT_EQ(events[2].at("line"), "xxxxxxxxxx");
  EXPECT_EQ(events[3].at("line"), "b");
}

TEST(AdviceTest, IsByWhatWasSaidElseByHowItEnded) {
  EXPECT_NE(advice(saying(1, "ModuleNotFoundError: No module named 'numpy'")).find("--dry-run"), std::string::npos);
  EXPECT_NE(advice(saying(1, "ModuleNotFoundError: No module named 'horovod'")).find("--as-horovod"),
            std::string::npos);
  EXPECT_NE(advice(saying(2, "train.py: error: unrecognized arguments: --local_rank=0")).find("LOCAL_RANK"),
            std::string::npos);
  EXPECT_NE(advice(saying(1, "OSError: [Errno 28] No space left on device")).find("df -h"), std::string::npos);
  EXPECT_NE(advice(saying(127, "")).find("command not found"), std::string::npos);
  EXPECT_EQ(advice(saying(1, "ValueError: my own")), "");
  Ending by_kernel = killed(SIGKILL);
  by_kernel.last_stderr = "warning: No space left on device";
  by_kernel.out_of_memory = true;
  EXPECT_NE(advice(by_kernel).find("out-of-memory kill"), std::string::npos);
  EXPECT_NE(advice(killed(SIGFPE)).find("division"), std::string::npos);
}

TEST(DemangleTest, NamesBecomeReadableAndTheRestStays) {
  EXPECT_EQ(demangled("  #0 _ZN1a1bEi+0x4 in /lib/_Zx.so 0x12\n"), "  #0 a::b(int)+0x4 in /lib/_Zx.so 0x12\n");
  EXPECT_EQ(demangled("_Z"), "_Z");
  EXPECT_EQ(demangled("x_ZN1a1bEi"), "x_ZN1a1bEi");
  const std::string deep = "_Z" + std::string(100'000, 'P') + "v";
  EXPECT_EQ(demangled(deep), deep);
  EXPECT_EQ(demangled(""), "");
}

}  // namespace
}  // namespace cohort::launch
