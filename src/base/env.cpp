#include "base/env.h"

#include "base/parse.h"

#include <cstdlib>

namespace cohort::env {
namespace {

constexpr Variable kVariables[] = {
    {kLog, "LEVEL[,SUBSYSTEM=LEVEL...][,plan]", "warn",
     "what is logged to stderr: debug, info, warn, error or off; plan: how collectives go on this host, and why"},
    {kTimeout, "seconds", "1800", "deadline of collectives that give none of their own"},
    {kAlone, "1 or 0", "0", "run as a world of one on purpose, also where a launcher started more"},
    {kProgram, "text", "the executable with its build id, or the script",
     "what the ranks run; those that say different things are refused. For programs that are meant to differ"},
    {kSecretFile, "path", "", "file of mode 0600 with the job's secret, for worlds without `cohort run`"},
    {kInit, "env://, tcp://HOST:PORT, file:///PATH or unix://NAME", "", "where to meet when the program does not say"},
    {kPlan, "NAME=VALUE[,NAME=VALUE...]", "measured",
     "forces how collectives go on a host (rank 0's counts): inline=SIZE, cross=on|off|SIZE, zero-copy=on|off, "
     "stores=cached|nt|auto, chunk=SIZE"},
    {kNetwork, "NAME or ADDRESS/BITS[,...]", "all networks",
     "which of this host's networks ranks on other hosts may use: names of interfaces, or networks as 10.0.0.0/8"},
    {kConnections, "1 to 16", "1",
     "how many TCP connections two ranks on different hosts share their data among: more than one where the network "
     "caps each"},
    {kEncrypt, "1 or 0", "0",
     "encrypt what ranks on different hosts send each other (TLS 1.3, AES-GCM); the same on all ranks"},
    {kIntegrity, "1 or 0", "1",
     "authenticate what ranks on different hosts send each other; with 0, whoever can cut into a connection between "
     "them can change gradients and parameters, and nobody notices; the same on all ranks"},
    {kHostTimeout, "seconds", "3",
     "a rank's host from which not even its kernel answers so long is lost: more where machines are moved while they "
     "run or switches take time; `cohort run --host-timeout` sets it"},
    {kTrustNetwork, "1 or 0", "0",
     "whoever reaches the address at which ranks on several hosts meet may join them: for networks that nobody else is "
     "on, where there is no launcher and no secret file; the same on all ranks"},
    {kPretendHosts, "N or A,B,...", "",
     "to try out on one machine what several hosts do: its ranks are taken for N hosts of equally many, or for hosts "
     "of A, B, ... ranks"},
    {kTransport, "tcp or mpi", "tcp",
     "what carries bytes between hosts; mpi: through the site's MPI, for ranks that mpirun or srun has started"},
    {kMpiPlugin, "path", "found by the launcher's MPI", "the plug-in for MPI, which `cohort build-mpi` compiles"},
    {kTimes, "1 or 0", "0",
     "measure how long collectives take and what they wait for; `cohort run --json` tells it of each rank at its end"},
    {"PET_NNODES", "N", "", "torchrun's, as --nnodes of `cohort run` where that is not given; ranks' own are not read"},
    {"PET_NODE_RANK", "R", "", "likewise --node-rank"},
    {"PET_MASTER_ADDR", "HOST", "", "likewise --master-addr"},
    {"PET_MASTER_PORT", "PORT", "", "likewise --master-port"},
    {"PET_RDZV_ENDPOINT", "HOST[:PORT]", "", "likewise --rdzv-endpoint"},
    {"PET_RDZV_BACKEND", "c10d or static", "", "likewise --rdzv-backend"},
    {"PET_RDZV_ID", "text", "", "likewise --rdzv-id"},
    {"PET_STANDALONE", "1", "", "likewise --standalone"},
    {"PET_NPROC_PER_NODE", "N, cpu, gpu or auto", "", "likewise --nproc-per-node"},
    {"HOROVOD_FUSION_THRESHOLD", "bytes", "67108864",
     "read by cohort.torch: small operations that are ready together travel together, up to so many bytes"},
    {"HOROVOD_CACHE_CAPACITY", "number", "4096", "read by cohort.torch: how many operations it remembers by name"},
    {"HOROVOD_STALL_CHECK_TIME_SECONDS", "seconds", "60",
     "read by cohort.torch: when ranks that lack for an operation are named"},
    {"HOROVOD_STALL_CHECK_DISABLE", "1", "", "read by cohort.torch: they are not named"},
    {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "seconds", "as COHORT_TIMEOUT",
     "read by cohort.torch: when operations fail that ranks have not come to"},
    {"HOROVOD_TIMELINE", "file", "", "read by cohort.torch: where its timeline goes"},
    {"HOROVOD_TIMELINE_MARK_CYCLES", "1", "", "read by cohort.torch: the timeline has its cycles, too"},
    {"HOROVOD_TIMELINE_ALL_RANKS", "1", "", "read by cohort.torch: each rank writes one, rank 3 to FILE-rank-3.json"},
    {kStore, "HOST:PORT", "", "where the job's store listens", Variable::Use::SetForRanks},
    {kSecretFd, "descriptor", "", "inherited descriptor that holds the job's secret", Variable::Use::SetForRanks},
    {kStatusFd, "descriptor", "", "inherited memory file in which a rank says what it does",
     Variable::Use::SetForRanks},
    {kTimelineFd, "descriptor", "", "with --trace: inherited memory file for the rank's events",
     Variable::Use::SetForRanks},
    {kJobId, "text", "", "name of this run of the job", Variable::Use::SetForRanks},
    {kRunDir, "path", "", "folder of the run: logs, job.json, the run record", Variable::Use::SetForRanks},
    {kHost, "name", "", "name of this host in messages", Variable::Use::SetForRanks},
    {kRestart, "number", "", "how often the job has been started again (--max-restarts); 0 in the first attempt",
     Variable::Use::SetForRanks},
    {kRank, "number", "", "rank of this process in the world", Variable::Use::SetForRanks},
    {kWorldSize, "number", "", "processes in the world", Variable::Use::SetForRanks},
    {kLocalRank, "number", "", "rank among the processes of this host", Variable::Use::SetForRanks},
    {kLocalWorldSize, "number", "", "processes of the world on this host", Variable::Use::SetForRanks},
    {kMasterAddr, "address", "", "host of torch.distributed's store", Variable::Use::SetForRanks},
    {kMasterPort, "port", "", "port of torch.distributed's store", Variable::Use::SetForRanks},
    {kOmpNumThreads, "number", "cores / local ranks", "compute threads of each worker; set unless it is",
     Variable::Use::SetForRanks},
    {"GROUP_RANK", "number", "", "as torchrun's: number of the host", Variable::Use::SetForRanks},
    {"GROUP_WORLD_SIZE", "number", "", "as torchrun's: number of hosts", Variable::Use::SetForRanks},
    {"ROLE_RANK", "number", "", "as torchrun's: RANK", Variable::Use::SetForRanks},
    {"ROLE_WORLD_SIZE", "number", "", "as torchrun's: WORLD_SIZE", Variable::Use::SetForRanks},
    {"ROLE_NAME", "text", "", "as torchrun's: default", Variable::Use::SetForRanks},
    {"TORCHELASTIC_RUN_ID", "text", "", "as torchrun's: name of the job", Variable::Use::SetForRanks},
    {"TORCHELASTIC_RESTART_COUNT", "number", "", "as torchrun's: COHORT_RESTART", Variable::Use::SetForRanks},
    {"TORCHELASTIC_MAX_RESTARTS", "number", "", "as torchrun's: --max-restarts", Variable::Use::SetForRanks},
    {"TORCHELASTIC_USE_AGENT_STORE", "text", "", "as torchrun's: False, rank 0 opens torch's store",
     Variable::Use::SetForRanks},
    {"PYTHONUNBUFFERED", "1", "", "Python prints at once; set unless it is", Variable::Use::SetForRanks},
    {"HOROVOD_RANK", "number", "", "with --as-horovod: RANK", Variable::Use::SetForRanks},
    {"HOROVOD_SIZE", "number", "", "with --as-horovod: WORLD_SIZE", Variable::Use::SetForRanks},
    {"HOROVOD_LOCAL_RANK", "number", "", "with --as-horovod: LOCAL_RANK", Variable::Use::SetForRanks},
    {"HOROVOD_LOCAL_SIZE", "number", "", "with --as-horovod: LOCAL_WORLD_SIZE", Variable::Use::SetForRanks},
    {"HOROVOD_CROSS_RANK", "number", "", "with --as-horovod: number of this host among those that have this local rank",
     Variable::Use::SetForRanks},
    {"HOROVOD_CROSS_SIZE", "number", "", "with --as-horovod: how many these are", Variable::Use::SetForRanks},
    {"HOROVOD_HOSTNAME", "name", "", "with --as-horovod: COHORT_HOST", Variable::Use::SetForRanks},
    {"HOROVOD_CONTROLLER", "text", "", "with --as-horovod: gloo, for programs that ask", Variable::Use::SetForRanks},
    {"HOROVOD_CPU_OPERATIONS", "text", "", "with --as-horovod: gloo, for programs that ask",
     Variable::Use::SetForRanks},
};

}  // namespace

std::span<const Variable> variables() noexcept { return kVariables; }

std::optional<std::string> get(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

Result<bool> truth(std::string_view name, std::string_view value, bool otherwise) {
  if (value.empty()) return otherwise;
  if (const auto said = parse_truth(value)) return *said;
  return fail(ErrorCode::InvalidArgument,
              "{}='{}' has no meaning -- set it to 1 (or true, yes, on) or 0 (or false, no, off), or unset it", name,
              value);
}

}  // namespace cohort::env
