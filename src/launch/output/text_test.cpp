// Text for people and programs: lines, views, tails, post-mortems, advice, names in stacks, and what `cohort run
// --json` writes.
#include "launch/output/text.h"
#include "launch/agent/worker.h"
#include "launch/health/verdict.h"
#include "launch/output/announcer.h"
#include "launch/output/display.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <csignal>
#include <string>

namespace cohort::launch {
namespace {

std::vector<std::string> texts(const std::vector<Line>& lines) {
  std::vector<std::string> out;
  for (const Line& line : lines) out.push_back(line.text);
  return out;
}

TEST(Lines, AreTheSameHoweverTheBytesArrive) {
  const std::string text = "one\ntwo\r\n10%\r20%\rdone\n\n\xc3\xa4\nrest";
  LineSplitter whole;
  const auto expected = texts(whole.feed(text));
  EXPECT_EQ(expected, (std::vector<std::string>{"one", "two", "10%", "20%", "done", "", "\xc3\xa4"}));
  EXPECT_EQ(whole.partial(), "rest");
  for (std::size_t step = 1; step < 6; ++step) {
    LineSplitter splitter;
    std::vector<std::string> got;
    for (std::size_t at = 0; at < text.size(); at += step) {
      for (auto& line : texts(splitter.feed(std::string_view(text).substr(at, step)))) got.push_back(line);
    }
    EXPECT_EQ(got, expected) << step;
    EXPECT_EQ(splitter.take_partial(), "rest");
  }
}

TEST(Lines, WithoutEndAreCutBetweenCharacters) {
  std::string text;
  while (text.size() < 3 * kLongestLine) text += "\xe2\x82\xac";  // a character of three bytes
  LineSplitter splitter;
  std::string joined;
  std::size_t cuts = 0;
  for (const Line& line : splitter.feed(text)) {
    EXPECT_EQ(line.end, Line::End::Cut);
    EXPECT_LE(line.text.size(), kLongestLine);
    EXPECT_EQ(line.text.size() % 3, 0U);
    joined += line.text;
    ++cuts;
  }
  EXPECT_GE(cuts, 2U);
  EXPECT_EQ(joined + splitter.take_partial(), text);
}

TEST(Lines, MayBeAsLongAsIsSaid) {
  LineSplitter splitter(4);
  EXPECT_EQ(texts(splitter.feed("1234\n12345\xc3\xa4\xc3\xa4\n")),
            (std::vector<std::string>{"1234", "1234", "5\xc3\xa4", "\xc3\xa4"}));
}

TEST(View, PrefixesAreAligned) {
  ViewOptions options;
  options.hosts = std::vector<std::string>(11, "h");
  OutputView view(options);
  EXPECT_EQ(view.feed(3, Stream::Stdout, "a\nb\nc", {}).at(0).bytes, "h:3  | a\nh:3  | b\n");
  EXPECT_EQ(view.feed(10, Stream::Stderr, "x\n", {}).at(0).bytes, "h:10 | x\n");
  EXPECT_EQ(view.feed(10, Stream::Stderr, "x\n", {}).at(0).fd, 2);
  const auto rest = view.finish();
  ASSERT_EQ(rest.size(), 1U);
  EXPECT_EQ(rest[0].bytes, "h:3  | c\n");
}

TEST(View, ProgressBarsSpeakUpNowAndThenWhereTheyCannotBeOverwritten) {
  ViewOptions options;
  options.hosts = {"h"};
  OutputView view(options);
  const OutputView::Clock::time_point start{std::chrono::hours(1)};
  EXPECT_TRUE(view.feed(0, Stream::Stderr, "1%\r2%\r3%\r", start).empty());
  EXPECT_EQ(view.feed(0, Stream::Stderr, "50%\r60", start + std::chrono::seconds(11)).at(0).bytes, "h:0 | 3%\n");
}

TEST(View, ProgressBarsOverwriteThemselvesOnATerminal) {
  ViewOptions options;
  options.hosts = {"h", "h"};
  options.terminal = {true, true};
  options.columns = [] { return 12; };
  OutputView view(options);
  EXPECT_EQ(view.feed(0, Stream::Stdout, "0123456789abc\rx", {}).at(0).bytes, "\r\033[Kh:0 | 01234");
  EXPECT_EQ(view.feed(1, Stream::Stdout, "line\n", {}).at(0).bytes, "\r\033[Kh:1 | line\n");
  EXPECT_TRUE(view.has_partial());
  EXPECT_EQ(view.show_partial().at(0).bytes, "\r\033[Kh:0 | x");
  EXPECT_FALSE(view.has_partial());
}

TEST(TailTest, KeepsTheLastLinesInBoundedMemory) {
  Tail tail(2, 100);
  EXPECT_EQ(tail.text(), "");
  tail.append("a\nb\nc");
  EXPECT_EQ(tail.text(), "b\nc");
  tail.append("\n");
  EXPECT_EQ(tail.text(), "b\nc\n");
  for (int i = 0; i < 1000; ++i) tail.append("0123456789");
  EXPECT_LE(tail.text().size(), 100U);
  tail.append(std::string(1000, 'x') + "\nlast\n");
  EXPECT_TRUE(tail.text().ends_with("x\nlast\n"));
}

TEST(TailTest, FramesOfLibtorchsErrorsDoNotDrownWhatTheySay) {
  Tail tail(3, 1000);
  std::string text = "start\nterminate called\n  what():  shapes\nException raised from f at x.cpp:1:\n";
  for (int i = 0; i < 200; ++i)
    text += "frame #" + std::to_string(i) + ": at::native::f() + 0x3cc (0x7f in libtorch.so)\n";
  // In pieces, as a pipe brings it.
  for (std::size_t at = 0; at < text.size(); at += 7) tail.append(std::string_view(text).substr(at, 7));
  tail.append("last");
  EXPECT_EQ(tail.text(), "  what():  shapes\nException raised from f at x.cpp:1:\nlast");
}

TEST(TailTest, ATracebackIsShownFromItsFirstLineOn) {
  const std::string header = "Traceback (most recent call last):\n";
  const auto frames = [](int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += "  File \"a.py\", line 1, in f\n    f()\n";
    return text;
  };
  const auto noise = [](int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += "noise " + std::to_string(i) + "\n";
    return text;
  };
  const std::string error = header + frames(12) + "ValueError: the cause\n";
  const auto shown = [](const std::string& text) {
    Tail tail(20);
    tail.append(text);
    return tail.text();
  };
  EXPECT_EQ(shown(noise(50) + error), error);
  EXPECT_EQ(shown(noise(50) + error + noise(30)), error + noise(30)) << "what comes after is no reason to lose it";
  const std::string link = "\nDuring handling of the above exception, another exception occurred:\n\n";
  const std::string second = header + frames(3) + "KeyError: 'x'\n";
  EXPECT_EQ(shown(noise(50) + error + link + second), error + link + second);
  EXPECT_EQ(shown(error + noise(5) + second + noise(20)), second + noise(20))
      << "the last one, where they are not linked";
  // A short traceback within the last lines changes nothing.
  EXPECT_TRUE(shown(noise(50) + second).starts_with("noise "));
  EXPECT_FALSE(shown("not " + error).starts_with("not ")) << "a header is a line of its own";

  const std::string deep = shown(noise(50) + header + frames(100) + "RecursionError: too deep\n" + noise(40));
  EXPECT_TRUE(deep.starts_with("...\n    f()\n")) << deep;
  EXPECT_NE(deep.find("RecursionError: too deep\n...\nnoise 30\n"), std::string::npos) << deep;
  EXPECT_TRUE(deep.ends_with("noise 39\n")) << deep;
  EXPECT_LE(std::count(deep.begin(), deep.end(), '\n'), static_cast<std::ptrdiff_t>(kTracebackLines) + 2);
}

Ending ending(int rank, int code, int signal, double after, const char* text = "", bool before_stop = true) {
  Ending out;
  out.rank = rank;
  out.host = "h";
  out.status.code = code;
  out.status.signal = signal;
  out.after_seconds = after;
  out.last_stderr = text;
  out.before_stop = before_stop;
  return out;
}

Ending follower(int rank, int code, int signal, double after, ErrorCode cause = ErrorCode::PeerLost) {
  Ending out = ending(rank, code, signal, after);
  out.cause.code = static_cast<int>(cause);
  return out;
}

TEST(PostMortemTest, FindsTheFirstCause) {
  EXPECT_FALSE(first_failure({ending(0, 0, 0, 1)}));
  EXPECT_EQ(first_failure({ending(0, 1, 0, 2), ending(1, 1, 0, 1)})->rank, 1);
  // The failure that is reported later came first.
  EXPECT_EQ(first_failure({follower(0, 1, 0, 1), ending(2, 0, SIGKILL, 1.2)})->rank, 2);
  EXPECT_EQ(first_failure({follower(0, 1, 0, 1), ending(2, 1, 0, 1.2, "ValueError")})->rank, 2);
  EXPECT_EQ(first_failure({follower(0, 0, SIGABRT, 1), ending(2, 1, 0, 1.2, "ValueError")})->rank, 2);
  EXPECT_EQ(first_failure({follower(0, 0, SIGABRT, 1), ending(2, 0, SIGABRT, 1.2, "no room")})->rank, 2);
  EXPECT_EQ(first_failure({follower(0, 1, 0, 1, ErrorCode::Aborted), ending(2, 1, 0, 1.2)})->rank, 2);
  EXPECT_EQ(first_failure({follower(0, 1, 0, 1, ErrorCode::Timeout), ending(2, 1, 0, 1.2)})->rank, 0);
  // Words that a rank writes about another's failure are no cause of its own.
  EXPECT_FALSE(follows_another(ending(2, 1, 0, 1.2, "caught: PeerLost: rank 0 (h) lost rank 1 (h)")));
  EXPECT_TRUE(follows_another(follower(0, 1, 0, 1)));
  EXPECT_FALSE(follows_another(follower(0, 0, 0, 1)));
  // Errors of other libraries are known only by their text; what ended a rank counts more than what it wrote before.
  Ending first = ending(2, 1, 0, 1.2, "caught: Connection closed by peer");
  EXPECT_TRUE(follows_another(first));
  first.words = "ValueError: no sample";
  EXPECT_FALSE(follows_another(first));
  // Processes that we killed ourselves are no cause.
  EXPECT_EQ(first_failure({ending(0, 0, SIGTERM, 1, "", false), ending(1, 3, 0, 2)})->rank, 1);
}

TEST(PostMortemTest, SaysWhoHowAndWhere) {
  PostMortem post_mortem;
  post_mortem.first = ending(1, 0, SIGKILL, 2.5, "a\nb\n");
  post_mortem.first.out_of_memory = true;
  post_mortem.world_size = 4;
  post_mortem.log_folder = "runs/x/logs";
  const std::string text = to_string(post_mortem);
  EXPECT_NE(text.find("rank 1 failed: killed by SIGKILL (host h"), std::string::npos) << text;
  EXPECT_NE(text.find("> a\ncohort:   > b\n"), std::string::npos) << text;
  EXPECT_NE(text.find("out-of-memory"), std::string::npos) << text;
  EXPECT_NE(text.find("full logs: runs/x/logs\n"), std::string::npos) << text;
  EXPECT_EQ(text.find('\033'), std::string::npos);
}

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
  post_mortem.first.last.has_page = true;
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
  EXPECT_NE(advice(saying(1, "ModuleNotFoundError: No module named 'cohort.torch'")).find("is cohort.horovod.torch"),
            std::string::npos);
  EXPECT_NE(advice(saying(1, "ModuleNotFoundError: No module named 'cohort'")).find("tools/install --python"),
            std::string::npos);
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
