#include "launch/plan/host_environment.h"

#include <algorithm>
#include <array>
#include <string>

namespace cohort::launch {

bool belongs_to_host(std::string_view name) {
  constexpr std::array<std::string_view, 26> kNames = {"HOME",
                                                       "USER",
                                                       "LOGNAME",
                                                       "SHELL",
                                                       "SHLVL",
                                                       "PWD",
                                                       "OLDPWD",
                                                       "_",
                                                       "MAIL",
                                                       "HOST",
                                                       "HOSTNAME",
                                                       "TMPDIR",
                                                       "TMP",
                                                       "TEMP",
                                                       "DISPLAY",
                                                       "WAYLAND_DISPLAY",
                                                       "XAUTHORITY",
                                                       "DBUS_SESSION_BUS_ADDRESS",
                                                       "CUDA_VISIBLE_DEVICES",
                                                       "NVIDIA_VISIBLE_DEVICES",
                                                       "ROCR_VISIBLE_DEVICES",
                                                       "HIP_VISIBLE_DEVICES",
                                                       "ZE_AFFINITY_MASK",
                                                       "GPU_DEVICE_ORDINAL",
                                                       "SLURMD_NODENAME",
                                                       "SLURM_TOPOLOGY_ADDR"};
  if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) return true;
  return name.starts_with("SSH_") || name.starts_with("XDG_") || name.starts_with("TMUX") || name.starts_with("STY");
}

Environment environment_there(const Environment& travelled, const Environment& own) {
  Environment out = travelled;
  for (const std::string& assignment : own.assignments()) {
    const std::string name = assignment.substr(0, assignment.find('='));
    if (belongs_to_host(name) && !travelled.find(name)) out.set(assignment);
  }
  return out;
}

}  // namespace cohort::launch
