// How many GPUs this host lets a process use: their device files, without any driver's library. Pure reading.
#pragma once

#include <string>

namespace cohort::sys {

/// NVIDIA's (dev/nvidia0, ...); where there are none, AMD's (sys/class/kfd) below `root`. 0 where nothing can be read.
int gpus_here(const std::string& root = "/");

}  // namespace cohort::sys
