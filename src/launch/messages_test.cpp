#include "launch/messages.h"

#include <gtest/gtest.h>

#include <random>

namespace cohort::launch {
namespace {

std::vector<Message> samples() {
  StartJob job;
  job.path = "/bin/x";
  job.arguments = {"x", "", std::string("a\0b", 3)};
  job.environment = {"A=1"};
  job.folder = "/";
  job.log_folder = "/l";
  job.workers = {{0, {"RANK=0"}}, {1, {}, Role::Server, 0}};
  job.programs = {{Role::Server, "/bin/s", {"s", "1"}}};
  job.input = true;
  job.open_files = 1024;
  job.ignored = {1, 3};
  job.elastic = true;
  Exited exited;
  exited.rank = 3;
  exited.status.signal = 9;
  exited.before_stop = false;
  exited.last_stderr = "why";
  exited.words = "a bad day";
  exited.cause = {3, 3, 1, 12, "vm", "barrier()"};
  RankReport report;
  report.rank = 3;
  report.has_page = true;
  report.formed_epoch = std::int64_t{1} << 40;
  report.has_state = true;
  report.state = 'S';
  GroupReport group;
  group.id = 7;
  group.operation = "barrier()";
  group.waiting = true;
  report.groups = {group, GroupReport{}};
  report.times = {10, 2'000'000'000, 30, 4096, 500, 200, 100, 2048, 400};
  exited.last = report;
  return {Hello{1, "0.1.0", 2, "vm", 77, 8, 4711, "GNU 12, Release", 2, 3, "id", {"0", "1"}, {"a:1"}},
          Started{{1, 2, 3}, 4},
          StartFailed{5, "no"},
          Output{1, Stream::Stderr, "text"},
          exited,
          InputTaken{7},
          Trouble{"t"},
          AllGone{1, "stuck"},
          job,
          Input{"in"},
          OutputTaken{std::uint64_t{1} << 40},
          SignalWorkers{10},
          StopWorkers{15, 100, 30000},
          Finish{7},
          Reports{{report, RankReport{}}},
          Stacks{2, "main"},
          AskStacks{},
          Ends{"its guard was killed"},
          Refused{"no"},
          Told{15},
          TracePiece{-5, std::string("\x0a\0\xff", 3)},
          ClockAnswer{~std::uint64_t{0}, -1},
          ClockQuestion{7},
          LeasedPorts{{10000, 65535, 10001, 10002, 10003}, ""},
          LeasePorts{2},
          StartedAgain{5, 4711, "no such file"},
          StartAgain{5, {"A=1"}},
          GoOnWithout{5},
          NewMembership{std::uint64_t{1} << 33},
          StartMore{{7, {"RANK=7"}}},
          KillWorker{7},
          Relayed{{3, std::uint64_t{1} << 40, 7}, "bytes"},
          RelayedToMany{{{3, 8, 7}, {4, 1, 0}}, "bytes"},
          ChildLink{3, ChildLink::State::Closed, "why"},
          RouterRuns{}};
}

TEST(Messages, ComeBackAsTheyWere) {
  const auto all = samples();
  ASSERT_EQ(all.size(), std::variant_size_v<Message>);
  for (std::size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(all[i].index(), i);
    const std::string bytes = encode(all[i]);
    const auto again = decode(bytes);
    ASSERT_TRUE(again) << again.error().what();
    EXPECT_EQ(again->index(), i);
    EXPECT_EQ(encode(*again), bytes);
  }
  const auto job = std::get<StartJob>(*decode(encode(samples()[8])));
  EXPECT_EQ(job.arguments[2], std::string("a\0b", 3));
  EXPECT_EQ(job.workers[0].environment[0], "RANK=0");
  EXPECT_EQ(job.open_files, 1024U);
  const auto exited = std::get<Exited>(*decode(encode(samples()[4])));
  EXPECT_EQ(exited.status.signal, 9);
  EXPECT_EQ(exited.words, "a bad day");
  EXPECT_EQ(exited.cause.peer, 1);
  EXPECT_EQ(exited.cause.operation, "barrier()");
  EXPECT_EQ(exited.last.times.steps, 10);
  EXPECT_EQ(exited.last.times.exposed_ns, 400U);
  ASSERT_EQ(exited.last.groups.size(), 2U);
  EXPECT_EQ(exited.last.groups[0].operation, "barrier()");
}

TEST(Messages, CutOrLengthenedOnesAreRefused) {
  for (const Message& message : samples()) {
    const std::string bytes = encode(message);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      const auto cut = decode(std::string_view(bytes).substr(0, size));
      ASSERT_FALSE(cut);
      EXPECT_EQ(cut.error().code(), ErrorCode::Corrupt);
    }
    EXPECT_FALSE(decode(bytes + "x"));
  }
  EXPECT_FALSE(decode("\x7f"));
}

TEST(Messages, AFalseCountDoesNotTakeMemory) {
  std::string bytes = encode(Started{{1}, 0});
  bytes[1] = bytes[2] = bytes[3] = bytes[4] = '\xff';
  EXPECT_FALSE(decode(bytes));
}

TEST(Messages, RandomBytesDoNoHarm) {
  std::mt19937 random(7);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes(random() % 64, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    if (!bytes.empty()) bytes[0] = static_cast<char>(random() % (std::variant_size_v<Message> + 2));
    if (const auto message = decode(bytes)) {
      EXPECT_EQ(encode(*message), bytes);
    }
  }
}

}  // namespace
}  // namespace cohort::launch
