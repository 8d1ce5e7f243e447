// Launchers that start processes beside the ranks of a world, and say which is which: `cohort run --servers`, and those
// of ps-lite (MXNet, BytePS), which set DMLC_ROLE.
#include "base/env.h"
#include "cluster/launchers.h"

#include <string>

namespace cohort::cluster {
namespace {

// 0 where it is not set.
Result<int> count(const Environment& environment, std::string_view name, int least = 0) {
  const auto value = number(environment, name, least);
  if (!value) return tl::unexpected(value.error());
  return value->value_or(0);
}

tl::unexpected<Error> not_among(std::string_view name, int number, std::string_view of, int all) {
  return fail(ErrorCode::InvalidArgument, "{}={} but {}={}: numbers count from 0 -- correct one of them", name, number,
              of, all);
}

}  // namespace

Result<void> complete_cohort_run(const Environment& environment, Detected& detected) {
  const auto servers = count(environment, env::kServers);
  if (!servers) return tl::unexpected(servers.error());
  detected.servers = *servers;
  return {};
}

// Ranks have the row above, and so has what a server starts as ranks.
bool is_beside_ranks(const Environment& environment) {
  const std::string* const role = find(environment, env::kRole);
  return role != nullptr && *role != to_string(Role::Worker);
}

Result<Detected> read_beside_ranks(const Environment& environment) {
  const auto role = env::value(env::kRole, environment);
  if (!role) return tl::unexpected(role.error());
  const auto number = count(environment, env::kRoleNumber);
  const auto workers = count(environment, env::kWorkers);
  const auto servers = count(environment, env::kServers);
  for (const auto* value : {&number, &workers, &servers}) {
    if (!*value) return tl::unexpected(value->error());
  }
  Detected detected;
  detected.launcher = "cohort run";
  detected.role = std::get<std::string>(*role) == to_string(Role::Server) ? Role::Server : Role::Evaluator;
  detected.number = *number;
  detected.workers = *workers;
  detected.servers = *servers;
  detected.source =
      fmt::format("COHORT_ROLE={}, COHORT_ROLE_NUMBER={} (cohort run)", to_string(detected.role), *number);
  if (detected.role == Role::Server && *number >= *servers)
    return not_among(env::kRoleNumber, *number, env::kServers, *servers);
  return detected;
}

// Workers and servers count apart. ps-lite's own processes get their numbers from its scheduler; here they have to be
// set, as BytePS and most scripts do (DMLC_WORKER_ID), and no scheduler is needed.
Result<Detected> read_dmlc(const Environment& environment) {
  const std::string role = *find(environment, "DMLC_ROLE");
  const auto workers = count(environment, "DMLC_NUM_WORKER", 1);
  const auto servers = count(environment, "DMLC_NUM_SERVER");
  for (const auto* value : {&workers, &servers}) {
    if (!*value) return tl::unexpected(value->error());
  }
  Detected detected;
  detected.launcher = "DMLC (ps-lite)";
  detected.workers = *workers;
  detected.servers = *servers;
  const bool worker = role == "worker";
  if (role == "scheduler") {
    return fail(ErrorCode::InvalidArgument,
                "DMLC_ROLE=scheduler: Cohort's workers and servers find each other without one -- do not start this "
                "process");
  }
  if (!worker && role != "server") {
    return fail(ErrorCode::InvalidArgument,
                "DMLC_ROLE='{}' is none of worker, server, scheduler -- correct or unset it", role);
  }
  detected.role = worker ? Role::Worker : Role::Server;
  const int all = worker ? *workers : *servers;
  std::string_view name = worker ? "DMLC_WORKER_ID" : "DMLC_SERVER_ID";
  if (find(environment, name) == nullptr) name = "DMLC_RANK";
  const auto given = number(environment, name, 0);
  if (!given) return tl::unexpected(given.error());
  detected.number = *given;
  if (!*given && all == 1) detected.number = 0;
  if (detected.number && *detected.number >= all)
    return not_among(name, *detected.number, worker ? "DMLC_NUM_WORKER" : "DMLC_NUM_SERVER", all);
  detected.source = fmt::format("DMLC_ROLE={}{} (ps-lite)", role, *given ? fmt::format(", {}={}", name, **given) : "");
  if (!worker) return detected;
  if (!detected.number) {
    return fail(
        ErrorCode::InvalidArgument,
        "DMLC_ROLE=worker and DMLC_NUM_WORKER={}, but nothing says which of them this is -- set DMLC_WORKER_ID, "
        "from 0",
        *workers);
  }
  detected.rank = *detected.number;
  detected.size = *workers;
  if (detected.size == 1) return detected;
  const std::string* const host = find(environment, "DMLC_PS_ROOT_URI");
  const auto port = number(environment, "DMLC_PS_ROOT_PORT", 1);
  if (!port) return tl::unexpected(port.error());
  if (host == nullptr || !*port || **port > 65535) {
    return fail(ErrorCode::InvalidArgument,
                "{}, but DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT do not say where to meet -- set them to the host of "
                "worker 0, and a free port there",
                detected.source);
  }
  detected.meeting = Meeting::Address;
  detected.address = {*host, static_cast<std::uint16_t>(**port)};
  return detected;
}

}  // namespace cohort::cluster
