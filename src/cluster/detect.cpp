#include "cluster/detect.h"

#include "base/env.h"
#include "base/parse.h"
#include "cluster/launch_warning.h"
#include "cluster/launchers.h"
#include "cluster/sagemaker.h"

#include <unistd.h>

#include <string_view>

extern char** environ;

namespace cohort::cluster {

Environment current_environment() {
  Environment result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    if (equals + 1 == text.size() && text != "CUDA_VISIBLE_DEVICES=") continue;
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
  const auto alone = env::flag(env::kAlone, environment);
  if (!alone) return tl::unexpected(alone.error());
  Detected detected;
  if (*alone) {
    detected.alone = true;
    detected.source = "COHORT_ALONE=1";
    return detected;
  }
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
  }
  if (detected.role != Role::Worker) return detected;  // a world of one, if any, is meant
  detected.number = detected.rank;
  detected.workers = detected.size;
  if (auto meant = refuse_unmeant_world_of_one(environment, detected.size, detected.source); !meant) {
    return tl::unexpected(meant.error());
  }
  note_warning(environment, detected);
  return detected;
}

Result<Detected> detect_rank(const Environment& environment) {
  auto detected = detect(environment);
  if (!detected || detected->role != Role::Server) return detected;
  return fail(ErrorCode::InvalidArgument,
              "{}: a parameter server is no rank and joins no world -- let the program ask cohort::role() "
              "(cohort.role()), and join as a worker only; COHORT_ALONE=1 makes of it a world of one",
              detected->source);
}

}  // namespace cohort::cluster
