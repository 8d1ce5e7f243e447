#include "cluster/detect.h"

#include "base/env.h"
#include "base/parse.h"
#include "cluster/launchers.h"
#include "cluster/sagemaker.h"

#include <unistd.h>

#include <string_view>

extern char** environ;

namespace cohort::cluster {
namespace {

// A process of a scheduler's job that is none of its tasks, although there are to be several: the batch script, which
// may well mean to run alone.
std::string note_of(const Environment& environment) {
  const struct {
    std::string_view job, size, parts, launcher, starter;
  } schedulers[] = {
      {"SLURM_JOB_ID", "SLURM_NTASKS", "tasks", "Slurm", "srun"},
      {"SLURM_JOB_ID", "SLURM_HET_SIZE", "components", "Slurm", "srun"},
      {"LSB_JOBID", "LSB_DJOB_NUMPROC", "tasks", "LSF", "jsrun or mpirun"},
  };
  for (const auto& scheduler : schedulers) {
    const std::string* const job = find(environment, scheduler.job);
    const auto size = number(environment, scheduler.size, 1);
    if (job == nullptr || !size || size->value_or(1) == 1) continue;
    return fmt::format(
        "this process runs alone, within {} job {} of {} {} ({}={}): it is the job's script or shell and none of "
        "its tasks -- if they were meant, start the program by {} or `cohort run`; COHORT_ALONE=1 silences this",
        scheduler.launcher, *job, **size, scheduler.parts, scheduler.size, **size, scheduler.starter);
  }
  return {};
}

}  // namespace

Environment current_environment() {
  Environment result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos || equals + 1 == text.size()) continue;
    result.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  add_resource_config(result);
  return result;
}

std::vector<SizeClaim> size_claims(const Environment& environment) {
  std::vector<SizeClaim> claims;
  for (const Launcher& row : launchers()) {
    if (!recognised(environment, row)) continue;
    if (row.read == nullptr) {  // the size counts even where the rest is incomplete
      const auto size = number(environment, row.size, 1);
      if (size && *size) claims.push_back({std::string(row.name), fmt::format("{}={}", row.size, **size), **size});
    } else if (const auto detected = row.read(environment)) {
      claims.push_back({std::string(row.name), detected->source, detected->size});
    }
  }
  return claims;
}

Result<void> refuse_unmeant_world_of_one(const Environment& environment, int size, const std::string& source) {
  if (size != 1) return {};
  for (const SizeClaim& claim : size_claims(environment)) {
    if (claim.size <= 1) continue;
    return fail(ErrorCode::InvalidArgument,
                "this would be a world of one ({}), but {} ({}) says that {} processes were meant -- let all of them "
                "join one world: leave rank and world size to the launcher; to run singly on purpose, set "
                "COHORT_ALONE=1",
                source, claim.claim, claim.launcher, claim.size);
  }
  return {};
}

Result<Detected> detect(const Environment& environment) {
  if (const std::string* const alone = find(environment, env::kAlone)) {
    if (*alone == "1") {
      Detected detected;
      detected.alone = true;
      detected.source = "COHORT_ALONE=1";
      return detected;
    }
    if (*alone != "0") {
      return fail(ErrorCode::InvalidArgument, "COHORT_ALONE='{}' has no meaning -- set it to 1, or unset it", *alone);
    }
  }
  Detected detected;
  detected.source = "no launcher";
  for (const Launcher& row : launchers()) {
    if (!recognised(environment, row)) continue;
    auto said = read(environment, row);
    if (!said) return said;
    detected = *std::move(said);
    break;
  }
  if (detected.launcher.empty()) {
    if (const std::string* const rank = find(environment, env::kRank)) {
      return fail(ErrorCode::InvalidArgument, "RANK={} is set and WORLD_SIZE is not -- set both or neither", *rank);
    }
    detected.note = note_of(environment);
  }
  if (auto meant = refuse_unmeant_world_of_one(environment, detected.size, detected.source); !meant) {
    return tl::unexpected(meant.error());
  }
  return detected;
}

}  // namespace cohort::cluster
