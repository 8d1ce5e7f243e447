#include "launch/nodes.h"

#include "base/env.h"
#include "base/parse.h"
#include "cluster/launchers.h"
#include "launch/plan.h"

#include <cstdint>
#include <string_view>

namespace cohort::launch {
namespace {

using cluster::Detected;
using cluster::find;

Result<int> number_of(const std::string& text, std::string_view option, int least, int most) {
  const auto value = parse_integer<int>(text);
  if (value && *value >= least && *value <= most) return *value;
  if (text.find(':') != std::string::npos) {
    return fail(ErrorCode::InvalidArgument,
                "{} {}: a job has as many nodes from its start to its end; one number is wanted", option, text);
  }
  return fail(ErrorCode::InvalidArgument, "{} {}: a number from {} to {} is wanted", option, text, least, most);
}

Result<std::optional<net::Address>> master_of(const NodeWishes& wishes) {
  if (!wishes.master.empty() && !(wishes.master_addr.empty() && wishes.master_port.empty())) {
    return fail(ErrorCode::InvalidArgument,
                "--master {} and --master-addr or --master-port: both say where node rank 0 is; give one",
                wishes.master);
  }
  std::string text = wishes.master;
  if (text.empty() && !wishes.master_addr.empty()) {
    const bool bare_v6 = wishes.master_addr.find(':') != std::string::npos && wishes.master_addr.front() != '[';
    text = bare_v6 ? "[" + wishes.master_addr + "]" : wishes.master_addr;
    if (!wishes.master_port.empty()) text += ":" + wishes.master_port;
  }
  if (text.empty()) {
    if (!wishes.master_port.empty())
      return fail(ErrorCode::InvalidArgument, "--master-port {}: --master-addr HOST is wanted, too",
                  wishes.master_port);
    return std::optional<net::Address>();
  }
  auto address = net::parse_address(text);
  if (!address) address = net::parse_address(fmt::format("{}:{}", text, kDefaultMasterPort));
  if (!address || address->port == 0) {
    return fail(ErrorCode::InvalidArgument,
                "--master {}: HOST or HOST:PORT is wanted, where node rank 0 is started and listens", text);
  }
  return std::optional(*std::move(address));
}

/// A number of another program's variable, if it has one.
std::optional<int> variable(const cluster::Environment& environment, std::string_view name) {
  const auto value = cluster::number(environment, name, 0);
  return value ? *value : std::nullopt;
}

const cluster::Launcher* row_of(std::string_view name) {
  for (const cluster::Launcher& row : cluster::launchers()) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

/// The task of Slurm's that this launcher is, if it is one of several.
Result<std::optional<Detected>> slurm_task(const cluster::Environment& environment) {
  const cluster::Launcher* const slurm = row_of("Slurm");
  if (slurm == nullptr || !cluster::recognised(environment, *slurm)) return std::optional<Detected>();
  auto said = cluster::read(environment, *slurm);
  if (!said) return tl::unexpected(said.error());
  if (said->size == 1) return std::optional<Detected>();
  return std::optional(*std::move(said));
}

bool one_on_each_node(const Detected& step) { return step.nodes == step.size && step.local_size.value_or(1) == 1; }

Result<NodeRole> role_by_hand(const NodeWishes& wishes, const cluster::Environment& environment) {
  NodeRole role;
  const auto count = number_of(wishes.count, "--nnodes", 1, kMostProcesses);
  if (!count) return tl::unexpected(count.error());
  role.count = *count;
  auto master = master_of(wishes);
  if (!master) return tl::unexpected(master.error());
  if (role.count == 1 && wishes.rank.empty()) return role;
  // Slurm may say the same, and which node this is.
  const auto step = slurm_task(environment);
  const bool same_step = step && *step && one_on_each_node(**step) && (*step)->size == role.count;
  if (same_step && wishes.rank.empty()) {
    role.rank = (*step)->rank;
  } else if (wishes.rank.empty()) {
    return fail(ErrorCode::InvalidArgument,
                "--nnodes {}: --node-rank is wanted, too: 0 on the host of --master, and {} on the other{}", role.count,
                role.count == 2 ? "1" : fmt::format("1 to {}", role.count - 1), role.count == 2 ? "" : "s");
  }
  if (!wishes.rank.empty()) {
    const auto rank = number_of(wishes.rank, "--node-rank", 0, role.count - 1);
    if (!rank) return tl::unexpected(rank.error());
    role.rank = *rank;
  }
  role.master = *std::move(master);
  role.source = fmt::format("--nnodes {}, --node-rank {}", role.count, role.rank);
  if (role.count == 1) return role;
  // Then it can carry the secret, and nobody has to.
  if (!wishes.has_secret && same_step && (*step)->rank == role.rank) {
    role.master.reset();
    role.step = *step;
    return role;
  }
  if (!role.master) {
    return fail(ErrorCode::InvalidArgument,
                "{}: --master HOST:PORT is wanted, too: where node rank 0 is started, the same on all nodes",
                role.source);
  }
  return role;
}

/// What to type instead, where several of us were started by another launcher.
std::string way_out(const Detected& said) {
  const std::string_view name = said.launcher;
  if (name == "cohort run") return "leave the inner one out: what `cohort run` starts is a world already";
  if (name == "torchrun") {
    return fmt::format("leave one of the two out: `torchrun ... PROGRAM`, or `cohort run -np {} PROGRAM`", said.size);
  }
  if (name == "env://") {
    return fmt::format(
        "`env -u RANK -u WORLD_SIZE cohort run ...` if they are left over; for a launcher on each of {} "
        "hosts: `cohort run --nnodes {} --node-rank {} --master HOST:PORT ...`",
        said.size, said.size, said.rank);
  }
  if (name == "Slurm") {
    return fmt::format(
        "one launcher on each node: `srun --ntasks-per-node=1 cohort run -np N PROGRAM`; or let srun "
        "start the ranks: `srun -n {} PROGRAM`; or run `cohort run PROGRAM` once, in the batch script",
        said.size);
  }
  const std::string_view starter = name == "LSF (jsrun)" ? "jsrun"
                                   : name == "PMIx"      ? "prterun"
                                   : name == "Horovod"   ? "horovodrun"
                                                         : "mpirun";
  return fmt::format(
      "let {} start the ranks: `{} {} {} PROGRAM`; or run `cohort run -np N -H a:2,b:2 PROGRAM` once, "
      "not under {}",
      starter, starter, starter == "jsrun" ? "-n" : "-np", said.size, starter);
}

tl::unexpected<Error> refused(const Detected& said) {
  return fail(ErrorCode::InvalidArgument,
              "`cohort run` was started {} times, and each would be a job of its own -- {} -- {}; COHORT_ALONE=1 if "
              "each is meant to be",
              said.size, said.source, way_out(said));
}

/// Pods and containers whose environment names a first one: a launcher in each.
std::optional<NodeRole> role_in_pod(const Detected& said) {
  if (said.meeting != cluster::Meeting::Address) return std::nullopt;
  // Of TF_CONFIG, several may be on one host: they are tasks, not nodes.
  NodeRole role;
  role.rank = said.rank;
  role.count = said.size;
  role.master = said.address;
  role.source = said.source;
  return role;
}

/// A pod whose variables are torchrun's options, with several processes in it: it is a node and no rank.
std::optional<NodeRole> role_of_kubeflow(const cluster::Environment& environment) {
  const auto count = variable(environment, "PET_NNODES");
  const auto rank = variable(environment, "PET_NODE_RANK");
  if (!count || !rank || *count < 2 || *rank >= *count) return std::nullopt;
  const std::string* host = find(environment, "PET_MASTER_ADDR");
  if (host == nullptr) host = find(environment, env::kMasterAddr);
  if (host == nullptr) return std::nullopt;
  auto port = variable(environment, "PET_MASTER_PORT");
  if (!port) port = variable(environment, env::kMasterPort);
  NodeRole role;
  role.rank = *rank;
  role.count = *count;
  role.master = net::Address{*host, static_cast<std::uint16_t>(port.value_or(kDefaultMasterPort))};
  role.source = fmt::format("PET_NODE_RANK={}, PET_NNODES={} (Kubeflow)", *rank, *count);
  return role;
}

}  // namespace

Result<std::optional<NodeRole>> choose_node(const NodeWishes& wishes, const cluster::Environment& environment) {
  using Role = std::optional<NodeRole>;
  if (!wishes.count.empty()) {
    auto role = role_by_hand(wishes, environment);
    if (!role) return tl::unexpected(role.error());
    if (role->count == 1) return Role();
    if (wishes.has_hosts) {
      return fail(ErrorCode::InvalidArgument,
                  "--nnodes {}: the hosts are those on which it is started; leave out -H, --hostfile and --nodes, or "
                  "start it once, with them and without --nnodes",
                  role->count);
    }
    return Role(*std::move(role));
  }
  for (const auto& [value, name] :
       {std::pair(&wishes.rank, "--node-rank"), std::pair(&wishes.master, "--master"),
        std::pair(&wishes.master_addr, "--master-addr"), std::pair(&wishes.master_port, "--master-port")}) {
    if (!value->empty())
      return fail(ErrorCode::InvalidArgument, "{} {}: --nnodes is wanted, too: on how many hosts it is started", name,
                  *value);
  }
  const auto alone = cluster::is_on(environment, env::kAlone);
  if (!alone) return tl::unexpected(alone.error());
  if (*alone) return Role();
  const auto step = slurm_task(environment);
  for (const cluster::Launcher& row : cluster::launchers()) {
    if (!cluster::recognised(environment, row)) continue;
    const auto said = cluster::read(environment, row);
    if (!said) {
      if (row.name == "Kubeflow") {
        if (auto role = role_of_kubeflow(environment)) return Role(*std::move(role));
      }
      if (row.name == "Slurm") return tl::unexpected(said.error());
      // Only PMIx's library knows how many there are, and this process may not load it: it would have threads. All but
      // the first know that they are several, and prterun ends a job one of whose processes fails.
      if (const auto rank = variable(environment, "PMIX_RANK"); row.name == "PMIx" && rank.value_or(0) > 0) {
        return fail(ErrorCode::InvalidArgument,
                    "`cohort run` was started several times, and each would be a job of its own -- PMIX_RANK={} "
                    "(PMIx) -- let prterun start the ranks: `prterun -np N PROGRAM`; or run `cohort run -np N -H "
                    "a:2,b:2 PROGRAM` once, not under prterun; COHORT_ALONE=1 if each is meant to be",
                    *rank);
      }
      continue;  // it does not say that there are several
    }
    if (said->size == 1) continue;
    // Scripts set RANK and WORLD_SIZE to what Slurm says.
    const bool slurm = row.name == "Slurm" || (row.name == "env://" && step && *step && (*step)->rank == said->rank &&
                                               (*step)->size == said->size);
    if (slurm && one_on_each_node(**step) && !wishes.has_hosts) {
      NodeRole role;
      role.rank = (*step)->rank;
      role.count = (*step)->size;
      role.source = (*step)->source;
      role.step = *step;
      return Role(std::move(role));
    }
    if (slurm) return refused(**step);
    if (!wishes.has_hosts) {
      if (auto role = role_in_pod(*said)) return Role(*std::move(role));
    }
    return refused(*said);
  }
  return Role();
}

}  // namespace cohort::launch
