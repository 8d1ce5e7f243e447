// The table of launchers: for each, the variables by which it identifies a process. The only place that knows their
// names. Used by `detect` and by the test of its documentation. Pure; any thread.
// To add one, add a row to kLaunchers (launchers.cpp), a line to docs/reference/launchers.md and cases to detect_test.
// The launcher's process on this host, from which all ranks of its job descend: it distinguishes jobs where the
// launcher's variables do not (Hydra's). Reads /proc; any thread.
#pragma once

#include "rendezvous/detect.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace cohort::rendezvous {

/// One launcher. It is recognised if all its markers are set, and `is_it` agrees. Its numbers are in plain variables
/// (with `complete` for the rest), or `read` finds them out; both throw Error (InvalidArgument) for values that have no
/// meaning.
struct Launcher {
  std::string_view name;
  std::string_view markers[2];
  // (Of rows that `read`, for the documentation alone.)
  std::string_view rank = {}, size = {}, local_rank = {}, local_size = {};
  Meeting meeting = Meeting::None;
  bool (*is_it)(const Environment&) = nullptr;
  void (*complete)(const Environment&, Detected&) = nullptr;
  Detected (*read)(const Environment&) = nullptr;
};

/// The innermost first.
std::span<const Launcher> launchers();

/// nullptr if it is not set, or empty.
const std::string* find(const Environment& environment, std::string_view name);

/// A number that is not below `least`, else throws; nullopt if the variable is not set.
std::optional<int> number(const Environment& environment, std::string_view name, int least);

/// The same; nullopt also for what is no such number.
std::optional<int> possible_number(const Environment& environment, std::string_view name, int least);

/// The port in a variable, else throws; torch's 29500 if it is not set.
std::uint16_t port_of(const Environment& environment, std::string_view name);

bool recognised(const Environment& environment, const Launcher& launcher);

/// True if MASTER_ADDR says that all ranks are on this host.
bool meets_at_loopback(const Environment& environment);

/// Reads a recognised launcher's variables. InvalidArgument if they disagree.
Result<Detected> read(const Environment& environment, const Launcher& launcher);

// Rows that describe a cluster instead of numbering its processes (launchers_described.cpp).
bool is_kubeflow_pod(const Environment& environment);
Detected read_kubeflow(const Environment& environment);
Detected read_mpijob_launcher(const Environment& environment);
Detected read_tf_config(const Environment& environment);
bool is_sagemaker(const Environment& environment);
Detected read_sagemaker(const Environment& environment);

// Rows that give processes roles (launchers_described.cpp).
void complete_cohort_run(const Environment& environment, Detected& detected);
bool is_beside_ranks(const Environment& environment);
Detected read_beside_ranks(const Environment& environment);
Detected read_dmlc(const Environment& environment);

// Rows of pods (launchers_described.cpp).
void complete_leader_worker_set(const Environment& environment, Detected& detected);
bool is_jax_job(const Environment& environment);
void complete_jax_job(const Environment& environment, Detected& detected);
void complete_jax_trainer(const Environment& environment, Detected& detected);
bool is_indexed_job(const Environment& environment);
void complete_indexed_job(const Environment& environment, Detected& detected);
bool is_volcano(const Environment& environment);
Detected read_volcano(const Environment& environment);

/// The nearest ancestor that is a launcher's daemon, as "hydra_pmi_proxy 4711 8836124" (name, pid, start time): equal
/// for the ranks that it has started, whatever shells stand in between. nullopt if there is none.
std::optional<std::string> launcher_process();

}  // namespace cohort::rendezvous
