// The table of launchers, with the variables by which each identifies a process. Only this table has their names. Used
// by `detect` and by the test of its documentation. Pure; any thread.
// To add a launcher, add a row to kLaunchers (launchers.cpp), a line to docs/reference/launchers.md and cases to
// detect_test. launcher_process: the launcher's process on this host, from which all ranks of its job descend. It
// distinguishes jobs if the launcher's variables do not (Hydra's). Reads /proc; any thread.
#pragma once

#include "rendezvous/detect.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace cohort::rendezvous {

/// One launcher. It is recognised if all its markers are set, and `is_it` returns true. Its numbers come from plain
/// variables, the rest from `complete`; or `read` gives all. Both throw Error (InvalidArgument) for bad values.
struct Launcher {
  std::string_view name;
  std::string_view markers[2];
  // (In rows with `read`, these are for the documentation only.)
  std::string_view rank = {}, size = {}, local_rank = {}, local_size = {};
  Meeting meeting = Meeting::None;
  bool (*is_it)(const Environment&) = nullptr;
  void (*complete)(const Environment&, Detected&) = nullptr;
  Detected (*read)(const Environment&) = nullptr;
};

/// Returns the table, the innermost launcher first.
std::span<const Launcher> launchers();

/// Returns nullptr if the variable is not set, or empty.
const std::string* find(const Environment& environment, std::string_view name);

/// Returns the variable's number, or nullopt if it is not set. Throws if it is no number, or below `least`.
std::optional<int> number(const Environment& environment, std::string_view name, int least);

/// Like `number`, but returns nullopt instead of throwing.
std::optional<int> possible_number(const Environment& environment, std::string_view name, int least);

/// Returns the port in a variable; torch's 29500 if it is not set. Throws if the value is no port.
std::uint16_t port_of(const Environment& environment, std::string_view name);

bool recognised(const Environment& environment, const Launcher& launcher);

/// True if MASTER_ADDR is a loopback address, so all ranks are on this host.
bool meets_at_loopback(const Environment& environment);

/// Reads a recognised launcher's variables. Fails with InvalidArgument if they disagree.
Result<Detected> read(const Environment& environment, const Launcher& launcher);

// Functions for launchers that describe a cluster instead of numbering its processes (launchers_described.cpp).
bool is_kubeflow_pod(const Environment& environment);
Detected read_kubeflow(const Environment& environment);
Detected read_mpijob_launcher(const Environment& environment);
Detected read_tf_config(const Environment& environment);
bool is_sagemaker(const Environment& environment);
Detected read_sagemaker(const Environment& environment);

// Functions for launchers that give processes roles (launchers_described.cpp).
void complete_cohort_run(const Environment& environment, Detected& detected);
bool is_beside_ranks(const Environment& environment);
Detected read_beside_ranks(const Environment& environment);
Detected read_dmlc(const Environment& environment);

// Functions for launchers of pods (launchers_described.cpp).
void complete_leader_worker_set(const Environment& environment, Detected& detected);
bool is_jax_job(const Environment& environment);
void complete_jax_job(const Environment& environment, Detected& detected);
void complete_jax_trainer(const Environment& environment, Detected& detected);
bool is_indexed_job(const Environment& environment);
void complete_indexed_job(const Environment& environment, Detected& detected);
bool is_volcano(const Environment& environment);
Detected read_volcano(const Environment& environment);

/// Returns the nearest ancestor that is a launcher's daemon, as "hydra_pmi_proxy 4711 8836124" (name, pid, start time):
/// the same for all ranks that it has started, even through shells. nullopt if there is none.
std::optional<std::string> launcher_process();

}  // namespace cohort::rendezvous
