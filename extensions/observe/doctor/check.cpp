#include "observe/doctor/check.h"

#include "base/result.h"

#include <algorithm>
#include <array>
#include <utility>

namespace cohort::doctor {
namespace {

constexpr Row kRows[] = {
    // Rows about the environment, with the effect on a job.
    {"launcher", "launcher", "the program would not know who it is, or would refuse to start"},
    {"batch", "batch script",
     "a program started in it without srun trains alone, on one core, and says so only in a line"},
    {"apart", "hosts apart", "each host trains a model of its own"},
    {"one-process", "GPUs, 1 process", "all GPUs but one are idle"},
    {"launchers", "launchers", "`cohort run` refuses to start a job of its own in each"},
    {"alone", "COHORT_ALONE", "every rank is a world of its own, but those of `cohort run`: nothing is distributed"},
    {"pretend", "fake hosts", "ranks of one host talk through the network, as on several"},
    {"master", "MASTER_ADDR", "ranks on other hosts look for rank 0 at themselves, and wait"},
    {"leftovers", "leftovers", "a program started by hand takes itself for a rank of a job that is gone"},
    {"network-choice", "COHORT_NETWORK", "ranks there have no address to listen at, and do not start"},
    {"interface", "interface name", "Gloo or NCCL do not start in programs that use torch.distributed"},
    {"proxy", "http proxy", "nothing: Cohort's connections do not use it"},
    // Reaching a host.
    {"start", "start", "no rank can be started there"},
    {"ssh-name", "ssh: name", "no rank can be started there"},
    {"ssh-reach", "ssh: reached", "no rank can be started there"},
    {"ssh-host-key", "ssh: host key", "no rank can be started there: nobody can answer ssh's question"},
    {"ssh-key-changed", "ssh: host key", "no rank can be started there"},
    {"ssh-login", "ssh: login", "no rank can be started there: nobody can type a password"},
    {"ssh-config", "ssh: config", "no rank can be started there"},
    {"shell-exits", "shell exits", "no rank can be started there"},
    {"shell-prints", "shell prints", "Cohort survives it; scp, rsync and some mpirun do not"},
    {"silent", "no sign of life", "no rank can be started there"},
    {"command", "cohort", "no rank can be started there"},
    {"version", "version", "such hosts cannot be in one job"},
    {"control", "way back", "its agent cannot report, so that the job does not start"},
    {"starter", "starter", "no rank can be started there"},
    {"lost", "host lost", "a job would have lost this host, and with it all its ranks"},
    // Names, and what runs.
    {"own-name", "own name", "programs that listen at their own name (Gloo, MASTER_ADDR) are reached by nobody"},
    {"names", "names", "Cohort needs no name there; programs with a name in MASTER_ADDR do"},
    {"build", "same build", "ranks may compute different bits, and differ in what they can do"},
    {"python", "Python", "Python programs do not start, or differ between hosts"},
    {"torch", "torch", "ranks with different versions of torch are refused"},
    {"mpi", "MPI", "programs that use MPI do not start over these hosts"},
    // Between hosts.
    {"reach", "reached", "ranks of the two hosts cannot talk: the job ends when they first try"},
    {"direction", "one direction", "it works only while the right side opens the connection"},
    {"large", "large packets", "the job starts, and hangs with the first large message"},
    {"network", "network", "its address is tried in vain; what takes the first that answers may take the wrong one"},
    {"speed", "speed", "gradients wait for this way: all ranks are as slow as the slowest"},
    {"clock", "clocks", "times of logs and traces cannot be compared; files look older or newer than they are"},
    // Resources of a host.
    {"cores", "cores", "ranks share cores, and each waits for the slowest"},
    {"quota", "CPU quota", "the kernel stops ranks for a part of each 0.1 s; all others wait meanwhile"},
    {"threads", "threads", "more threads than cores: each operation takes turns"},
    {"load", "load", "ranks share the cores with others, and all ranks are as slow as the slowest"},
    {"numa", "NUMA, SMT", "nothing; `--bind core` keeps a rank and its memory together"},
    {"memory", "memory", "a rank that needs more is killed by the kernel"},
    {"gpus", "GPUs", "programs that use them fail, or train on cores"},
    {"gpu-choice", "GPUs hidden", "programs see no GPU, and train on cores"},
    {"gpu-shared", "GPUs shared", "ranks that use GPUs share them, and collectives of their memory go without NCCL"},
    {"gpu-pairs", "GPU pairs", "what two GPUs send each other is staged through host memory, which is slow"},
    {"gpu-cards", "GPUs and cards", "what such a GPU sends between hosts crosses from one processor to another"},
    {"nccl", "NCCL", "collectives of GPU memory are staged through host memory, which is slow"},
    {"alike", "hosts alike", "all ranks are as slow as those of the slowest host"},
    {"open-files", "open files", "programs with many files, data loaders or ranks end with 'too many open files'"},
    {"processes", "processes", "ranks, their threads or data loaders cannot be started"},
    {"locked", "locked memory", "InfiniBand cannot be used: it wants memory that stays in place"},
    {"core-dumps", "core dumps", "nothing; off: a crash leaves no core file"},
    {"shm", "/dev/shm", "data loaders and NCCL, which keep data there, die of a bus error; Cohort does not use it"},
    // Files.
    {"folder", "working folder", "no rank can be started there"},
    {"same-folder", "same folder", "each host reads its own program and data, which may differ; outputs lie apart"},
    {"space", "free space", "logs and checkpoints cannot be written"},
};

}  // namespace

std::string_view level_name(Level level) {
  switch (level) {
    case Level::Ok: return "ok";
    case Level::Warning: return "warning";
    case Level::Failed: return "failed";
  }
  return "?";
}

std::span<const Row> rows() { return kRows; }

const Row& row(std::string_view id) {
  const auto found = std::find_if(std::begin(kRows), std::end(kRows), [id](const Row& each) { return each.id == id; });
  if (found == std::end(kRows)) raise(ErrorCode::Internal, "doctor: there is no row '{}'", id);
  return *found;
}

std::vector<Finding> judge(const Checkup& checkup) {
  std::vector<Finding> found;
  check_environment(checkup, found);
  check_starts(checkup, found);
  check_names(checkup, found);
  check_software(checkup, found);
  check_networks(checkup, found);
  check_machines(checkup, found);
  check_limits(checkup, found);
  check_folders(checkup, found);
  const auto place = [](const Finding& finding) { return &row(finding.row) - rows().data(); };
  std::stable_sort(found.begin(), found.end(),
                   [&place](const Finding& a, const Finding& b) { return place(a) < place(b); });
  return found;
}

void add(std::vector<Finding>& out, std::string row, Level level, const std::string& host, std::string found,
         std::string fix, std::string effect) {
  Finding finding{std::move(row), level, {}, {}, std::move(found), std::move(effect), {}};
  if (!host.empty()) finding.hosts.push_back(host);
  if (level != Level::Ok) finding.fix = std::move(fix);
  out.push_back(std::move(finding));
}

std::string size_text(std::int64_t bytes) {
  if (bytes < 0) return "unlimited";
  constexpr std::array kUnits = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return value < 10 && unit > 0 ? fmt::format("{:.1f} {}", value, kUnits[unit])
                                : fmt::format("{:.0f} {}", value, kUnits[unit]);
}

// Rows about files: the working folder of a job, on every host.

void check_folders(const Checkup& checkup, std::vector<Finding>& out) {
  for (const HostState& host : checkup.hosts) {
    if (!host.facts) continue;
    const FolderFacts& folder = host.facts->folder;
    if (!folder.error.empty()) {
      add(out, "folder", Level::Failed, host.name, folder.error,
          fmt::format("on {}: mount the file system that {} is in, or make a copy of the folder", host.name,
                      checkup.here));
      continue;
    }
    add(out, "folder", folder.writable ? Level::Ok : Level::Failed, host.name,
        fmt::format("{} ({}){}", folder.path, folder.file_system, folder.writable ? "" : " cannot be written to"),
        fmt::format("--run-dir with a folder that is yours, or on {}: chmod u+w {}", host.name, folder.path),
        "the run's folder cannot be made: the job does not start");
    const bool none = folder.free < 16 * kMiB, little = folder.free < 1024 * kMiB;
    add(out, "space",
        none     ? Level::Failed
        : little ? Level::Warning
                 : Level::Ok,
        host.name, size_text(folder.free),
        fmt::format("on {}: df -h {}; remove what is not needed, or --run-dir elsewhere", host.name, folder.path));
    if (host.same_folder) {
      add(out, "same-folder", *host.same_folder ? Level::Ok : Level::Warning, host.name,
          *host.same_folder ? fmt::format("a file made on {} is seen", checkup.here)
                            : fmt::format("a file made on {} in {} is not seen", checkup.here, folder.path),
          "work in a folder of a shared file system; or copy it: rsync -a . " + host.name + ":" + folder.path);
    }
  }
}

// Rows about starting hosts: whether the agent was started, and has connected.

void check_starts(const Checkup& checkup, std::vector<Finding>& out) {
  for (const HostState& host : checkup.hosts) {
    if (host.trouble.empty()) {
      const std::string_view way = host.here ? "directly" : launch::start_method_name(checkup.method);
      add(out, "start", Level::Ok, host.name, fmt::format("{} ({:.1f} s)", way, host.start_seconds));
    } else {
      add(out, host.trouble, Level::Failed, host.name, host.why, host.fix);
    }
    if (!host.printed.empty()) {
      add(out, "shell-prints", Level::Warning, host.name,
          fmt::format("a start-up file of the shell printed: {}", host.printed.substr(0, 100)),
          "in .bashrc, before what prints: case $- in *i*) ;; *) return;; esac");
    }
  }
}

}  // namespace cohort::doctor
