// The one table of environment variables that Cohort reads or sets for its workers. To add one, add a row here and in
// kVariables (env.cpp); `cohort env` shows it.
#pragma once

#include "base/result.h"

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace cohort::env {

// Read by the library and the command.
inline constexpr std::string_view kLog = "COHORT_LOG";
inline constexpr std::string_view kTimeout = "COHORT_TIMEOUT";
inline constexpr std::string_view kAlone = "COHORT_ALONE";
inline constexpr std::string_view kProgram = "COHORT_PROGRAM";
inline constexpr std::string_view kSecretFile = "COHORT_SECRET_FILE";
inline constexpr std::string_view kInit = "COHORT_INIT";
inline constexpr std::string_view kPlan = "COHORT_PLAN";
inline constexpr std::string_view kNetwork = "COHORT_NETWORK";
inline constexpr std::string_view kConnections = "COHORT_CONNECTIONS";
inline constexpr std::string_view kEncrypt = "COHORT_ENCRYPT";
inline constexpr std::string_view kIntegrity = "COHORT_INTEGRITY";
inline constexpr std::string_view kHostTimeout = "COHORT_HOST_TIMEOUT";
inline constexpr std::string_view kTrustNetwork = "COHORT_TRUST_NETWORK";
inline constexpr std::string_view kPretendHosts = "COHORT_PRETEND_HOSTS";
inline constexpr std::string_view kTransport = "COHORT_TRANSPORT";
inline constexpr std::string_view kMpiPlugin = "COHORT_MPI_PLUGIN";
inline constexpr std::string_view kTimes = "COHORT_TIMES";

// Set by `cohort run` for its workers.
inline constexpr std::string_view kStore = "COHORT_STORE";
inline constexpr std::string_view kSecretFd = "COHORT_SECRET_FD";
inline constexpr std::string_view kStatusFd = "COHORT_STATUS_FD";
inline constexpr std::string_view kTimelineFd = "COHORT_TIMELINE_FD";
inline constexpr std::string_view kJobId = "COHORT_JOB_ID";
inline constexpr std::string_view kRunDir = "COHORT_RUN_DIR";
inline constexpr std::string_view kHost = "COHORT_HOST";
inline constexpr std::string_view kRestart = "COHORT_RESTART";

// Set by `cohort run` as torchrun does, and read by env://.
inline constexpr std::string_view kRank = "RANK";
inline constexpr std::string_view kWorldSize = "WORLD_SIZE";
inline constexpr std::string_view kLocalRank = "LOCAL_RANK";
inline constexpr std::string_view kLocalWorldSize = "LOCAL_WORLD_SIZE";
inline constexpr std::string_view kMasterAddr = "MASTER_ADDR";
inline constexpr std::string_view kMasterPort = "MASTER_PORT";
inline constexpr std::string_view kOmpNumThreads = "OMP_NUM_THREADS";

/// Variables that stand for options of `cohort run`. kRunDir begins so, too, and is none.
inline constexpr std::string_view kRunOptionPrefix = "COHORT_RUN_";

struct Variable {
  std::string_view name;
  std::string_view value;  ///< what it holds, e.g. "seconds"
  std::string_view default_value;
  std::string_view meaning;
  /// Who reads it, or sets it.
  enum class Use {
    Read,         ///< by the library and the command
    SetForRanks,  ///< by `cohort run`
  };
  Use use = Use::Read;
};

/// Every row, in the order of the documentation.
std::span<const Variable> variables() noexcept;

/// The variable's value; nullopt if it is not set or empty.
std::optional<std::string> get(std::string_view name);

/// What the variable's value says, by yes or no; `otherwise` where it is empty. InvalidArgument names both.
Result<bool> truth(std::string_view name, std::string_view value, bool otherwise);

}  // namespace cohort::env
