#include "base/env.h"

#include <cstdlib>

namespace cohort::env {
namespace {

constexpr Variable kVariables[] = {
    {kLog, "LEVEL[,SUBSYSTEM=LEVEL...][,plan]", "warn",
     "what is logged to stderr: debug, info, warn, error or off; plan: how collectives go on this host, and why"},
    {kTimeout, "seconds", "1800", "deadline of collectives that give none of their own"},
    {kAlone, "1", "", "run as a world of one on purpose, also where a launcher started more"},
    {kSecretFile, "path", "", "file of mode 0600 with the job's secret, for worlds without `cohort run`"},
    {kInit, "env://, tcp://HOST:PORT or file:///PATH", "", "where to meet when the program does not say"},
    {kPlan, "NAME=VALUE[,NAME=VALUE...]", "measured",
     "forces how collectives go on a host (rank 0's counts): inline=SIZE, cross=on|off|SIZE, zero-copy=on|off, "
     "stores=cached|nt|auto, chunk=SIZE"},
    {kStore, "HOST:PORT", "", "where the job's store listens", true},
    {kSecretFd, "descriptor", "", "inherited descriptor that holds the job's secret", true},
    {kStatusFd, "descriptor", "", "inherited memory file in which a rank says what it does", true},
    {kJobId, "text", "", "name of this run of the job", true},
    {kRunDir, "path", "", "folder of the run: logs, job.json, the run record", true},
    {kHost, "name", "", "name of this host in messages", true},
    {kRank, "number", "", "rank of this process in the world", true},
    {kWorldSize, "number", "", "processes in the world", true},
    {kLocalRank, "number", "", "rank among the processes of this host", true},
    {kLocalWorldSize, "number", "", "processes of the world on this host", true},
    {kMasterAddr, "address", "", "host of torch.distributed's store", true},
    {kMasterPort, "port", "", "port of torch.distributed's store", true},
    {kOmpNumThreads, "number", "cores / local ranks", "compute threads of each worker; set unless it is", true},
};

}  // namespace

std::span<const Variable> variables() noexcept { return kVariables; }

std::optional<std::string> get(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

}  // namespace cohort::env
