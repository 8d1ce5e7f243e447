// A run's job.json, as `cohort bench plan` and `cohort doctor` read what its steps cost, and `cohort runs` its state.
#include "base/result.h"
#include "launch/step_costs.h"
#include "observe/watch/runs.h"
#include "shared/child_job.h"
#include "shared/program.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort;
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (const auto run = app::costs_of_record(text, "job.json")) (void)launch::advice_of(run->costs, {});
  static const app::TemporaryFolder folder(std::filesystem::temp_directory_path(), "cohort-fuzz-");
  std::ofstream(folder.path() / "job.json", std::ios::binary) << text;
  try {
    const watch::RunSummary run = watch::summary_of(folder.path());
    (void)watch::to_json({run});
    (void)watch::to_table({run});
    watch::require_removable(run);
  } catch (const Error&) {  // it is no run, or nothing to be removed
  }
  return 0;
}
