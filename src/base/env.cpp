#include "base/env.h"

#include "base/parse.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace cohort::env {
namespace {

using enum Variable::Use;
using Kind = Type::Kind;

constexpr Type kFlag(Kind::Flag, "1 or 0", 0, 1);
/// Returns the type of a number. `shown`: text for lists of variables, if the range alone says too little.
constexpr Type number_from(double least, double most, const char* shown = "") {
  return {Kind::Number, shown, least, most};
}
constexpr Type seconds_from(double least, double most) { return {Kind::Seconds, "seconds", least, most}; }
constexpr Type one_of(const char* choices) { return {Kind::Choice, choices, 0, 0}; }
constexpr Type kCount = number_from(0, std::numeric_limits<int>::max(), "number");
constexpr Type kPort = number_from(1, 65535, "port");
constexpr Type kDescriptor = number_from(3, std::numeric_limits<int>::max(), "descriptor");

// {name, type, default, meaning[, SetForRanks]}
constexpr Variable kVariables[] = {
    {kLog, "LEVEL[,SUBSYSTEM=LEVEL...][,plan]", "warn",
     "what is logged to stderr: debug, info, warn, error or off; plan: how collectives go on this host, and why. Rank "
     "0's "
     "line of the world that was formed comes without it (world=off: it does not)"},
    {kTimeout, seconds_from(0.001, 1e9), "1800", "deadline of collectives that give none of their own"},
    {kAlone, kFlag, "0", "run as a world of one on purpose, also where a launcher started more"},
    {kProgram, "text", "the executable with its build id, or the script",
     "what the ranks run; those that say different things are refused. For programs that are meant to differ"},
    {kSecretFile, "path", "",
     "file of mode 0600 with the job's secret, for worlds without `cohort run`; env:NAME: the variable NAME holds it"},
    {kInit, "env://, tcp://HOST:PORT, file:///PATH or unix://NAME", "", "where to meet when the program does not say"},
    {kPlan, "NAME=VALUE[,NAME=VALUE...]", "measured",
     "forces how collectives go on a host (rank 0's counts): inline=SIZE, cross=on|off|SIZE, zero-copy=on|off, "
     "stores=cached|nt|auto, chunk=SIZE"},
    {kNetwork, "NAME or ADDRESS/BITS[,...]", "all networks",
     "which of this host's networks ranks on other hosts may use: names of interfaces, or networks as 10.0.0.0/8"},
    {kConnections, number_from(1, 16), "1",
     "how many TCP connections two ranks on different hosts share their data among: more than one where the network "
     "caps each"},
    {kEncrypt, kFlag, "0",
     "encrypt what ranks on different hosts send each other (TLS 1.3, AES-GCM); the same on all ranks"},
    {kIntegrity, kFlag, "1",
     "authenticate what ranks on different hosts send each other; with 0, whoever can cut into a connection between "
     "them can change gradients and parameters, and nobody notices; the same on all ranks"},
    {kHostTimeout, seconds_from(1, 3600), "3",
     "a rank's host from which not even its kernel answers so long is lost: more where machines are moved while they "
     "run or switches take time; `cohort run --host-timeout` sets it"},
    {kTrustNetwork, kFlag, "0",
     "whoever reaches the address at which ranks on several hosts meet may be a rank: for networks that nobody else is "
     "on, where there is no launcher and no secret file; the same on all ranks"},
    {kPretendHosts, "N or A,B,...", "",
     "to try out on one machine what several hosts do: its ranks are taken for N hosts of equally many, or for hosts "
     "of A, B, ... ranks"},
    {kTransport, one_of("tcp or mpi"), "tcp",
     "what carries bytes between hosts; mpi: through the site's MPI, for ranks that mpirun or srun has started"},
    {kMpiPlugin, "path", "found by the launcher's MPI", "the plug-in for MPI, which `cohort build-mpi` compiles"},
    {kNccl, "path, or off", "found",
     "the NCCL that carries out what ranks do with a GPU's memory, unless the process has loaded one before; off: it "
     "is staged through host memory"},
    {kGpuSums, one_of("fast or exact"), "fast",
     "reductions of a GPU's memory: fast by NCCL, where it is used, or with the CPU's bits; the same on all ranks"},
    {kShares, "even, measured or N,N,...", "even",
     "which part of a step's samples each rank gets, where a DistributedSampler says nothing else and "
     "DistributedDataParallel is given it: as much as the others, by measured speed, or by these numbers, one for each "
     "rank; `cohort run --shares` sets it; the same on all ranks"},
    {kTimes, kFlag, "0",
     "measure how long collectives take and what they wait for; `cohort run --json` tells it of each rank at its end, "
     "and sets it where there are several hosts and it is not set"},
    {kMetricsTokenFile, "path", "", "--token-file of `cohort export`, also where `cohort run --track` starts it"},
    {kKubeflowServer, "URL", "", "set by Kubeflow's trainer: where `cohort run` posts how far a run is"},
    {kKubeflowCertificates, "path", "", "likewise: certificates that this server is known by"},
    {kKubeflowToken, "path", "", "likewise: the token that it wants to see"},
    {kPageToken, "text", "", "the token of the page that `cohort watch HOST:PORT` asks, or the page's whole address"},
    {kMlflow, kFlag, "1 under cohort.run",
     "1: rank 0 alone writes to MLflow, into the run of the driver if it has one; 0: MLflow is left alone"},
    {"PET_NNODES", "N", "", "torchrun's, as --nnodes of `cohort run` where that is not given; ranks' own are not read"},
    {"PET_NODE_RANK", "R", "", "likewise --node-rank"},
    {"PET_MASTER_ADDR", "HOST", "", "likewise --master-addr"},
    {"PET_MASTER_PORT", "PORT", "", "likewise --master-port"},
    {"PET_RDZV_ENDPOINT", "HOST[:PORT]", "", "likewise --rdzv-endpoint"},
    {"PET_RDZV_BACKEND", "c10d or static", "", "likewise --rdzv-backend"},
    {"PET_RDZV_ID", "text", "", "likewise --rdzv-id"},
    {"PET_STANDALONE", kFlag, "0", "likewise --standalone"},
    {"PET_NPROC_PER_NODE", "N, cpu, gpu or auto", "", "likewise --nproc-per-node"},
    {"HOROVOD_FUSION_THRESHOLD", number_from(0, 1e12, "bytes"), "67108864",
     "read by cohort.horovod.torch: small operations that are ready together travel together, up to so many bytes"},
    {"HOROVOD_CACHE_CAPACITY", kCount, "4096",
     "read by cohort.horovod.torch: how many operations it remembers by name"},
    {"HOROVOD_STALL_CHECK_TIME_SECONDS", seconds_from(0, 1e9), "60",
     "read by cohort.horovod.torch: when ranks that lack for an operation are named"},
    {"HOROVOD_STALL_CHECK_DISABLE", kFlag, "0", "read by cohort.horovod.torch: they are not named"},
    {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", seconds_from(0, 1e9), "as COHORT_TIMEOUT",
     "read by cohort.horovod.torch: when an operation fails that ranks have not come to, alone; the others go on"},
    {"HOROVOD_TIMELINE", "file", "", "read by cohort.horovod.torch: where its timeline goes; DYNAMIC: nowhere yet"},
    {"HOROVOD_TIMELINE_MARK_CYCLES", kFlag, "0",
     "read by cohort.horovod.torch: the timeline shows where operations were started together, too"},
    {"HOROVOD_START_TIMEOUT", seconds_from(0, 1e9), "30", "read by horovodrun: for all ranks to be running"},
    {"HOROVOD_SPARK_START_TIMEOUT", seconds_from(0, 1e9), "600",
     "read by horovod.spark.run: for all ranks to be running"},
    {"HOROVOD_ELASTIC", kFlag, "0",
     "read by cohort.horovod.torch: gradients are watched also in a world of one, which may grow"},
    {kStore, "HOST:PORT", "", "where the job's store listens", SetForRanks},
    {kSecretFd, kDescriptor, "", "inherited descriptor that holds the job's secret", SetForRanks},
    {kStatusFd, kDescriptor, "", "inherited memory file in which a rank says what it does", SetForRanks},
    {kTimelineFd, kDescriptor, "", "with --trace: inherited memory file for the rank's events", SetForRanks},
    {kJobId, "text", "", "name of this run of the job", SetForRanks},
    {kRunDir, "path", "", "folder of the run: logs, job.json, the run record", SetForRanks},
    {kMlflowRun, "text", "", "set by cohort.run: the driver's run of MLflow", SetForRanks},
    {"COHORT_MLFLOW_URI", "URI", "", "set by cohort.run: the driver's store of MLflow", SetForRanks},
    {kHost, "name", "", "name of this host in messages", SetForRanks},
    {kRestart, kCount, "", "how often the job has been started again (--max-restarts); 0 in the first attempt",
     SetForRanks},
    {"COHORT_ELASTIC_TIMEOUT", seconds_from(0, 1e9), "600",
     "of an elastic job: how long it waits for hosts (--elastic-timeout); forming a world waits so long, too",
     SetForRanks},
    {kWorker, kCount, "",
     "of an elastic job (--min-np), whose ranks change: number of this process; never given to another", SetForRanks},
    {kServerRestart, kCount, "",
     "of a server, where the job goes on when one dies (--server-restarts, --lost-servers): how often this one alone "
     "has been started again",
     SetForRanks},
    {kRole, one_of("worker or server or evaluator"), "",
     "what this process is for: `cohort run --servers`, --evaluator", SetForRanks},
    {kRoleNumber, kCount, "", "its number among those of its role; of a worker its rank", SetForRanks},
    {kWorkers, kCount, "", "workers of the job, which are the ranks of the world", SetForRanks},
    {kServers, kCount, "", "servers of the job", SetForRanks},
    {kRank, kCount, "", "rank of this process in the world", SetForRanks},
    {kWorldSize, kCount, "", "processes in the world", SetForRanks},
    {kLocalRank, kCount, "", "rank among the processes of this host", SetForRanks},
    {kLocalWorldSize, kCount, "", "processes of the world on this host", SetForRanks},
    {kMasterAddr, "address", "", "host of torch.distributed's store", SetForRanks},
    {kMasterPort, kPort, "", "port of torch.distributed's store", SetForRanks},
    {"COHORT_SPARK_BATCHES", "path", "",
     "on Spark's workers: the rows of the rank's partition, whose number is the file's name", SetForRanks},
    {kOmpNumThreads, "number", "cores / local ranks", "compute threads of each worker; set unless it is", SetForRanks},
    {kTfIntraOpThreads, "number", "cores / local ranks", "likewise of TensorFlow, for one operation", SetForRanks},
    {kTfInterOpThreads, "number", "cores / local ranks",
     "likewise, for operations beside each other; ranks + 1 with --tf-config and --servers", SetForRanks},
    {"GROUP_RANK", kCount, "", "as torchrun's: number of the host", SetForRanks},
    {"GROUP_WORLD_SIZE", kCount, "", "as torchrun's: number of hosts", SetForRanks},
    {"ROLE_RANK", kCount, "", "as torchrun's: RANK", SetForRanks},
    {"ROLE_WORLD_SIZE", kCount, "", "as torchrun's: WORLD_SIZE", SetForRanks},
    {"ROLE_NAME", "text", "", "as torchrun's: default", SetForRanks},
    {"TORCHELASTIC_RUN_ID", "text", "", "as torchrun's: name of the job", SetForRanks},
    {"TORCHELASTIC_RESTART_COUNT", kCount, "", "as torchrun's: COHORT_RESTART", SetForRanks},
    {"TORCHELASTIC_MAX_RESTARTS", kCount, "", "as torchrun's: --max-restarts", SetForRanks},
    {"TORCHELASTIC_USE_AGENT_STORE", "text", "", "as torchrun's: False, rank 0 opens torch's store", SetForRanks},
    {"PYTHONUNBUFFERED", "1", "", "Python prints at once; set unless it is", SetForRanks},
    {"KERAS_DISTRIBUTION_JOB_ADDRESSES", "HOST:PORT", "",
     "for keras.distribution.initialize(): MASTER_ADDR and MASTER_PORT, where JAX's processes meet", SetForRanks},
    {"KERAS_DISTRIBUTION_NUM_PROCESSES", kCount, "", "likewise: WORLD_SIZE", SetForRanks},
    {"KERAS_DISTRIBUTION_PROCESS_ID", kCount, "", "likewise: RANK", SetForRanks},
    {kTfConfig, "JSON", "", "with --tf-config: the ranks as workers of tf.distribute, each with a port of its own",
     SetForRanks},
    {"HOROVOD_RANK", kCount, "", "with --as-horovod: RANK", SetForRanks},
    {"HOROVOD_SIZE", kCount, "", "with --as-horovod: WORLD_SIZE", SetForRanks},
    {"HOROVOD_LOCAL_RANK", kCount, "", "with --as-horovod: LOCAL_RANK", SetForRanks},
    {"HOROVOD_LOCAL_SIZE", kCount, "", "with --as-horovod: LOCAL_WORLD_SIZE", SetForRanks},
    {"HOROVOD_CROSS_RANK", kCount, "", "with --as-horovod: number of this host among those that have this local rank",
     SetForRanks},
    {"HOROVOD_CROSS_SIZE", kCount, "", "with --as-horovod: how many these are", SetForRanks},
    {"HOROVOD_HOSTNAME", "name", "", "with --as-horovod: COHORT_HOST", SetForRanks},
    {"HOROVOD_CONTROLLER", "text", "", "with --as-horovod: gloo, for programs that ask", SetForRanks},
    {"HOROVOD_CPU_OPERATIONS", "text", "", "with --as-horovod: gloo, for programs that ask", SetForRanks},
    {kWarningText, "text", "",
     "for the command of --on-warning: the warning, for people; kind, rank and step are on stdin", SetForRanks},
};

const Variable& row_of(std::string_view name) {
  const auto row = std::find_if(std::begin(kVariables), std::end(kVariables),
                                [name](const Variable& each) { return each.name == name; });
  if (row == std::end(kVariables)) raise(ErrorCode::InvalidArgument, "{} has no row in the table of variables", name);
  return *row;
}

std::string allowed(const Type& type) {
  const std::string range = fmt::format("from {} to {}", type.least, type.most);
  switch (type.kind) {
    case Kind::Flag: return "1 (or true, yes, on) or 0 (or false, no, off)";
    case Kind::Number: return "a number " + range;
    case Kind::Seconds: return "a number of seconds " + range;
    case Kind::Choice:
    case Kind::Text: break;
  }
  return std::string(type.shown);
}

bool is_within(const Type& type, double number) { return number >= type.least && number <= type.most; }

/// True if `text` is one of the words in `choices`, e.g. in "tcp or mpi".
bool is_among(std::string_view choices, std::string_view text) {
  const bool word = text != "or" && text.find(' ') == std::string_view::npos;
  return word && fmt::format(" {} ", choices).find(fmt::format(" {} ", text)) != std::string::npos;
}

Value parse(const Type& type, const std::string& text) {
  switch (type.kind) {
    case Kind::Flag:
      if (const auto said = parse_truth(text)) return *said;
      return {};
    case Kind::Number:
      if (const auto number = parse_integer<std::int64_t>(text);
          number && is_within(type, static_cast<double>(*number)))
        return *number;
      return {};
    case Kind::Seconds: {
      double seconds = 0;
      const char* const end = text.data() + text.size();
      const auto [stopped, error] = std::from_chars(text.data(), end, seconds);
      if (error == std::errc() && stopped == end && is_within(type, seconds)) return seconds;
      return {};
    }
    case Kind::Choice:
      if (!is_among(type.shown, text)) return {};
      break;
    case Kind::Text: break;
  }
  return text;
}

template <class T>
Result<T> value_as(std::string_view name, const Source& from) {
  const auto found = value(name, from);
  if (!found) return tl::unexpected(found.error());
  if (std::holds_alternative<std::monostate>(*found)) return fail(ErrorCode::Unavailable, "{} is not set", name);
  return std::get<T>(*found);
}

}  // namespace

std::span<const Variable> variables() noexcept { return kVariables; }

std::string Variable::value() const {
  if (!type.shown.empty()) return std::string(type.shown);
  return fmt::format("{} to {}", type.least, type.most);
}

std::optional<std::string> Source::find(std::string_view name) const {
  if (variables_ != nullptr) {
    const auto found = variables_->find(name);
    return found == variables_->end() || found->second.empty() ? std::nullopt : std::optional(found->second);
  }
  const char* const value = std::getenv(std::string(name).c_str());
  return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
}

std::optional<std::string> get(std::string_view name, const Source& from) { return from.find(name); }
std::string text(std::string_view name, const Source& from) { return from.find(name).value_or(""); }

Result<Value> value(std::string_view name, const Source& from) {
  const Variable& row = row_of(name);
  const auto given = from.find(name);
  // For a text, the table describes the default in words.
  if (!given && row.type.kind == Kind::Text) return Value();
  Value parsed = parse(row.type, given ? *given : std::string(row.default_value));
  if (given && std::holds_alternative<std::monostate>(parsed)) {
    return fail(ErrorCode::InvalidArgument, "{}='{}' has no meaning -- give {}, or unset it", name, *given,
                allowed(row.type));
  }
  return parsed;
}

Result<bool> flag(std::string_view name, const Source& from) { return value_as<bool>(name, from); }

Result<int> number(std::string_view name, const Source& from) {
  return value_as<std::int64_t>(name, from).map([](std::int64_t number) { return static_cast<int>(number); });
}

Result<std::chrono::milliseconds> seconds(std::string_view name, const Source& from) {
  return value_as<double>(name, from).map([](double seconds) {
    return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
  });
}

Result<void> check(const Source& from) {
  for (const Variable& row : kVariables) {
    if (row.use != Read || !row.name.starts_with("COHORT_")) continue;
    if (const auto good = value(row.name, from); !good) return tl::unexpected(good.error());
  }
  return {};
}

}  // namespace cohort::env
