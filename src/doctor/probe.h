// Looks at the host that this process is on: what `cohort doctor` shows of it, and whether a job would find there what
// it needs. Changes nothing. Files of the system are read below a root that tests choose. Programs that are asked for
// their version have a deadline. One thread.
#pragma once

#include "doctor/facts.h"
#include "launch/processes.h"

#include <chrono>
#include <string>
#include <vector>

namespace cohort::doctor {

LimitFacts probe_limits();
/// `root`: the folder that has proc, sys and dev; empty: this system's.
MachineFacts probe_machine(const std::string& root);
SoftwareFacts probe_software(const launch::Environment& environment, std::chrono::milliseconds limit);
FolderFacts probe_folder(const std::string& path);
std::vector<NetworkFacts> probe_networks(std::string& error);
/// All of them at once, each until `limit`.
std::vector<NameFacts> resolve_names(const std::vector<std::string>& names, std::chrono::milliseconds limit);
/// Of those that change what a job does; nothing that might be a secret.
std::map<std::string, std::string> variables_that_matter(const launch::Environment& environment);

/// GPUs as the driver lists them, and what nvidia-smi says if it is there.
void probe_gpus(MachineFacts& facts, const std::string& root, std::chrono::milliseconds limit);
/// Where there are GPUs: how they reach each other, and which NUMA nodes they and network cards are near.
void probe_gpu_links(MachineFacts& facts, const std::string& root, std::chrono::milliseconds limit);
/// The NCCL that a rank would load, where there are GPUs.
void probe_nccl(MachineFacts& facts);

}  // namespace cohort::doctor
