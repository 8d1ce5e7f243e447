#include "rendezvous/detect.h"

#include "rendezvous/launchers.h"

#include <algorithm>
#include <string_view>

namespace cohort::rendezvous {
namespace {

// Describes a process that is none of a job's several tasks, such as a batch script, which may intend to run alone.
std::string note_of_script(const Environment& environment) {
  const struct {
    std::string_view job, size, parts, launcher, starter;
  } schedulers[] = {
      {"SLURM_JOB_ID", "SLURM_NTASKS", "tasks", "Slurm", "srun"},
      {"SLURM_JOB_ID", "SLURM_HET_SIZE", "components", "Slurm", "srun"},
      {"SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "nodes", "Slurm", "srun"},
      {"LSB_JOBID", "LSB_DJOB_NUMPROC", "tasks", "LSF", "jsrun or mpirun"},
  };
  for (const auto& scheduler : schedulers) {
    const std::string* const job = find(environment, scheduler.job);
    const int size = possible_number(environment, scheduler.size, 1).value_or(1);
    if (job == nullptr || size == 1) continue;
    return fmt::format(
        "this process runs alone, within {} job {} of {} {} ({}={}): it is the job's script or shell and none of "
        "its tasks -- if they were meant, start the program by {} or `cohort run`; COHORT_ALONE=1 silences this",
        scheduler.launcher, *job, size, scheduler.parts, scheduler.size, size, scheduler.starter);
  }
  return {};
}

// Describes a torchrun or mpirun that runs on each host of a job and does not know the other hosts, so that each host
// trains by itself. (`cohort run` makes one job of the hosts, or refuses.)
std::string note_of_hosts(const Environment& environment, const Detected& detected) {
  if (detected.launcher.empty() || detected.launcher == "cohort run") return {};
  const bool all_here = detected.local_size ? *detected.local_size == detected.size : meets_at_loopback(environment);
  if (!all_here) return {};
  for (const Launcher& row : launchers()) {
    if (row.name == detected.launcher || !recognised(environment, row)) continue;
    if (row.name != "Slurm" && row.name != "SageMaker") continue;
    const auto outer = read(environment, row);
    if (!outer || outer->nodes.value_or(1) == 1) continue;
    return fmt::format(
        "all {} ranks of this world are on this host ({}), and this is one of {} hosts of a job ({}): each of them "
        "trains apart -- if one world was meant, tell the launcher of all hosts, as `torchrun --nnodes {}`, or start "
        "by `cohort run` on each",
        detected.size, detected.source, *outer->nodes, outer->source, *outer->nodes);
  }
  return {};
}

std::string note_of_gpus(const Environment& environment, const Detected& detected) {
  const int here = detected.size == 1 ? 1 : detected.local_size.value_or(0);
  const GpuClaim said = gpus_claimed(environment);
  if (here != 1 || said.gpus < 2) return {};
  return fmt::format(
      "this process is the only rank on this host, and {} says that {} GPUs are there: all but one would be idle -- "
      "start one process for each, as by `cohort run -np {}`{}; if one process is meant to use them, "
      "CUDA_VISIBLE_DEVICES "
      "with its own GPU{} silences this",
      said.claim, said.gpus, said.gpus, detected.size == 1 ? "" : " on each host",
      detected.size == 1 ? ", or COHORT_ALONE=1," : "");
}

}  // namespace

int devices_named(std::string_view list) {
  int devices = 0;
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    std::string_view name = list.substr(0, comma);
    list.remove_prefix(std::min(comma + 1, list.size()));
    name.remove_prefix(std::min(name.find_first_not_of(" \t"), name.size()));
    name = name.substr(0, name.find_last_not_of(" \t") + 1);
    const bool number = !name.empty() && name.find_first_not_of("0123456789") == std::string_view::npos;
    if (!number && !name.starts_with("GPU-") && !name.starts_with("MIG-")) break;
    ++devices;
  }
  return devices;
}

GpuClaim gpus_claimed(const Environment& environment) {
  // (An empty CUDA_VISIBLE_DEVICES hides all GPUs.)
  if (const auto list = environment.find("CUDA_VISIBLE_DEVICES"); list != environment.end()) {
    return {devices_named(list->second), fmt::format("CUDA_VISIBLE_DEVICES={}", list->second)};
  }
  for (const std::string_view name : {"SM_NUM_GPUS", "SLURM_GPUS_ON_NODE"}) {
    if (const auto gpus = possible_number(environment, name, 0)) return {*gpus, fmt::format("{}={}", name, *gpus)};
  }
  return {};
}

void note_warning(const Environment& environment, Detected& detected) {
  if (detected.alone || detected.local_rank.value_or(0) != 0) return;
  const auto note = [&detected](LaunchWarning warning, std::string text) {
    if (text.empty()) return false;
    detected.warning = warning;
    detected.note = std::move(text);
    return true;
  };
  if (detected.launcher.empty() && note(LaunchWarning::Script, note_of_script(environment))) return;
  if (note(LaunchWarning::Hosts, note_of_hosts(environment, detected))) return;
  note(LaunchWarning::Gpus, note_of_gpus(environment, detected));
}

}  // namespace cohort::rendezvous
