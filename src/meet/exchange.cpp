#include "meet/exchange.h"

namespace cohort::meet {
namespace {

bool is_set(const cluster::Environment& environment, std::string_view name, std::optional<int> value = {}) {
  const auto found = environment.find(name);
  return found != environment.end() && !found->second.empty() && (!value || found->second == std::to_string(*value));
}

std::string_view advice_for(std::string_view launcher) {
  if (launcher == "Slurm") return "start by `srun --mpi=pmi2` or `srun --mpi=pmix`, or ";
  return "";
}

}  // namespace

Result<std::shared_ptr<Exchange>> open_exchange(const cluster::Detected& said,
                                                const cluster::Environment& environment) {
  // Variables of an outer launcher's PMI may still be there: they have to be about this rank, and of a kind that the
  // launcher has.
  const bool slurm = said.launcher == "Slurm";
  const bool has_pmi = slurm || said.launcher == "MPI (PMI)" || said.launcher == "MVAPICH2";
  const bool has_pmix =
      slurm || said.launcher == "Open MPI" || said.launcher == "PMIx" || said.launcher == "LSF (jsrun)";
  std::string why = "this launcher has none that Cohort knows";
  if (has_pmi || has_pmix) why = "it set none up for this process (no PMI_FD, no PMIX_NAMESPACE)";
  if (has_pmi && is_set(environment, "PMI_FD") && is_set(environment, "PMI_RANK", said.rank)) {
    auto exchange = open_pmi(environment);
    if (exchange) return exchange;
    why = exchange.error().what();
  } else if (has_pmix && is_set(environment, "PMIX_NAMESPACE") && is_set(environment, "PMIX_RANK", said.rank)) {
    auto exchange = open_pmix(environment);
    if (exchange) return exchange;
    why = exchange.error().what();
  } else if (slurm) {
    auto exchange = open_munge(said, environment);
    if (exchange) return exchange;
    why = fmt::format("{}, and MUNGE cannot stand in: {}", why, exchange.error().what());
  }
  return fail(ErrorCode::Unavailable, "{}", why);
}

Result<std::shared_ptr<Exchange>> find_exchange(const cluster::Detected& said,
                                                const cluster::Environment& environment) {
  auto exchange = open_exchange(said, environment);
  if (exchange) return exchange;
  return fail(
      ErrorCode::Unavailable,
      "{}: ranks on several hosts need a place to meet, and {}'s own cannot be used: {} -- {}set COHORT_INIT to "
      "file:///PATH, a new file for each job on a file system that all hosts share",
      said.source, said.launcher, exchange.error().what(), advice_for(said.launcher));
}

}  // namespace cohort::meet
