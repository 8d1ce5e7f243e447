#include "cluster/detect.h"

#include "base/env.h"
#include "base/parse.h"

#include <unistd.h>

#include <span>
#include <string_view>

extern char** environ;

namespace cohort::cluster {
namespace {

// One launcher. It is recognised by its marker variables, all of which have to be there.
struct Launcher {
  std::string_view name;
  std::string_view markers[2];
  std::string_view rank, size, local_rank, local_size;
  Meeting meeting;          ///< None: ranks cannot meet under it yet
  std::string_view advice;  ///< for those
  /// If this variable equals the first marker, another launcher only imitates this one.
  std::string_view imitator = {};
};

// The innermost first. torchrun as a worker of `cohort run` is the inner one: it sets RANK anew. `cohort run` itself
// sets torchrun's variables too, for programs that ask whether torchrun started them, with its own job's name in them.
constexpr std::string_view kStartOtherwise =
    "start it by `cohort run -np N`, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process";
constexpr Launcher kLaunchers[] = {
    {"torchrun",
     {"TORCHELASTIC_RUN_ID", "WORLD_SIZE"},
     "RANK",
     "WORLD_SIZE",
     "LOCAL_RANK",
     "LOCAL_WORLD_SIZE",
     Meeting::Master,
     {},
     env::kJobId},
    {"cohort run",
     {"COHORT_STORE", "WORLD_SIZE"},
     "RANK",
     "WORLD_SIZE",
     "LOCAL_RANK",
     "LOCAL_WORLD_SIZE",
     Meeting::JobStore,
     {}},
    {"env://", {"WORLD_SIZE", {}}, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", Meeting::Master, {}},
    {"Open MPI",
     {"OMPI_COMM_WORLD_SIZE", {}},
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     Meeting::None,
     kStartOtherwise},
    {"MPI (PMI)",
     {"PMI_SIZE", {}},
     "PMI_RANK",
     "PMI_SIZE",
     "MPI_LOCALRANKID",
     "MPI_LOCALNRANKS",
     Meeting::None,
     kStartOtherwise},
    // Slurm's batch script has SLURM_PROCID=0 and SLURM_NTASKS=N without being a task; a step has these.
    {"Slurm",
     {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"},
     "SLURM_PROCID",
     "SLURM_STEP_NUM_TASKS",
     "SLURM_LOCALID",
     {},
     Meeting::None,
     kStartOtherwise},
};

const std::string* find(const Environment& environment, std::string_view name) {
  if (name.empty()) return nullptr;
  const auto found = environment.find(name);
  return found == environment.end() || found->second.empty() ? nullptr : &found->second;
}

bool recognised(const Environment& environment, const Launcher& launcher) {
  for (const std::string_view marker : launcher.markers) {
    if (!marker.empty() && find(environment, marker) == nullptr) return false;
  }
  const std::string* const imitator = find(environment, launcher.imitator);
  return imitator == nullptr || *imitator != *find(environment, launcher.markers[0]);
}

// A number that is not below `least`; nullopt if the variable is not set.
Result<std::optional<int>> number(const Environment& environment, std::string_view name, int least) {
  const std::string* const text = find(environment, name);
  if (text == nullptr) return std::optional<int>();
  const auto value = parse_integer<int>(*text);
  if (!value || *value < least) {
    return fail(ErrorCode::InvalidArgument, "{}='{}' is not a number from {} -- correct or unset it", name, *text,
                least);
  }
  return value;
}

Result<Detected> read_row(const Environment& environment, const Launcher& row) {
  const auto rank = number(environment, row.rank, 0);
  const auto size = number(environment, row.size, 1);
  const auto local_rank = number(environment, row.local_rank, 0);
  const auto local_size = number(environment, row.local_size, 1);
  for (const auto* value : {&rank, &size, &local_rank, &local_size}) {
    if (!*value) return tl::unexpected(value->error());
  }
  if (!*rank || !*size) {
    return fail(ErrorCode::InvalidArgument, "{} is set and {} is not ({}) -- set both or neither",
                *size ? row.size : row.rank, *size ? row.rank : row.size, row.name);
  }
  if (**rank >= **size) {
    return fail(ErrorCode::InvalidArgument, "{}={} but {}={} ({}): ranks count from 0 -- correct one of them", row.rank,
                **rank, row.size, **size, row.name);
  }
  if (*local_rank && *local_size && **local_rank >= **local_size) {
    return fail(ErrorCode::InvalidArgument, "{}={} but {}={} ({}): local ranks count from 0 -- correct one of them",
                row.local_rank, **local_rank, row.local_size, **local_size, row.name);
  }
  if (*local_size && **local_size > **size) {
    return fail(ErrorCode::InvalidArgument,
                "{}={} but {}={} ({}): a host cannot have more ranks than the world -- correct one of them",
                row.local_size, **local_size, row.size, **size, row.name);
  }
  if (*local_rank && **local_rank > **rank) {
    return fail(ErrorCode::InvalidArgument,
                "{}={} but {}={} ({}): a local rank is never above the rank -- correct one of them", row.local_rank,
                **local_rank, row.rank, **rank, row.name);
  }
  Detected detected;
  detected.launcher = row.name;
  detected.rank = **rank;
  detected.size = **size;
  detected.local_rank = *local_rank;
  detected.local_size = *local_size;
  detected.meeting = row.meeting;
  detected.source = fmt::format("{}={}, {}={} ({})", row.rank, **rank, row.size, **size, row.name);
  return detected;
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
  return result;
}

std::vector<SizeClaim> size_claims(const Environment& environment) {
  std::vector<SizeClaim> claims;
  for (const Launcher& row : kLaunchers) {
    if (!recognised(environment, row)) continue;
    const std::string* const text = find(environment, row.size);
    const auto size = text == nullptr ? std::nullopt : parse_integer<int>(*text);
    if (size && *size >= 1) claims.push_back({std::string(row.name), std::string(row.size), *size});
  }
  return claims;
}

Result<void> refuse_unmeant_world_of_one(const Environment& environment, int size, const std::string& source) {
  if (size != 1) return {};
  for (const Launcher& row : kLaunchers) {
    if (!recognised(environment, row)) continue;
    const std::string* const text = find(environment, row.size);
    const auto meant = text == nullptr ? std::nullopt : parse_integer<int>(*text);
    if (!meant || *meant <= 1) continue;
    return fail(ErrorCode::InvalidArgument,
                "this would be a world of one ({}), but {}={} ({}) says that {} processes were meant -- {}; to run "
                "singly on purpose, "
                "set COHORT_ALONE=1",
                source, row.size, *meant, row.name, *meant,
                row.advice.empty()
                    ? std::string_view("let all of them join one world: leave rank and world size to the launcher")
                    : row.advice);
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
  const auto settle = [&](const Detected& detected) -> Result<Detected> {
    if (auto meant = refuse_unmeant_world_of_one(environment, detected.size, detected.source); !meant) {
      return tl::unexpected(meant.error());
    }
    return detected;
  };
  for (const Launcher& row : kLaunchers) {
    if (row.meeting == Meeting::None || !recognised(environment, row)) continue;
    auto detected = read_row(environment, row);
    if (!detected) return detected;
    return settle(*detected);
  }
  if (const std::string* const rank = find(environment, env::kRank)) {
    return fail(ErrorCode::InvalidArgument, "RANK={} is set and WORLD_SIZE is not -- set both or neither", *rank);
  }
  Detected nothing;
  nothing.source = "no launcher";
  return settle(nothing);
}

}  // namespace cohort::cluster
