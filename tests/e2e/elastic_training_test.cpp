// Trainings that lose and gain ranks at every place: what is left has the same parameters, and the ledger says that
// each sample was used once.
#include "launch_harness.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace cohort::test {
namespace {

using nlohmann::json;

/// Combines the ledgers of a run: for each epoch the samples that count, once each.
class Audit {
 public:
  explicit Audit(const std::filesystem::path& run) {
    std::map<std::uint64_t, std::pair<std::int64_t, std::int64_t>> begins;  // by world: (epoch, cursor)
    std::set<std::tuple<std::uint64_t, std::int64_t, std::int64_t, std::int64_t>> used;
    for (const auto& file : std::filesystem::directory_iterator(run)) {
      if (!file.path().filename().string().starts_with("samples-")) continue;
      std::ifstream lines(file.path());
      for (std::string line; std::getline(lines, line);) {
        const json said = json::parse(line);
        const auto world = said.at("world").get<std::uint64_t>();
        if (said.contains("size"))
          begins[world] = said.at("samplers").at("sampler").get<std::pair<std::int64_t, std::int64_t>>();
        else
          used.emplace(world, said.at("epoch"), said.at("samples").at(0), said.at("samples").at(1));
      }
    }
    worlds = begins.size();
    for (const auto& [world, epoch, from, to] : used) {
      // Samples that the next world takes up again count there.
      auto end = to;
      if (const auto next = begins.upper_bound(world); next != begins.end()) {
        if (epoch > next->second.first) continue;
        if (epoch == next->second.first) end = std::min(end, next->second.second);
      }
      auto& counts = samples[epoch];
      auto& seen = seen_in_[{world, epoch}];
      for (std::int64_t i = from; i < end; ++i) {
        if (seen.insert(i).second) ++counts[i];  // several ranks may have said it of one world
      }
    }
  }
  void expect_each_once(std::int64_t size, std::int64_t epochs) const {
    EXPECT_EQ(static_cast<std::int64_t>(samples.size()), epochs);
    for (const auto& [epoch, counts] : samples) {
      EXPECT_EQ(static_cast<std::int64_t>(counts.size()), size) << "epoch " << epoch;
      for (const auto& [sample, count] : counts) ASSERT_EQ(count, 1) << "position " << sample << " of epoch " << epoch;
    }
  }
  std::map<std::int64_t, std::map<std::int64_t, int>> samples;
  std::size_t worlds = 0;

 private:
  std::map<std::pair<std::uint64_t, std::int64_t>, std::set<std::int64_t>> seen_in_;
};

struct Plan {
  std::string name, kills;
  int workers = 4, left = 4;
  std::string shares = "even";
  friend void PrintTo(const Plan& plan, std::ostream* out) { *out << plan.kills; }
};

class ElasticTraining : public testing::TestWithParam<Plan> {};

/// (steps, digest, sum of parameters) that a worker ended with.
std::tuple<long, std::string, double> ending_of(const std::string& log) {
  const std::string mark = "ended with 0 after ";
  const auto at = log.find(mark);
  if (at == log.npos) return {};
  std::istringstream words(log.substr(at + mark.size()));
  long steps = 0;
  std::string word, digest;
  double sum = 0;
  words >> steps >> word >> digest >> sum;
  return {steps, digest, sum};
}

constexpr std::int64_t kSamples = 2'007, kBatch = 8, kEpochs = 2;

std::vector<std::string> training(std::vector<std::string> options) {
  options.insert(options.begin(), {"run", "--run-dir", "r"});
  options.insert(options.end(),
                 {TRAINING_PEER, std::to_string(kSamples), std::to_string(kBatch), std::to_string(kEpochs), "0"});
  return options;
}

double undisturbed() {
  static const double sum = [] {
    Job job({training({"-np", "4", "--min-np", "4"})});
    EXPECT_EQ(job.wait(), 0) << job.err();
    return std::get<2>(ending_of(job.file("r/logs/rank-0.out")));
  }();
  return sum;
}

TEST_P(ElasticTraining, EndsAsIfNobodyHadBeenLost) {
  const Plan& plan = GetParam();
  Job job({training({"-np", std::to_string(plan.workers), "--min-np", "1"}),
           {"ELASTIC_KILL=" + plan.kills, "COHORT_SHARES=" + plan.shares}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  const Audit audit(job.folder() + "/r");
  audit.expect_each_once(kSamples, kEpochs);
  EXPECT_GT(audit.worlds, 1U) << job.err();
  const long steps = kEpochs * ((kSamples + kBatch * plan.workers - 1) / (kBatch * plan.workers));
  std::set<std::string> digests;
  int ended = 0;
  for (int worker = 0; worker < plan.workers; ++worker) {
    const std::string log = job.file(fmt::format("r/logs/rank-{}.out", worker));
    const auto [of, digest, sum] = ending_of(log);
    if (digest.empty()) continue;
    ++ended;
    EXPECT_EQ(of, steps) << log;
    digests.insert(digest);
    EXPECT_NEAR(sum, undisturbed(), 1e-6);
  }
  EXPECT_EQ(ended, plan.left);
  EXPECT_EQ(digests.size(), 1U);
}

INSTANTIATE_TEST_SUITE_P(
    , ElasticTraining,
    testing::Values(Plan{"InForward", "1@10:forward", 4, 3}, Plan{"InBackward", "3@10:backward", 4, 3},
                    Plan{"BetweenTheOptimizerAndStep", "2@10:applied", 4, 3}, Plan{"AfterStep", "2@64:step", 4, 3},
                    Plan{"Rank0AfterALineOfTheLedger", "0@64:step", 4, 3},
                    Plan{"Rank0BeforeStep", "0@64:applied,1@65:applied", 4, 2},
                    Plan{"AsSpeedsAreExchanged", "2@10:applied,1@21:forward", 4, 2, "measured"},
                    Plan{"AllButOne", "0@7:backward,1@20:step,3@33:forward", 4, 1},
                    Plan{"InTheLastStepOfAnEpoch", "1@63:applied,0@64:forward", 4, 2},
                    Plan{"InTheVeryLastStep", "1@126:step", 4, 3}, Plan{"BeforeTheFirstStep", "1@1:forward", 4, 3}),
    [](const auto& one) { return one.param.name; });

class ElasticLocalSteps : public testing::TestWithParam<Plan> {};

// Each rank steps parameters of its own: whoever is not lost has taken each step once.
TEST_P(ElasticLocalSteps, LoseNoneOfThoseThatStay) {
  const Plan& plan = GetParam();
  Job job({training({"-np", "4", "--min-np", "1"}), {"ELASTIC_KILL=" + plan.kills, "ELASTIC_DILOCO=20"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  Audit(job.folder() + "/r").expect_each_once(kSamples, kEpochs);
  const long steps = kEpochs * ((kSamples + kBatch * 4 - 1) / (kBatch * 4));
  std::set<std::string> digests;
  int ended = 0;
  for (int worker = 0; worker < plan.workers; ++worker) {
    const std::string log = job.file(fmt::format("r/logs/rank-{}.out", worker));
    const auto [of, digest, sum] = ending_of(log);
    if (digest.empty()) continue;
    ++ended;
    EXPECT_EQ(of, steps) << log;
    EXPECT_NE(log.find(fmt::format("took {} steps", steps)), log.npos) << log;
    digests.insert(digest);
    EXPECT_NEAR(sum, undisturbed(), 0.02 * undisturbed()) << "as good as data-parallel";
  }
  EXPECT_EQ(ended, plan.left);
  EXPECT_EQ(digests.size(), 1U);
}

INSTANTIATE_TEST_SUITE_P(, ElasticLocalSteps,
                         testing::Values(Plan{"InARound", "1@15:forward", 4, 3},
                                         Plan{"BeforeASynchronisation", "2@30:applied", 4, 3},
                                         Plan{"WhileOneTravels", "3@29:step,0@49:step", 4, 2},
                                         Plan{"InTheVeryLastStep", "1@126:step", 4, 3}),
                         [](const auto& one) { return one.param.name; });

int times() {
  const char* const wanted = std::getenv("COHORT_TEST_TIMES");
  return wanted == nullptr ? 1 : std::atoi(wanted);
}

// All that have ended have the same parameters, and each sample was used once.
void expect_sound(const Job& job, int workers, const std::string& what) {
  SCOPED_TRACE(what);
  const Audit audit(job.folder() + "/r");
  audit.expect_each_once(kSamples, kEpochs);
  std::set<std::string> digests;
  for (int worker = 0; worker < workers; ++worker)
    digests.insert(std::get<1>(ending_of(job.file(fmt::format("r/logs/rank-{}.out", worker)))));
  digests.erase("");
  EXPECT_EQ(digests.size(), 1U) << job.err();
}

TEST(ElasticTrainings, LoseRanksAtRandom) {
  const auto begun = static_cast<long>(std::chrono::system_clock::now().time_since_epoch().count());
  for (int i = 0; i < 2 * times() && !testing::Test::HasFailure(); ++i) {
    const std::string seed = fmt::format("{}", begun + i);
    Job job({training({"-np", "4", "--min-np", "1"}),
             {"ELASTIC_SEED=" + seed, i % 2 == 0 ? "ELASTIC_DILOCO=" : "ELASTIC_DILOCO=6"}});
    ASSERT_EQ(job.wait(), 0) << seed << "\n" << job.err();
    expect_sound(job, 4, seed);
  }
}

// Hosts, all of them this one, come and go while ranks are lost.
TEST(ElasticTrainings, LoseAndGainRanksAtRandom) {
  const auto begun = static_cast<unsigned>(std::chrono::system_clock::now().time_since_epoch().count() / 1000);
  for (int i = 0; i < times() && !testing::Test::HasFailure(); ++i) {
    std::mt19937 random(begun + static_cast<unsigned>(i));
    const std::string seed = fmt::format("{}", begun + static_cast<unsigned>(i));
    auto arguments = training({"--min-np", "1", "--max-np", "6", "--starter", "local", "--host-discovery-script",
                               "cat hosts 2>/dev/null || echo a:2", "--blacklist-cooldown-range", "1", "2"});
    arguments.back() = "12";
    // (Others may be about to leave when the last one that stays is lost.)
    const std::string local = random() % 2 == 0 ? "ELASTIC_DILOCO=" : "ELASTIC_DILOCO=6";
    Job job({arguments, {"ELASTIC_SEED=" + seed, "ELASTIC_RANK_0_STAYS=1", local}, {}, false, false, {}, 90s});
    while (job.running()) {
      const std::string path = job.folder() + "/hosts";
      std::ofstream(path + ".new") << "a:2\n"
                                   << (random() % 2 == 0 ? "b:1\n" : "") << (random() % 3 == 0 ? "c:2\n" : "");
      std::filesystem::rename(path + ".new", path);
      std::this_thread::sleep_for(std::chrono::milliseconds(300 + random() % 1500));
    }
    ASSERT_EQ(job.wait(), 0) << seed << "\n" << job.err();
    expect_sound(job, 60, seed);
  }
}

/// With so long a step that something can be done meanwhile.
std::vector<std::string> slow_training(std::vector<std::string> options) {
  auto arguments = training(std::move(options));
  arguments.back() = "20";
  return arguments;
}

TEST(ElasticTrainings, LoseARankThatIsToldToEndWithoutDoingAStepAgain) {
  Job job({slow_training({"-np", "3", "--min-np", "1"})});
  ASSERT_TRUE(eventually([&] { return job.file("r/logs/rank-2.out").find("world 2 of 3") != std::string::npos; }))
      << job.err();
  const auto workers = job.processes(TRAINING_PEER);
  ASSERT_EQ(workers.size(), 3U);
  ::kill(workers[1], SIGTERM);
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_NE(job.err().find(" left on notice; epoch 1 goes on with 2 of 3 workers"), std::string::npos) << job.err();
  EXPECT_EQ(job.err().find("is done again"), std::string::npos) << job.err();
  expect_sound(job, 3, "SIGTERM to one");
}

/// All that saved did at one step, at least so many of three workers.
void expect_saved_once(const Job& job, int least = 3) {
  std::set<std::string> saved;
  int workers = 0;
  for (int worker = 0; worker < 3; ++worker) {
    const std::string log = job.file(fmt::format("r/logs/rank-{}.out", worker));
    const auto at = log.find("saved after step ");
    if (at == std::string::npos) continue;
    ++workers;
    saved.insert(log.substr(at, log.find('\n', at) - at));
  }
  EXPECT_GE(workers, least) << job.err();
  EXPECT_EQ(saved.size(), 1U) << fmt::format("{}", fmt::join(saved, "; ")) << job.err();
}

TEST(ElasticTrainings, SaveOnceAtTheSameStepWhereTheJobIsToldToEnd) {
  Job job({slow_training({"-np", "3", "--min-np", "1"})});
  ASSERT_TRUE(eventually([&] { return job.file("r/logs/rank-2.out").find("world 2 of 3") != std::string::npos; }))
      << job.err();
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
  expect_saved_once(job);
}

TEST(ElasticTrainings, SaveThoughARankIsLostAsTheyAreToldToEnd) {
  Job job({slow_training({"-np", "3", "--min-np", "1"})});
  ASSERT_TRUE(eventually([&] { return job.file("r/logs/rank-2.out").find("world 2 of 3") != std::string::npos; }))
      << job.err();
  const auto workers = job.processes(TRAINING_PEER);
  ASSERT_EQ(workers.size(), 3U);
  ::kill(workers[1], SIGKILL);
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
  expect_saved_once(job, 1);
}

// The newcomer has been started and has nothing to save.
TEST(ElasticTrainings, SaveWhileAWorkerIsStillStarting) {
  std::vector<std::string> arguments =
      slow_training({"--min-np", "1", "--starter", "local", "--host-discovery-script", "cat hosts"});
  const std::string slow = "if [ -e slow ]; then touch started; sleep 5; fi; exec \"$@\"";
  const auto program = std::find(arguments.begin(), arguments.end(), TRAINING_PEER);
  const std::vector<std::string> shell = {"sh", "-c", slow, "sh"};
  arguments.insert(program, shell.begin(), shell.end());
  Job job({.arguments = arguments, .shell_before = "printf 'a:2\\n' > hosts"});
  ASSERT_TRUE(eventually([&] { return job.file("r/logs/rank-1.out").find("world 1 of 2") != std::string::npos; }))
      << job.err();
  std::ofstream(job.folder() + "/slow") << "";
  std::ofstream(job.folder() + "/hosts.new") << "a:2\nb:1\n";
  std::filesystem::rename(job.folder() + "/hosts.new", job.folder() + "/hosts");
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists(job.folder() + "/started"); })) << job.err();
  job.signal(SIGUSR1);
  EXPECT_EQ(job.wait(), 75) << job.err();
  expect_saved_once(job, 2);
}

TEST(ElasticTrainings, SaveWhereTooFewWaitForHosts) {
  Job job({.arguments = slow_training({"-np", "3", "--min-np", "2", "--starter", "local", "--host-discovery-script",
                                       "cat hosts", "--blacklist-cooldown-range", "60,100"}),
           .shell_before = "printf 'a:1\\nb:2\\n' > hosts"});
  ASSERT_TRUE(eventually([&] { return job.file("r/logs/rank-2.out").find("world 2 of 3") != std::string::npos; }))
      << job.err();
  const auto workers = job.processes(TRAINING_PEER);
  ASSERT_EQ(workers.size(), 3U);
  ::kill(workers[1], SIGKILL);
  ::kill(workers[2], SIGKILL);
  ASSERT_TRUE(eventually([&] { return job.err().find("waiting up to") != std::string::npos; })) << job.err();
  job.signal(SIGUSR1);
  EXPECT_EQ(job.wait(), 75) << job.err();
  expect_saved_once(job, 1);
}

TEST(ElasticTrainings, SaveOnceAtTheSameStepWhereTheirLauncherIsKilled) {
  Job job({slow_training({"-H", "a:2,b:1", "--starter", "local", "--min-np", "1"})});
  ASSERT_TRUE(eventually([&] { return job.file("r/logs/rank-2.out").find("world 2 of 3") != std::string::npos; }))
      << job.err();
  job.signal(SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL);
  EXPECT_TRUE(eventually([&] { return job.processes().empty(); })) << "something is left";
  expect_saved_once(job);
}

// While members change, each rank is in no world for a moment, and those that come or leave save nothing.
class ElasticTrainingsThatEnd : public testing::TestWithParam<std::tuple<const char*, int>> {};
TEST_P(ElasticTrainingsThatEnd, SaveOnceWhileMembersChange) {
  const auto [change, signal] = GetParam();
  const bool comes = change == std::string_view("come");
  Job job({.arguments = slow_training({"--min-np", "1", "--starter", "local", "--host-discovery-script", "cat hosts"}),
           .shell_before = comes ? "printf 'a:2\\n' > hosts" : "printf 'a:2\\nb:1\\n' > hosts"});
  const std::string last = comes ? "world 1 of 2" : "world 2 of 3";
  ASSERT_TRUE(eventually([&] {
    return (job.file("r/logs/rank-1.out") + job.file("r/logs/rank-2.out")).find(last) != std::string::npos;
  })) << job.err();
  std::ofstream(job.folder() + "/hosts.new") << (comes ? "a:2\nb:1\n" : "a:2\n");
  std::filesystem::rename(job.folder() + "/hosts.new", job.folder() + "/hosts");
  ASSERT_TRUE(eventually([&] { return job.err().find("epoch 1 goes on") != std::string::npos; })) << job.err();
  job.signal(signal);
  EXPECT_EQ(job.wait(), signal == SIGKILL ? 128 + SIGKILL : 75) << job.err();
  EXPECT_TRUE(eventually([&] { return job.processes().empty(); })) << "something is left";
  expect_saved_once(job, 1);
}
INSTANTIATE_TEST_SUITE_P(All, ElasticTrainingsThatEnd,
                         testing::Combine(testing::Values("come", "leave"), testing::Values(SIGTERM, SIGKILL)),
                         [](const auto& test) {
                           return fmt::format("{}_{}", std::get<0>(test.param),
                                              std::get<1>(test.param) == SIGKILL ? "launcher_killed" : "told");
                         });

TEST(ElasticTrainings, DoNotAskForAnotherStartWhereNothingWasSaved) {
  Job job({slow_training({"-np", "2", "--min-np", "1"}), {"ELASTIC_NO_SAVE=1"}});
  ASSERT_TRUE(eventually([&] { return job.file("r/logs/rank-1.out").find("world 1 of 2") != std::string::npos; }))
      << job.err();
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
  EXPECT_NE(job.file("r/logs/rank-0.out").find("ended with 143"), std::string::npos);
}

// Too few are left, and nobody comes.
TEST(ElasticTrainings, SaveBeforeTheyAreGivenUp) {
  auto arguments = slow_training(
      {"--min-np", "3", "--starter", "local", "--host-discovery-script", "echo a:3", "--elastic-timeout", "2"});
  Job job({arguments, {"ELASTIC_KILL=1@10:backward"}});
  EXPECT_EQ(job.wait(), 75) << job.err();
  const std::string first = job.file("r/logs/rank-0.out"), second = job.file("r/logs/rank-2.out");
  const std::string saved = "saved after step 9\n";
  EXPECT_TRUE((first.find(saved) == first.npos) != (second.find(saved) == second.npos)) << job.err() << first << second;
}

// It has done its part, as it says. The others know that it is none of those that are about to end, too, once all wait.
TEST(ElasticTrainings, GoOnAtOnceWithoutARankThatHasEndedWith0) {
  Job job({training({"-np", "3", "--min-np", "2"}), {"ELASTIC_KILL=1@12:forward", "ELASTIC_ENDS_WITH_0=1"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_NE(job.err().find("others have done their part; epoch 1 goes on with 2 of 3 workers"), std::string::npos)
      << job.err();
  expect_sound(job, 3, "one ends with 0");
  for (const int worker : {0, 2}) {
    const std::string log = job.file(fmt::format("r/logs/rank-{}.out", worker));
    EXPECT_EQ(log.find("saved after"), std::string::npos) << "that is done after 10 s: " << log;
  }
}

// Two are lost at once.
TEST(ElasticTrainings, LoseTwoAtOnce) {
  Job job({training({"-np", "4", "--min-np", "1"}), {"ELASTIC_KILL=0@12:backward,2@12:backward"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  const Audit audit(job.folder() + "/r");
  audit.expect_each_once(kSamples, kEpochs);
  EXPECT_EQ(std::get<1>(ending_of(job.file("r/logs/rank-1.out"))),
            std::get<1>(ending_of(job.file("r/logs/rank-3.out"))));
}

}  // namespace
}  // namespace cohort::test
