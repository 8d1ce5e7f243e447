// Counters as parameters, while connections break and servers are killed and started again by `cohort run`: each push
// counts once, to the unit. COHORT_TEST_PS_PUSHES and COHORT_TEST_PS_KILLS say of how many (over two workers); 10000000
// and 200 take some minutes.
#include "launch_harness.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace cohort::test {
namespace {

constexpr long kWorkers = 2;

long number_of(const char* variable, long usual) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::atol(text) : usual;
}

class ServersAreKilled : public testing::TestWithParam<const char*> {};

TEST_P(ServersAreKilled, AndTheSumIsExact) {
  const long pushes = number_of("COHORT_TEST_PS_PUSHES", 40'000);
  const long kills = number_of("COHORT_TEST_PS_KILLS", 6);
  Job job({{"run", "-np", std::to_string(kWorkers), "--servers", "3", "--server-restarts", std::to_string(kills),
            PS_KILLS_PEER, GetParam(), std::to_string(pushes / kWorkers), std::to_string(kills)},
           {},
           {},
           false,
           false,
           {},
           std::chrono::seconds(60 + pushes / 5000 + kills)});
  ASSERT_EQ(job.wait(), 0) << job.err().substr(job.err().size() > 3000 ? job.err().size() - 3000 : 0);
  const std::string exact =
      "counted " + std::to_string(pushes) + " of " + std::to_string(pushes) + ", 0 counters are wrong";
  long said = 0;
  for (const std::string& line : lines_of(job.out())) said += line.find(exact) != std::string::npos;
  EXPECT_EQ(said, kWorkers) << job.out();
  const auto record = nlohmann::json::parse(job.file("runs/latest/job.json"));
  EXPECT_EQ(record["server_restarts"].size(), static_cast<std::size_t>(kills));
  int journals = 0;
  for (const auto& file : std::filesystem::directory_iterator(job.folder())) {
    if (file.path().filename().string().find("journal-") != 0) continue;
    EXPECT_LT(file.file_size(), static_cast<std::uintmax_t>(1) << 20) << "it does not grow with the pushes";
    ++journals;
  }
  EXPECT_EQ(journals >= 3, std::string(GetParam()) != "replicas") << journals;
  RecordProperty("said", job.out());
  std::printf("%s", job.out().c_str());
}

INSTANTIATE_TEST_SUITE_P(With, ServersAreKilled, testing::Values("journal", "replicas", "both"),
                         [](const auto& with) { return std::string(with.param); });

}  // namespace
}  // namespace cohort::test
