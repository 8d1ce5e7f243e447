#include "bench/training/training.h"

#include <cohort/communicator.h>

#include <gtest/gtest.h>

#include <thread>

namespace cohort::app::training {
namespace {

// --- the sentence ---

Point point(int hosts, int processes, double rate, Shares step) {
  Point made;
  made.hosts = hosts;
  made.processes = processes;
  made.rate = rate;
  made.steps = 100;
  made.seconds = 100 * step.step();
  made.step = step;
  made.split = Split::Measured;
  made.busy_wire = step.wire;
  made.median_compute = made.slowest_compute = step.compute;
  return made;
}

Workload hundred() {
  Workload workload;
  workload.scaling = Scaling::PerRank;
  workload.batch = 100;
  workload.cores = 2;
  return workload;
}

/// 2 hosts x 2 processes against 1 x 2, with 200 samples per step for two processes, as in the S4 article.
std::vector<Point> slow_wire() {
  Point one = point(1, 2, 200 / 0.4, {.compute = 0.4, .waiting = 0, .local = 0, .wire = 0});
  Point two = point(2, 4, 400 / 8.6, {.compute = 0.4, .waiting = 0, .local = 0, .wire = 8.2});
  two.wire_bytes = 98e6;
  return {one, two};
}

void expect_in(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
}

TEST(TrainingVerdict, ASlowWireIsNamedWithWhatWouldHelp) {
  const std::string text = verdict_of(slow_wire(), hundred());
  // 4 / (0.4 x + 8.2) > 2 / 0.4 x from x = 20.5 on; 0.4 s may be on the wire, which is 8.2 / 0.4 times as fast.
  expect_in(text, {"2 hosts with 4 processes train 0.09 times as fast as one with 2, so they are slower",
                   "98.0 MB from each host over a wire that brings 12.0 MB/s", "waits 8.20 s of 8.60 s",
                   "400 ms of computing", "from a batch of 2050 per rank (now 100)", "on a link of 1.96 Gbit/s"});
  EXPECT_EQ(text.find("on the wire"), std::string::npos) << text;  // 1.06 s as int4 are still too long
}

TEST(TrainingVerdict, RemediesHoldWhatTheyPromise) {
  auto points = slow_wire();
  const Remedies remedies = remedies_of(points[0], points[1], hundred());
  const auto rate = [](const Point& at, double batch, double wire) {
    return at.processes * batch / (at.step.compute * batch + wire);
  };
  EXPECT_NEAR(rate(points[1], remedies.batch_factor, 8.2), rate(points[0], remedies.batch_factor, 0), 1e-9);
  EXPECT_NEAR(rate(points[1], 1, 8.2 / remedies.link_factor), rate(points[0], 1, 0), 1e-9);
  // The wire takes little longer than allowed, so half the bytes suffice.
  points[1].step.wire = 0.6;
  EXPECT_EQ(remedies_of(points[0], points[1], hundred()).format, WireFormat::BFloat16);
  points[1].busy_wire = 0.6;
  points[1].rate = 400 / 1.0;
  expect_in(verdict_of(points, hundred()), {"or with bfloat16 on the wire"});
}

TEST(TrainingVerdict, NothingIsPromisedThatDoesNotHelp) {
  auto points = slow_wire();
  points[1].processes = 2;  // as many processes as on one host, which is as fast without a wire
  points[1].rate = 200 / 8.6;
  const Remedies remedies = remedies_of(points[0], points[1], hundred());
  EXPECT_EQ(remedies.batch_factor, 0);
  EXPECT_EQ(remedies.link_factor, 0);
  expect_in(verdict_of(points, hundred()), {"neither a larger batch nor a faster link would change that"});
}

TEST(TrainingVerdict, NothingIsPromisedThatRestsOnChance) {
  auto points = slow_wire();
  points[1].step.compute = 0.7999;  // twice the samples may take 0.8 s; both hosts are the same cores
  const Remedies remedies = remedies_of(points[0], points[1], hundred());
  EXPECT_EQ(remedies.batch_factor, 0);
  EXPECT_EQ(remedies.link_factor, 0);
  expect_in(verdict_of(points, hundred()), {"neither a larger batch nor a faster link would change that"});
}

TEST(TrainingVerdict, RunsOfUnknownWorkAreComparedAndNothingFollows) {
  Workload steps;
  steps.unit = "runs";
  const auto points = slow_wire();
  const Remedies remedies = remedies_of(points[0], points[1], steps);
  EXPECT_EQ(remedies.batch_factor, 0);
  EXPECT_EQ(remedies.link_factor, 0);
  EXPECT_FALSE(remedies.format);
  const std::string text = verdict_of(points, steps);
  expect_in(text, {"depends on the work of a step.", "Whole runs are compared", "--batch or --global-batch"});
  for (const char* promise : {"pay off", "on the wire", "faster link"})
    EXPECT_EQ(text.find(promise), std::string::npos) << text;
  auto gain = points;
  gain[1] = point(2, 4, 400 / 0.6, {.compute = 0.4, .waiting = 0.01, .local = 0.01, .wire = 0.18});
  EXPECT_EQ(verdict_of(gain, steps).find("nearer to"), std::string::npos);
}

// In this case, importing libraries takes seconds, and a step milliseconds.
TEST(TrainingVerdict, OfShortRunsTheStartIsTheReason) {
  Workload runs;
  runs.unit = "runs";
  auto points = slow_wire();
  for (const int hosts : {1, 2}) {
    points[1].hosts = hosts;
    points[1].run = 1000 * points[1].step.step();
    points[1].steps = 10;
    const std::string text = verdict_of(points, runs);
    expect_in(text, {"the rest is its start and end", "--batch"});
    EXPECT_EQ(text.find("wait"), std::string::npos) << text;
    points[1].steps = 900;
    EXPECT_EQ(verdict_of(points, runs).find("its start and end"), std::string::npos);
  }
}

TEST(TrainingVerdict, RanksThatShareAStepNeedLessOfTheWire) {
  Workload shared;
  shared.scaling = Scaling::PerStep;
  shared.batch = 512;
  // Half the computing and 7.5 ms on the wire are slower. 5.5 ms on the wire would do, for any number of processes.
  Point one = point(1, 4, 512 / 10e-3, {.compute = 9e-3, .waiting = 0, .local = 1e-3, .wire = 0});
  Point two = point(2, 8, 512 / 12e-3, {.compute = 4.5e-3, .waiting = 0, .local = 0, .wire = 7.5e-3});
  two.wire_bytes = 7.5e6;  // 1 GB/s
  const Remedies remedies = remedies_of(one, two, shared);
  EXPECT_NEAR(remedies.link_factor, 7.5 / 5.5, 1e-9);
  EXPECT_EQ(remedies.format, WireFormat::BFloat16);
  // 4.5 x + 7.5 < 9 x + 1 from x = 6.5 / 4.5 on.
  EXPECT_NEAR(remedies.batch_factor, 6.5 / 4.5, 1e-9);
  expect_in(verdict_of({one, two}, shared),
            {"from a batch of 740 in all (now 512)", "on a link of 10.9 Gbit/s", "or with bfloat16 on the wire"});
  // If twice as many processes do not compute faster, they share cores.
  two = point(2, 8, 512 / 10e-3, {.compute = 9e-3, .waiting = 0, .local = 1e-3, .wire = 0});
  expect_in(verdict_of({one, two}, shared), {"computing a step takes 9.00 ms instead of 4.50 ms"});
}

TEST(TrainingVerdict, WhatIsUsedAlreadyIsNotRecommended) {
  Workload half = hundred();
  half.wire_format = WireFormat::BFloat16;
  auto points = slow_wire();
  points[1] = point(2, 4, 400 / 1.0, {.compute = 0.4, .waiting = 0, .local = 0, .wire = 0.6});
  EXPECT_EQ(remedies_of(points[0], points[1], half).format, WireFormat::Int8);  // 0.3 s of an allowed 0.4 s
  EXPECT_EQ(verdict_of(points, half).find("bfloat16"), std::string::npos) << verdict_of(points, half);
  half.wire_format = WireFormat::Int8;
  points[1] = point(2, 4, 400 / 0.6, {.compute = 0.4, .waiting = 0.01, .local = 0.01, .wire = 0.18});
  expect_in(verdict_of(points, half), {"; a larger batch or a faster link would bring it nearer to 2.00"});
}

TEST(TrainingVerdict, AGainIsTold) {
  auto points = slow_wire();
  points[1] = point(2, 4, 400 / 0.41, {.compute = 0.4, .waiting = 0.002, .local = 0, .wire = 0.008});
  expect_in(verdict_of(points, hundred()), {"train 1.95 times as fast", "next to nothing is lost between hosts"});
  points[1] = point(2, 4, 400 / 0.6, {.compute = 0.4, .waiting = 0.01, .local = 0.01, .wire = 0.18});
  points[1].wire_bytes = 18e6;
  expect_in(verdict_of(points, hundred()),
            {"train 1.33 times as fast", "180 ms go to 18.0 MB", "brings 100 MB/s", "nearer to 2.00"});
  points[1] = point(2, 4, 400 / 0.6, {.compute = 0.4, .waiting = 0.0, .local = 0.2, .wire = 0});
  expect_in(verdict_of(points, hundred()), {"200 ms go to reductions within the hosts"});
}

TEST(TrainingVerdict, SlowRanksAreNamed) {
  auto points = slow_wire();
  points[1] = point(2, 4, 400 / 0.9, {.compute = 0.5, .waiting = 0.4, .local = 0, .wire = 0});
  points[1].slowest_compute = 0.9;
  points[1].slowest_rank = 3;
  points[1].slowest_host = "b";
  expect_in(verdict_of(points, hundred()), {"rank 3 (host b) computes for 900 ms, most for 500 ms"});
  points[1].rate = 200 / 0.4;
  expect_in(verdict_of(points, hundred()), {"rank 3 (host b)", "give that rank less to do"});
  points[1].slowest_compute = points[1].median_compute;
  expect_in(verdict_of(points, hundred()), {"now one and now another is late"});
}

TEST(TrainingVerdict, SharedCoresAreNamed) {
  auto points = slow_wire();
  points[1] = point(2, 4, 400 / 0.85, {.compute = 0.82, .waiting = 0.01, .local = 0.01, .wire = 0.01});
  points[1].rate = points[0].rate;
  expect_in(verdict_of(points, hundred()), {"computing a step takes 820 ms instead of 400 ms", "share the same cores"});
  points[1].hosts = 1;
  points[1].rate = 300 / 0.85;
  expect_in(verdict_of(points, hundred()), {"On 1 host more processes do not help", "4 processes share 2 cores"});
}

TEST(TrainingVerdict, HostsAreComparedWithAsManyProcessesOnEach) {
  auto points = slow_wire();
  points.push_back(point(1, 4, 1000, {.compute = 0.4}));
  points.push_back(point(2, 2, 300, {.compute = 0.4, .waiting = 0, .local = 0, .wire = 0.2}));
  expect_in(verdict_of(points, hundred()), {"2 hosts with 4 processes train 0.09 times as fast as one with 2"});
}

TEST(TrainingVerdict, OfOneHost) {
  const std::vector<Point> points = {point(1, 1, 250, {.compute = 0.4}),
                                     point(1, 2, 480, {.compute = 0.4, .local = 0.016})};
  expect_in(verdict_of(points, hundred()),
            {"On 1 host 2 processes train 1.92 times as fast as 1", "of a step of 416 ms, 400 ms are computing"});
  expect_in(verdict_of({points[0]}, hundred()), {"Only 1 process on 1 host was measured"});
}

TEST(TrainingVerdict, WhatIsNotKnownIsNotClaimed) {
  auto points = slow_wire();
  points[1].split = Split::Unknown;
  expect_in(verdict_of(points, hundred()), {"0.09 times as fast", "waits where it cannot be seen", "--processes 1,"});
  points[1].steps = 0;
  expect_in(verdict_of(points, hundred()), {"where the time goes is not known", "steps are not Cohort's"});
}

TEST(TrainingVerdict, OneLineWhateverTheNumbers) {
  for (const double wire : {0.0, 1e-9, 0.1, 1e6}) {
    for (const double compute : {0.0, 1e-9, 0.1}) {
      for (const int processes : {1, 2, 4}) {
        for (const double rate : {0.0, 1.0, 1e9}) {
          auto points = slow_wire();
          points[1] =
              point(2, processes, rate, {.compute = compute, .waiting = wire / 3, .local = wire / 5, .wire = wire});
          for (const std::string& text : {verdict_of(points, hundred()), verdict_of({points[1]}, hundred())}) {
            EXPECT_TRUE(text.ends_with('.')) << text;
            EXPECT_EQ(text.find_first_of("\n"), std::string::npos) << text;
            EXPECT_EQ(text.find("nan"), std::string::npos) << text;
          }
        }
      }
    }
  }
}

TEST(TrainingVerdict, Numbers) {
  EXPECT_EQ(bytes_text(7184336), "7.18 MB");
  EXPECT_EQ(bytes_text(999), "999 bytes");
  EXPECT_EQ(bytes_text(99.96e6), "100 MB");
  EXPECT_EQ(seconds_text(8.2), "8.20 s");
  EXPECT_EQ(seconds_text(0.9999), "1.00 s");
  EXPECT_EQ(seconds_text(41.26e-3), "41.3 ms");
  EXPECT_EQ(seconds_text(12e-6), "12 us");
}

// --- what was measured ---

TEST(TrainingMeasured, APointOfTheEventsOfAJob) {
  JobReader reader;
  reader.take(R"({"event":"output","rank":0,"stream":"stdout","line":"{\"event\":\"end\"}"})");
  reader.take(R"({"event":"rank_ended","rank":0,"host":"a","times":{"steps":10,"seconds":2.0,"busy":1.2,"waited":0.3,)"
              R"("wire":0.6,"wire_bytes":1000,"exposed":0.8}})");
  reader.take(R"({"event":"rank_ended","rank":1,"host":"a","times":{"steps":10,"seconds":2.0,"busy":1.2,"waited":0.6,)"
              R"("wire":0.6,"wire_bytes":3000,"exposed":0.4}})");
  reader.take(R"({"event":"rank_ended","rank":2,"host":"b","times":{"steps":10,"seconds":1.9,"busy":1.0,"waited":0.5,)"
              R"("wire":0.0,"wire_bytes":100,"exposed":0.0}})");
  for (const char* junk : {"", "{", "[]", "null", R"({"event":7})", R"({"event":"rank_ended","times":[]})"}) {
    if (std::string(junk).find("rank_ended") == std::string::npos) reader.take(junk);
  }
  reader.take(R"({"event":"end","exit_status":0,"seconds":3.5})");
  const JobOutcome outcome = std::move(reader).finish();
  EXPECT_EQ(outcome.exit_status, 0);
  ASSERT_EQ(outcome.ranks.size(), 3U);
  const Point point = point_of(outcome, 3, 2, {.per_rank = 50, .per_step = 0});
  EXPECT_DOUBLE_EQ(point.rate, 3 * 50 * 10 / 2.0);
  EXPECT_DOUBLE_EQ(point.step.compute, (0.12 + 0.16 + 0.19) / 3);
  EXPECT_DOUBLE_EQ(point.step.wire, (0.04 + 0.02) / 3);
  EXPECT_DOUBLE_EQ(point.step.waiting, (0.02 + 0.02) / 3);
  EXPECT_NEAR(point.step.local, 0.02 / 3, 1e-12);
  EXPECT_DOUBLE_EQ(point.wire_bytes, 400);
  EXPECT_DOUBLE_EQ(point.busy_wire, 0.06);
  EXPECT_EQ(point.slowest_rank, 2);
  EXPECT_EQ(point.slowest_host, "b");
  EXPECT_EQ(point.split, Split::Measured);
  EXPECT_DOUBLE_EQ(point_of(outcome, 3, 2, {.per_rank = 0, .per_step = 60}).rate, 60 * 10 / 2.0);
  EXPECT_DOUBLE_EQ(point_of(outcome, 3, 2, {}).rate, 1 / 3.5) << "steps say nothing by themselves";
  EXPECT_EQ(point.run, 3.5);
  EXPECT_EQ(unit_of(outcome, {}), "runs");
}

TEST(TrainingMeasured, AProgramWithoutStepsCountsAsARun) {
  JobReader reader;
  reader.take(R"({"event":"rank_ended","rank":0,"host":"a"})");
  reader.take(R"({"event":"end","exit_status":0,"seconds":4})");
  const JobOutcome outcome = std::move(reader).finish();
  const Point point = point_of(outcome, 1, 1, {.per_rank = 10, .per_step = 0});
  EXPECT_DOUBLE_EQ(point.rate, 0.25);
  EXPECT_EQ(unit_of(outcome, {.per_rank = 10, .per_step = 0}), "runs");
  EXPECT_EQ(point.split, Split::Unknown);
}

TEST(TrainingMeasured, AFailureIsTold) {
  JobReader reader;
  for (int i = 0; i < 20; ++i) {
    reader.take(R"({"event":"output","rank":1,"stream":"stderr","line":"line )" + std::to_string(i) + R"("})");
  }
  reader.take(R"({"event":"failure","rank":1,"host":"b","status":"exit code 3"})");
  reader.take(R"({"event":"end","exit_status":3,"seconds":4,"reason":"x"})");
  const JobOutcome outcome = std::move(reader).finish();
  EXPECT_EQ(outcome.exit_status, 3);
  expect_in(outcome.failure, {"rank 1 (host b) failed: exit code 3", "line 19", "line 12"});
  EXPECT_EQ(outcome.failure.find("line 11"), std::string::npos);
  EXPECT_EQ(JobReader().finish().exit_status, -1);
}

TEST(TrainingMeasured, WhatRanksPrintIsReadWhereItIsWanted) {
  std::vector<std::string> lines;
  JobReader reader([&lines](const std::string& line) { lines.push_back(line); });
  reader.take(R"({"event":"output","rank":0,"stream":"stdout","line":"{\"event\":\"end\"}"})");
  reader.take(R"({"event":"notice","text":"not a line of a rank"})");
  EXPECT_EQ(lines, std::vector<std::string>{R"({"event":"end"})"});
  EXPECT_EQ(std::move(reader).finish().exit_status, -1);
}

TEST(TrainingMeasured, WaitsThatCannotBeSeenAreEstimated) {
  const Point alone = point(1, 1, 10, {.compute = 0.1});
  Point hidden = point(2, 2, 12, {.compute = 0.16});
  hidden.split = Split::Unknown;
  hidden.busy_wire = 0.05;
  estimate_split(hidden, alone, Scaling::PerRank);
  EXPECT_EQ(hidden.split, Split::Estimated);
  EXPECT_NEAR(hidden.step.compute, 0.1, 1e-12);
  EXPECT_NEAR(hidden.step.wire, 0.05, 1e-12);
  EXPECT_NEAR(hidden.step.waiting, 0.01, 1e-12);
  Point shared = point(2, 2, 12, {.compute = 0.08});  // a step alone takes 0.1, so its share is 0.05
  shared.split = Split::Unknown;
  shared.busy_wire = 0.02;
  estimate_split(shared, alone, Scaling::PerStep);
  EXPECT_NEAR(shared.step.compute, 0.05, 1e-12);
  EXPECT_NEAR(shared.step.wire, 0.02, 1e-12);
  EXPECT_NEAR(shared.step.waiting, 0.01, 1e-12);
  Point measured = point(2, 2, 12, {.compute = 0.16});
  estimate_split(measured, alone, Scaling::PerRank);
  EXPECT_EQ(measured.step.compute, 0.16);
}

TEST(TrainingMeasured, WaitsThatAreHiddenWellAreSeenAllTheSame) {
  JobOutcome outcome;
  outcome.exit_status = 0;
  for (int rank = 0; rank < 2; ++rank) {  // ten operations at once, almost all of the time while the program computes
    outcome.ranks.push_back({.rank = rank,
                             .host = "a",
                             .steps = 10,
                             .seconds = 2,
                             .busy = 20,
                             .waited = 1,
                             .wire = 15,
                             .exposed = 0.01,
                             .wire_bytes = 1000});
  }
  const Point hidden = point_of(outcome, 2, 1, {});
  EXPECT_EQ(hidden.split, Split::Measured);
  EXPECT_NEAR(hidden.step.compute, 0.199, 1e-12);
  for (RankTimes& rank : outcome.ranks) rank.exposed = 0;
  EXPECT_EQ(point_of(outcome, 2, 1, {}).split, Split::Unknown);
}

TEST(TrainingMeasured, TheMedianIsOneOfTheRepetitions) {
  const Point median =
      median_of({point(1, 1, 5, {.compute = 1}), point(1, 1, 1, {.compute = 2}), point(1, 1, 3, {.compute = 3})});
  EXPECT_EQ(median.rate, 3);
  EXPECT_EQ(median.step.compute, 3);
  EXPECT_EQ(median.rates, (std::vector<double>{1, 3, 5}));
}

TEST(TrainingReport, TableBarsAndPicture) {
  auto points = slow_wire();
  const std::string table = table_of(points, hundred());
  expect_in(table, {"samples/s", "efficiency", "500.0", "46.5", "8.60 s", "95 %"});
  const std::string bars = bars_of(points, {});
  expect_in(bars,
            {"  1 x 2    |############################################################| 1.00", "  2 x 4    |======"});
  const std::string svg = svg_of(points, hundred(), "a & b");
  EXPECT_TRUE(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
  expect_in(svg, {"2 hosts", ">wire<", ">2 x 4<", ">0.09<", "a step, in milliseconds", ">8.60 s<", "a &amp; b"});
  const std::string blocks = bars_of(points, {.unicode = true, .colour = true});
  expect_in(blocks, {"\033[35m▓▓▓▓▓▓\033[0m", "| 0.09"});
  points[1].step = {.compute = 4.3, .waiting = 2.15, .local = 0, .wire = 2.15};
  points[1].rate = points[0].rate;
  expect_in(bars_of(points, {}), {"|##############################~~~~~~~~~~~~~~~===============| 1.00"});
  points[1] = slow_wire()[1];
  points[1].split = Split::Estimated;
  expect_in(table_of(points, hundred()), {" *\n", "futures of torch"});
}

// --- what is trained ---

TEST(TrainingNetwork, RanksLearnAndStayTheSame) {
  std::vector<Communicator> world = form_thread_world(3);
  std::vector<Trained> trained(world.size());
  {
    std::vector<std::jthread> ranks;
    for (std::size_t rank = 0; rank < world.size(); ++rank) {
      ranks.emplace_back([&, rank] {
        trained[rank] = train(world[rank], {.layers = {20, 16, 4}, .batch = 32, .seconds = 0.2, .rate = 0.05F});
      });
    }
  }
  for (const Trained& rank : trained) {
    EXPECT_EQ(rank.steps, trained[0].steps);
    EXPECT_GE(rank.steps, 5);
    if (rank.steps > 40) {
      EXPECT_LT(rank.last_loss, 0.9 * rank.first_loss);
    }
  }
}

}  // namespace
}  // namespace cohort::app::training
