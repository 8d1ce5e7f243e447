// Slurm's answers to `cohort submit`: a job that is over has a status that a shell can give, and 0 only if the
// answer says so.
#include "cohort/job_state.h"

#include <cstdint>
#include <cstdlib>
#include <string>

namespace {

void check(const cohort::app::JobState& state) {
  if (state.status && (!state.over || *state.status < 0 || *state.status > 255)) std::abort();
  if (state.word.starts_with("CANCEL") && state.over && state.status == 0) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::app;
  const std::string text(reinterpret_cast<const char*>(data), size);
  check(state_by_scontrol(text));
  if (const auto kept = state_by_sacct(text)) check(*kept);
  return 0;
}
