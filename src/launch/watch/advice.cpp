#include "launch/watch/advice.h"

#include <fmt/format.h>

#include <csignal>
#include <string_view>

namespace cohort::launch {
namespace {

struct Sign {
  std::string_view text;  ///< in what the rank said last
  std::string_view advice;
};

/// The first one that is found counts: what is more particular stands before what is more general.
constexpr Sign kSigns[] = {
    {"No module named 'horovod",
     "`cohort run --as-horovod` gives programs Cohort's own horovod.torch; or `pip install python/horovod` in a clone "
     "of "
     "Cohort, or `import cohort.torch as hvd`"},
    {"No module named",
     "the Python that runs the ranks lacks this module: install it there, or activate the environment "
     "that has it before `cohort run` (`cohort run --dry-run` shows which Python it is)"},
    {"error while loading shared libraries",
     "add the folder of this library to LD_LIBRARY_PATH; `ldd PROGRAM` lists "
     "what is not found"},
    {"version `GLIBC", "the program or a library was built on a newer system than this one: build it here"},
    {"--local_rank",
     "scripts for the old launcher of torch take --local_rank; `cohort run` gives the same number as the "
     "variable LOCAL_RANK, as torchrun does"},
    {"--local-rank",
     "scripts for the old launcher of torch take --local-rank; `cohort run` gives the same number as the "
     "variable LOCAL_RANK, as torchrun does"},
    {"unable to open shared memory object",
     "DataLoader's workers share tensors through /dev/shm: is it full (`df "
     "/dev/shm`), or are there too few descriptors (`ulimit -n`)?"},
    {"DataLoader worker",
     "a process of its DataLoader died: num_workers=0 shows the error in the rank itself; if it was "
     "killed, there is too little memory or /dev/shm (`df /dev/shm`)"},
    {"CUDA out of memory",
     "the memory of the GPU is full: a smaller batch per rank, or fewer ranks per GPU (is each "
     "rank on its own, by LOCAL_RANK?)"},
    {"CUDA error", "errors of a GPU are reported late: CUDA_LAUNCH_BLOCKING=1 shows the call that caused it"},
    {"out of memory", "a smaller batch per rank, fewer ranks per host, or more memory"},
    {"std::bad_alloc",
     "no memory was to be had: a smaller batch per rank, fewer ranks per host, or a higher limit "
     "(`ulimit -v`)"},
    {"MemoryError",
     "no memory was to be had: a smaller batch per rank, fewer ranks per host, or a higher limit (`ulimit "
     "-v`)"},
    {"No space left on device", "make room there (`df -h`; `df -i` where there are many files), or write elsewhere"},
    {"Disk quota exceeded", "make room there (`quota -s`), or write elsewhere"},
    {"Resource temporarily unavailable",
     "where a process or thread was to be started, their limit is reached: of this user, with all that run on this "
     "host "
     "(`ulimit -u`), or of this control group (pids.max)"},
    {"can't start new thread",
     "the limit of processes and threads is reached: of this user, with all that run on this host (`ulimit -u`), or of "
     "this control group (pids.max)"},
    {"Too many open files", "raise the limit (`ulimit -n`) in the shell that starts `cohort run`"},
    {"Address already in use",
     "another process has this port: let the ranks take MASTER_ADDR and MASTER_PORT from their "
     "environment rather than one of their own"},
    {"Permission denied", "may this user read and write there, and is a program executable (`chmod +x`)?"},
    {"No such file or directory",
     "paths that do not begin with / are looked for from the folder in which `cohort run` "
     "was started"},
};

std::string_view by_words(const Ending& ending) {
  for (const Sign& sign : kSigns) {
    if (ending.words.find(sign.text) != std::string::npos) return sign.advice;
    if (ending.last_stderr.find(sign.text) != std::string::npos) return sign.advice;
  }
  return {};
}

std::string_view by_signal(const Ending& ending) {
  switch (ending.status.signal) {
    case SIGKILL:
      return ending.out_of_memory ? "the kernel reports an out-of-memory kill at that time: use a smaller batch, fewer "
                                    "ranks, or more memory"
                                  : "somebody sent it, or the kernel was out of memory (see `dmesg`)";
    case SIGSEGV: return "a bug in native code: the stack, which is at the end of its log, names the function";
    case SIGBUS:
      return "a bug in native code, a full /dev/shm (see `df /dev/shm`), or a file that became shorter while "
             "it was mapped";
    case SIGFPE: return "an integer division by zero, or an overflow, in native code";
    case SIGILL:
      return "an instruction that this processor does not have: build for this machine, or without "
             "-march=native";
    case SIGABRT: return "usually an uncaught C++ exception or a failed assertion: see the lines above";
    case SIGSYS: return "a system call that a sandbox (seccomp, a container's profile) does not allow";
    case SIGTRAP: return "a breakpoint without a debugger";
    case SIGPIPE: return "it wrote to a pipe or socket that nobody reads any more";
    case SIGXCPU: return "the limit of processor time (ulimit -t)";
    case SIGXFSZ: return "the limit of file size (ulimit -f)";
    case SIGTERM:
    case SIGINT:
    case SIGHUP: return "somebody sent it to this rank: a batch system that ends the job, or `kill`";
    case SIGALRM: return "a timer of the program's own (alarm) that it has no handler for";
    case SIGUSR1:
    case SIGUSR2:
      return "a batch system sends it before the time is over (Slurm's --signal); the program has no handler";
    default: return {};
  }
}

std::string_view by_code(int code) {
  switch (code) {
    case 126: return "a shell's way to say: it cannot be executed (`chmod +x`? another processor's?)";
    case 127: return "a shell's way to say: command not found";
    case 128 + SIGKILL:
    case 128 + SIGSEGV:
    case 128 + SIGABRT:
    case 128 + SIGTERM: return "a shell's way to say that a command was killed, by signal (code - 128)";
    default: return {};
  }
}

}  // namespace

std::string advice(const Ending& ending) {
  if (ending.cause.code == static_cast<int>(ErrorCode::PeerLost) && ending.cause.peer >= 0)
    return fmt::format("it had lost rank {}: how that one ended, or the network in between, is the cause",
                       ending.cause.peer);
  // A kill from outside has nothing to do with what was written before.
  const bool killed = ending.status.signal == SIGKILL || ending.status.signal == SIGTERM;
  if (!killed) {
    if (const std::string_view found = by_words(ending); !found.empty()) return std::string(found);
  }
  if (ending.status.signal == SIGABRT && is_exception(ending)) return {};
  return std::string(ending.status.signal != 0 ? by_signal(ending) : by_code(ending.status.code));
}

}  // namespace cohort::launch
