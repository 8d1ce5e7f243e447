// The one table of environment variables that Cohort reads or sets for its workers, and their values by type. To add a
// variable: add its name here, unless only Python reads it, and a row to kVariables (env.cpp), which `cohort help
// environment` and docs/reference/environment.md show. Reads this process's variables, or a map of them; changes
// nothing. Any thread.
#pragma once

#include "base/result.h"

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

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
inline constexpr std::string_view kNccl = "COHORT_NCCL";
inline constexpr std::string_view kGpuSums = "COHORT_GPU_SUMS";
inline constexpr std::string_view kTimes = "COHORT_TIMES";
inline constexpr std::string_view kShares = "COHORT_SHARES";
inline constexpr std::string_view kKubeflowServer = "KUBEFLOW_TRAINER_SERVER_URL";
inline constexpr std::string_view kKubeflowCertificates = "KUBEFLOW_TRAINER_SERVER_CA_CERT";
inline constexpr std::string_view kKubeflowToken = "KUBEFLOW_TRAINER_SERVER_TOKEN";
inline constexpr std::string_view kPageToken = "COHORT_PAGE_TOKEN";
inline constexpr std::string_view kMetricsTokenFile = "COHORT_METRICS_TOKEN_FILE";
inline constexpr std::string_view kMlflow = "COHORT_MLFLOW";

// Set by `cohort run` for its workers.
inline constexpr std::string_view kStore = "COHORT_STORE";
inline constexpr std::string_view kSecretFd = "COHORT_SECRET_FD";
inline constexpr std::string_view kStatusFd = "COHORT_STATUS_FD";
inline constexpr std::string_view kTimelineFd = "COHORT_TIMELINE_FD";
inline constexpr std::string_view kJobId = "COHORT_JOB_ID";
inline constexpr std::string_view kRunDir = "COHORT_RUN_DIR";
inline constexpr std::string_view kHost = "COHORT_HOST";
inline constexpr std::string_view kRestart = "COHORT_RESTART";
inline constexpr std::string_view kWorker = "COHORT_WORKER";
inline constexpr std::string_view kRole = "COHORT_ROLE";
inline constexpr std::string_view kServerRestart = "COHORT_SERVER_RESTART";
inline constexpr std::string_view kRoleNumber = "COHORT_ROLE_NUMBER";
inline constexpr std::string_view kWorkers = "COHORT_WORKERS";
inline constexpr std::string_view kServers = "COHORT_SERVERS";
inline constexpr std::string_view kMlflowRun = "COHORT_MLFLOW_RUN";

// Set by `cohort run` for the command of --on-warning, as are kJobId and kRunDir.
inline constexpr std::string_view kWarningText = "COHORT_WARNING_TEXT";

// Set by `cohort run` as torchrun does, and read by env://.
inline constexpr std::string_view kRank = "RANK";
inline constexpr std::string_view kWorldSize = "WORLD_SIZE";
inline constexpr std::string_view kLocalRank = "LOCAL_RANK";
inline constexpr std::string_view kLocalWorldSize = "LOCAL_WORLD_SIZE";
inline constexpr std::string_view kMasterAddr = "MASTER_ADDR";
inline constexpr std::string_view kMasterPort = "MASTER_PORT";
inline constexpr std::string_view kTfConfig = "TF_CONFIG";
inline constexpr std::string_view kOmpNumThreads = "OMP_NUM_THREADS";
inline constexpr std::string_view kTfIntraOpThreads = "TF_NUM_INTRAOP_THREADS";
inline constexpr std::string_view kTfInterOpThreads = "TF_NUM_INTEROP_THREADS";

/// Variables by which `cohort run` divides a host's cores. It sets each of them that is unset to a rank's share.
/// TensorFlow does not read OpenMP's.
inline constexpr std::string_view kThreadCounts[] = {kOmpNumThreads, kTfIntraOpThreads, kTfInterOpThreads};

/// Prefix of variables that stand for options of `cohort run`. (kRunDir also begins so, but is not one.)
inline constexpr std::string_view kRunOptionPrefix = "COHORT_RUN_";

/// Permitted values of a variable. A plain text converts to kind Text, and describes the value, e.g. "path".
struct Type {
  enum class Kind : std::uint8_t { Text, Flag, Number, Seconds, Choice };
  constexpr Type(const char* text) : shown(text) {}  // NOLINT(google-explicit-constructor)
  constexpr Type(Kind what, const char* text, double from, double to)
      : shown(text), kind(what), least(from), most(to) {}

  std::string_view shown;  ///< text for lists of variables
  Kind kind = Kind::Text;
  double least = 0;
  double most = 0;
};

struct Variable {
  std::string_view name;
  Type type;
  std::string_view default_value;
  std::string_view meaning;
  /// How a variable is used.
  enum class Use {
    Read,         ///< read by the library and the command
    SetForRanks,  ///< set by `cohort run`
  };
  Use use = Use::Read;

  /// "1 or 0", "1 to 16", "seconds".
  std::string value() const;
};

/// Returns all rows, in the order of the documentation.
std::span<const Variable> variables() noexcept;

using Map = std::map<std::string, std::string, std::less<>>;

/// Looks up values among the variables of this process, or in a map, which must outlive the Source.
class Source {
 public:
  Source() = default;
  Source(const Map& variables) : variables_(&variables) {}  // NOLINT(google-explicit-constructor)
  /// Returns nullopt if the variable is not set, or empty.
  std::optional<std::string> find(std::string_view name) const;

 private:
  const Map* variables_ = nullptr;
};

/// Returns the value unparsed; nullopt if the variable is not set, or empty.
std::optional<std::string> get(std::string_view name, const Source& from = {});
/// Like `get`, but returns "" instead of nullopt.
std::string text(std::string_view name, const Source& from = {});

// Return the value by the type of the variable's row, or the row's default if the variable is not set. Fail with
// InvalidArgument, naming variable, value and permitted values; with Unavailable if there is no value and no default.

Result<bool> flag(std::string_view name, const Source& from = {});
Result<int> number(std::string_view name, const Source& from = {});
Result<std::chrono::milliseconds> seconds(std::string_view name, const Source& from = {});

/// A value of any type, for other languages: a flag, a number, seconds or a text; monostate if there is no value.
using Value = std::variant<std::monostate, bool, std::int64_t, double, std::string>;
Result<Value> value(std::string_view name, const Source& from = {});

/// Checks that all of Cohort's own variables have permitted values, even those that this process does not read.
Result<void> check(const Source& from = {});

}  // namespace cohort::env
