// Looks at the host that this process is on: what `cohort doctor` shows of it, and whether a job would find there what
// it needs. Changes nothing. Files of the system are read below a root that tests choose. Programs that are asked for
// their version have a deadline. One thread.
#pragma once

#include "doctor/facts.h"
#include "launch/environment.h"

#include <chrono>
#include <string>
#include <vector>

namespace cohort::doctor {

LimitFacts look_at_limits();
/// `root`: the folder that has proc, sys and dev; empty: this system's.
MachineFacts look_at_machine(const std::string& root);
SoftwareFacts look_at_software(const launch::Environment& environment, std::chrono::milliseconds limit);
FolderFacts look_at_folder(const std::string& path);
std::vector<NetworkFacts> look_at_networks(std::string& error);
/// All of them at once, each until `limit`.
std::vector<NameFacts> look_up(const std::vector<std::string>& names, std::chrono::milliseconds limit);
/// Of those that change what a job does; nothing that might be a secret.
std::map<std::string, std::string> variables_that_matter(const launch::Environment& environment);

/// GPUs as the driver lists them, and what nvidia-smi says if it is there.
void look_at_gpus(MachineFacts& facts, const std::string& root, std::chrono::milliseconds limit);
/// Where there are GPUs: how they reach each other, and which NUMA nodes they and network cards are near.
void look_at_gpu_ways(MachineFacts& facts, const std::string& root, std::chrono::milliseconds limit);
/// The NCCL that a rank would load, where there are GPUs.
void look_at_nccl(MachineFacts& facts);

}  // namespace cohort::doctor
