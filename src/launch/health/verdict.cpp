#include "launch/health/verdict.h"

#include <cohort/exit_status.h>

#include "base/parse.h"
#include "base/signals.h"
#include "launch/rank_report.h"
#include "telemetry/last_words.h"

#include <cxxabi.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <tuple>
#include <utility>

namespace cohort::launch {
namespace {

bool struck(const Ending& ending) { return ending.status.signal != 0 && ending.status.signal != SIGABRT; }

std::string indented(std::string_view rest) {
  std::string text;
  while (!rest.empty()) {
    const auto end = rest.find('\n');
    text += fmt::format("cohort:   > {}\n", rest.substr(0, end));
    if (end == std::string_view::npos) break;
    rest.remove_prefix(end + 1);
  }
  return text;
}

/// Returns the words before the stack (the log has the stack) and, for a crash, the first frames with names, which tell
/// most. Leaves out the line of an error's fields, since the error's text has them.
std::string essence(const std::string& words, bool logged) {
  if (!logged) return words;
  constexpr std::size_t kFrames = 3;
  const std::size_t thrown = words.find(status::kThrowStack), native = words.find(status::kNativeStack);
  const std::string_view all = words;
  std::string text;
  const auto take = [&text](std::string_view from, const auto& wanted) {
    while (!from.empty()) {
      const std::size_t end = std::min(from.find('\n'), from.size() - 1) + 1;
      if (wanted(from.substr(0, end))) text += from.substr(0, end);
      from.remove_prefix(end);
    }
  };
  take(all.substr(0, std::min(thrown, native)), [](std::string_view line) { return !line.starts_with("  code "); });
  std::size_t frames = 0;
  if (native != std::string_view::npos) {
    take(all.substr(native + status::kNativeStack.size()), [&frames](std::string_view line) {
      return line.find(" in ") != std::string_view::npos && ++frames <= kFrames;
    });
  }
  return text;
}

/// Returns stderr without the lines that the last words repeat.
std::string without(std::string_view words, std::string_view errors) {
  std::string text;
  while (!errors.empty()) {
    const std::size_t end = std::min(errors.find('\n'), errors.size() - 1) + 1;
    std::string_view line = errors.substr(0, end);
    errors.remove_prefix(end);
    std::string_view bare = line.substr(0, line.find_last_not_of('\n') + 1);
    constexpr std::string_view kWhat = "  what():  ";
    if (bare.starts_with(kWhat)) bare.remove_prefix(kWhat.size());
    const bool of_runtime = bare.starts_with("terminate called ");
    if (!of_runtime && (bare.empty() || words.find(bare) == std::string_view::npos)) text += line;
  }
  return text;
}

std::string_view last_line(std::string_view text) {
  while (text.ends_with('\n')) text.remove_suffix(1);
  const auto begin = text.rfind('\n');
  return begin == std::string_view::npos ? text : text.substr(begin + 1);
}

/// Returns whether the process ended by an uncaught C++ exception; its last words say so.
bool is_exception(const Ending& ending) { return ending.words.starts_with(status::kUncaught); }

}  // namespace

bool follows_another(const Ending& ending) {
  if (ending.status.success() || struck(ending)) return false;
  if (ending.cause.code >= 0) {
    const auto code = static_cast<ErrorCode>(ending.cause.code);
    return code == ErrorCode::PeerLost || code == ErrorCode::Aborted;
  }
  const std::string& text = ending.words.empty() ? ending.last_stderr : ending.words;
  constexpr std::string_view kOfGloo = "Connection closed by peer";
  constexpr std::string_view kOfSockets = "Connection reset by peer";
  return text.find(kOfGloo) != std::string::npos || text.find(kOfSockets) != std::string::npos;
}

bool asks_for_requeue(const Ending& ending) {
  return !ending.spared && ending.status.signal == 0 && ending.status.code == kRequeueStatus;
}

bool has_ended_well(const Ending& ending) {
  if (ending.spared) return true;
  if (ending.status.success() || asks_for_requeue(ending)) return true;
  if (!ending.asked) return false;
  // A signal sent after the grace is reported as such. (A shell gives its command's signal as an exit code.)
  const int signal = ending.status.signal != 0 ? ending.status.signal : ending.status.code - 128;
  return signal == SIGTERM || signal == SIGKILL;
}

std::optional<Ending> first_failure(const std::vector<Ending>& endings) {
  const auto order = [](const Ending& ending) {
    return std::tuple(!ending.before_stop, follows_another(ending), !struck(ending), ending.after_seconds, ending.role,
                      ending.rank);
  };
  std::optional<Ending> first;
  for (const Ending& ending : endings) {
    if (has_ended_well(ending)) continue;
    if (!first || order(ending) < order(*first)) first = ending;
  }
  return first;
}

std::string doing(const Ending& ending) {
  if (ending.role == Role::Worker || !ending.last.groups.empty()) return doing(ending.last);
  return fmt::format("running, in no world, as {}s are", to_string(ending.role));
}

std::string to_string(const PostMortem& post_mortem) {
  const Ending& first = post_mortem.first;
  const char* const strong = post_mortem.colour ? "\033[1;31m" : "";
  const char* const plain = post_mortem.colour ? "\033[0m" : "";
  std::string text;
  if (const std::vector<int>& missed = post_mortem.missed; !missed.empty()) {
    const bool one = missed.size() == 1;
    text += fmt::format(
        "cohort: {}rank{} {} had ended with 0 while {} went on{}: do all ranks take the same number of steps?\n",
        strong, one ? "" : "s", to_ranges(missed), first.name(), plain);
  }
  text += fmt::format("cohort: {}{} failed{}: {} (host {}, pid {}) after {:.1f} s\n", strong, first.name(), plain,
                      sys::to_string(first.status), first.host, first.pid, first.after_seconds);
  if (first.asked) text += "cohort:   it had been asked to end, since the workers were done\n";
  if (first.restarts > 0) {
    text += fmt::format("cohort:   it had been started again {} time{}; the first time it had failed by: {}\n",
                        first.restarts, first.restarts == 1 ? "" : "s", first.first_cause);
  }
  if (first.last.has_page) {
    const char* const verb = has_left(first.last) ? "had" : "was";
    text += fmt::format("cohort:   it {} {}{}\n", verb, doing(first), at_step(first.last));
  }
  // Shows each sentence once: a Python traceback is on stderr, a C++ runtime's message of an exception in the words.
  std::string words = essence(first.words, !post_mortem.log_folder.empty());
  if (!words.empty() && !is_exception(first) && first.last_stderr.find(last_line(words)) != std::string::npos)
    words = "";
  const std::string errors = words.empty() ? first.last_stderr : without(words, first.last_stderr);
  if (!errors.empty()) {
    text += "cohort:   the last lines of its stderr:\n" + indented(errors);
  } else if (words.empty()) {
    text += "cohort:   it wrote nothing to stderr\n";
  }
  if (!words.empty()) text += "cohort:   its own last words:\n" + indented(words);
  if (!post_mortem.missed.empty()) {
    text +=
        "cohort:   a DistributedSampler gives each rank as many; a loop over data that was split otherwise, or one "
        "that some ranks leave, does not\n";
  } else if (const std::string why = advice(first); !why.empty())
    text += fmt::format("cohort:   {}\n", why);
  const bool of_ranks = first.role == Role::Worker;
  const int others = post_mortem.world_size - (of_ranks ? 1 : 0) - post_mortem.ended_well - post_mortem.running;
  if (others > 0) {
    text += fmt::format("cohort:   {} {}rank{} ended as a result\n", others, of_ranks ? "other " : "",
                        others == 1 ? " was" : "s were");
  }
  if (post_mortem.running > 0) {
    text += fmt::format("cohort:   {} rank{} being told to end\n", post_mortem.running,
                        post_mortem.running == 1 ? " is" : "s are");
  }
  for (const std::string& line : post_mortem.others) text += fmt::format("cohort:   then, {}\n", line);
  if (!post_mortem.log_folder.empty()) {
    text += fmt::format("cohort:   full logs: {}\n", post_mortem.log_folder);
  }
  return text;
}

namespace {

/// Limit on text from another process, since the demangler recurses once per character at worst.
constexpr std::size_t kLongestName = 1024;

bool belongs_to_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '.';
}

std::string readable(const std::string& name) {
  struct Free {
    void operator()(char* text) const { std::free(text); }
  };
  int status = -1;
  const std::unique_ptr<char, Free> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status));
  return status == 0 && text ? std::string(text.get()) : name;
}

}  // namespace

std::string demangled(std::string_view text) {
  std::string out;
  std::size_t at = 0;
  while (at < text.size()) {
    if (!belongs_to_name(text[at])) {
      out += text[at++];
      continue;
    }
    std::size_t end = at;
    while (end < text.size() && belongs_to_name(text[end])) ++end;
    const std::string name(text.substr(at, end - at));
    out += name.starts_with("_Z") && name.size() <= kLongestName ? readable(name) : name;
    at = end;
  }
  return out;
}

namespace {

struct Sign {
  std::string_view text;  ///< text to find in the rank's last output
  std::string_view advice;
};

/// The first sign found counts, so specific signs precede general ones.
constexpr Sign kSigns[] = {
    {"No module named 'horovod",
     "`cohort run --as-horovod` gives programs Cohort's own horovod.torch; or `pip install extensions/horovod/package` "
     "in a clone of Cohort, or `import cohort.horovod.torch as hvd`"},
    {"No module named 'cohort.",
     "Cohort's package is there, and has no such module: Horovod's API is cohort.horovod.torch, cohort.tensorflow, "
     "cohort.keras and cohort.jax; cohort.ps.torch has parameters on servers"},
    {"No module named 'cohort",
     "the Python that runs the ranks lacks Cohort's package: in a clone `tools/install --python` builds it in one or "
     "two "
     "minutes after ./demo, and makes the Python of .venv, or the active one that has PyTorch, find it, under mpirun "
     "too; "
     "activate that one (`cohort run --dry-run` shows which Python runs). Elsewhere: `pip install` the wheel"},
    {"Unknown backend type cohort",
     "`import cohort` before init_process_group registers the backend \"cohort\" with torch, which finds it by itself "
     "only from 2.5 on, and where the package is installed"},
    {"No module named",
     "the Python that runs the ranks lacks this module: install it there, or activate the environment that has it "
     "before `cohort run` (`cohort run --dry-run` shows which Python it is)"},
    {"error while loading shared libraries",
     "add the folder of this library to LD_LIBRARY_PATH; `ldd PROGRAM` lists what is not found"},
    {"version `GLIBC", "the program or a library was built on a newer system than this one: build it here"},
    {"--local_rank",
     "scripts for the old launcher of torch take --local_rank; `cohort run` gives the same number as the variable "
     "LOCAL_RANK, as torchrun does"},
    {"--local-rank",
     "scripts for the old launcher of torch take --local-rank; `cohort run` gives the same number as the variable "
     "LOCAL_RANK, as torchrun does"},
    {"unable to open shared memory object",
     "DataLoader's workers share tensors through /dev/shm: is it full (`df /dev/shm`), or are there too few "
     "descriptors (`ulimit -n`)?"},
    {"DataLoader worker",
     "a process of its DataLoader died: num_workers=0 shows the error in the rank itself; if it was killed, there is "
     "too little memory or /dev/shm (`df /dev/shm`)"},
    {"CUDA out of memory",
     "the memory of the GPU is full: a smaller batch per rank, or fewer ranks per GPU (is each rank on its own, by "
     "LOCAL_RANK?)"},
    {"CUDA error", "errors of a GPU are reported late: CUDA_LAUNCH_BLOCKING=1 shows the call that caused it"},
    {"out of memory", "a smaller batch per rank, fewer ranks per host, or more memory"},
    {"std::bad_alloc",
     "no memory was to be had: a smaller batch per rank, fewer ranks per host, or a higher limit (`ulimit -v`)"},
    {"MemoryError",
     "no memory was to be had: a smaller batch per rank, fewer ranks per host, or a higher limit (`ulimit -v`)"},
    {"No space left on device", "make room there (`df -h`; `df -i` where there are many files), or write elsewhere"},
    {"Disk quota exceeded", "make room there (`quota -s`), or write elsewhere"},
    {"Resource temporarily unavailable",
     "where a process or thread was to be started, their limit is reached: of this user, with all that run on this "
     "host (`ulimit -u`), or of this control group (pids.max)"},
    {"can't start new thread",
     "the limit of processes and threads is reached: of this user, with all that run on this host (`ulimit -u`), or of "
     "this control group (pids.max)"},
    {"Too many open files", "raise the limit (`ulimit -n`) in the shell that starts `cohort run`"},
    {"Address already in use",
     "another process has this port: let the ranks take MASTER_ADDR and MASTER_PORT from their environment rather than "
     "one of their own"},
    {"Permission denied", "may this user read and write there, and is a program executable (`chmod +x`)?"},
    {"No such file or directory",
     "paths that do not begin with / are looked for from the folder in which `cohort run` was started"},
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
      return "a bug in native code, a full /dev/shm (see `df /dev/shm`), or a file that became shorter while it was "
             "mapped";
    case SIGFPE: return "an integer division by zero, or an overflow, in native code";
    case SIGILL:
      return "an instruction that this processor does not have: build for this machine, or without -march=native";
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
  // A kill from outside has nothing to do with the output before it.
  const bool killed = ending.status.signal == SIGKILL || ending.status.signal == SIGTERM;
  if (!killed) {
    if (const std::string_view found = by_words(ending); !found.empty()) return std::string(found);
  }
  if (ending.status.signal == SIGABRT && is_exception(ending)) return {};
  return std::string(ending.status.signal != 0 ? by_signal(ending) : by_code(ending.status.code));
}

Restarts::Decision Restarts::after(const Breakdown& breakdown, int world_size) {
  if (most_ == 0) return {};
  const bool soon = breakdown.after_seconds < kSoonSeconds;
  const bool same = last_ && *last_ == breakdown.cause;
  same_ = soon ? (same ? same_ + 1 : 1) : 0;
  last_ = soon ? std::optional(breakdown.cause) : std::nullopt;
  Decision decision;
  if (same_ >= kSameInARow) {
    decision.text = fmt::format("the same failure ({}) within {:g} s of the start {} times in a row; not started again",
                                breakdown.cause, kSoonSeconds, kSameInARow);
  } else if (done_ >= most_) {
    decision.text = fmt::format("failed after {} restart{} (--max-restarts)", done_, done_ == 1 ? "" : "s");
  } else {
    decision.again = true;
    decision.number = ++done_;
    decision.text = fmt::format("{}; starting all {} rank{} again ({} of {})", breakdown.text, world_size,
                                world_size == 1 ? "" : "s", done_, most_);
  }
  return decision;
}

namespace {

/// Returns "asked to end by SIGUSR1; all 4 ranks have saved and ended".
std::string requeue_reason(const JobEnd& end, std::ptrdiff_t ranks, int all) {
  int signal = 0;
  for (const Ending& ending : end.endings) signal = std::max(signal, static_cast<int>(ending.last.preempted_by));
  const std::string who = ranks == all ? ranks == 1 ? "the rank has" : fmt::format("all {} ranks have", ranks)
                                       : fmt::format("{} of {} ranks {}", ranks, all, ranks == 1 ? "has" : "have");
  if (signal == 0) return fmt::format("{} ended", who);
  return fmt::format("asked to end by {}; {} saved and ended", sys::signal_name(signal), who);
}

/// Returns the ranks that had ended with 0, if the first failure only follows from the loss of a peer, and no other
/// rank was lost. A rank that ended later than the failure counts if the error names that rank.
std::vector<int> missed_by(const Ending& failure, const std::vector<Ending>& endings) {
  std::vector<int> ranks;
  if (failure.role != Role::Worker || !follows_another(failure)) return ranks;
  for (const Ending& ending : endings) {
    if (ending.role != Role::Worker || !ending.status.success() || !ending.before_stop) continue;
    const bool named = failure.cause.code == static_cast<int>(ErrorCode::PeerLost) && failure.cause.peer == ending.rank;
    if (named || ending.after_seconds <= failure.after_seconds) ranks.push_back(ending.rank);
  }
  std::ranges::sort(ranks);
  return ranks;
}

}  // namespace

void JobEnd::excuse_elastic_ranks() {
  // If no rank reports the state (a plain program with Preemption), each rank that formed a world may have it.
  const bool said =
      std::ranges::any_of(endings, [](const Ending& one) { return one.role == Role::Worker && one.last.has_state; });
  for (Ending& one : endings) {
    if (one.role != Role::Worker || one.status.success() || asks_for_requeue(one)) continue;
    const bool lost = told_to_end && one.status.signal != 0 && !one.asked;
    one.spared = one.spared || lost ||
                 (one.asked && has_ended_well(one) && !(said ? one.last.has_state : one.last.formed_epoch >= 0));
  }
}

Verdict judge(const JobEnd& end) {
  Verdict verdict;
  verdict.status = end.stop_status.value_or(0);
  verdict.requeue = end.stop_status == kRequeueStatus;
  verdict.reason = end.start_failure.empty() ? end.stop_reason : end.start_failure;
  const auto failure = first_failure(end.endings);
  const int ranks = end.roles.workers;
  const auto of_ranks = [&end](auto condition) {
    return static_cast<int>(std::ranges::count_if(
        end.endings, [&](const Ending& ending) { return ending.role == Role::Worker && condition(ending); }));
  };
  const int good = of_ranks([](const Ending& ending) { return ending.status.success(); });
  const int saved = of_ranks(asks_for_requeue);
  const int left = of_ranks([](const Ending& ending) { return ending.spared; });  // in an elastic job
  const bool by_themselves = !end.stop_status || end.told_to_end;
  // If a server has lost its state, the ranks' saved state is no basis to go on from.
  if (by_themselves && saved > 0 && saved + good + left == ranks && !failure) {
    verdict.status = kRequeueStatus;
    verdict.requeue = true;
    verdict.reason = requeue_reason(end, saved, ranks - left);
    verdict.text = fmt::format("cohort: {}, after {:.1f} s; exit status {} asks for a requeue\n", verdict.reason,
                               end.seconds, kRequeueStatus);
  } else if (!end.start_failure.empty()) {
    verdict.text = "cohort: " + end.start_failure + "\n";
  } else if (!end.stop_status && failure) {
    verdict.status = failure->status.shell_status();
    PostMortem post_mortem;
    post_mortem.first = *failure;
    post_mortem.world_size = ranks - left;
    post_mortem.ended_well =
        of_ranks([](const Ending& ending) { return ending.before_stop && ending.status.success(); });
    post_mortem.missed = missed_by(*failure, end.endings);
    if (end.early) post_mortem.running = ranks - of_ranks([](const Ending&) { return true; });
    post_mortem.others = folded(end.doing_then, end.roles, end.roles.process_of(failure->role, failure->rank));
    post_mortem.log_folder = end.log_folder;
    post_mortem.colour = end.colour;
    verdict.text = to_string(post_mortem);
    const std::string cause = sys::to_string(failure->status);
    verdict.breakdown = Breakdown{fmt::format("{} on {} failed after {:.1f} s: {}", failure->name(), failure->host,
                                              failure->after_seconds, cause),
                                  cause, failure->after_seconds};
    verdict.post_mortem = std::move(post_mortem);
  } else if (!end.stop_status && (saved > 0 || of_ranks(has_ended_well) != ranks)) {
    verdict.status = 1;
    verdict.reason = saved > 0 ? "a rank ended before it had saved" : "the job ended without word from all ranks";
    verdict.text = "cohort: " + verdict.reason + "\n";
  } else if (end.stop_status && !end.quiet) {
    verdict.text = fmt::format("cohort: {}, after {:.1f} s{}\n", end.stop_reason.empty() ? "ended" : end.stop_reason,
                               end.seconds, end.log_folder.empty() ? "" : "; logs in " + end.log_folder);
    if (end.stuck) {
      verdict.breakdown = Breakdown{fmt::format("{}, after {:.1f} s", end.stop_reason, end.seconds),
                                    "the job did not go on", end.seconds};
    }
  }
  return verdict;
}

// (Workers of parameter servers need no world.)
std::string doubt_about(const JobEnd& end, const Verdict& verdict) {
  const int ranks = end.roles.workers;
  const bool formed = std::ranges::any_of(end.endings, [](const Ending& ending) {
    return ending.role == Role::Worker && (ending.last.worlds > 0 || !ending.last.groups.empty());
  });
  if (verdict.status != 0 || ranks < 2 || end.roles.servers > 0 || formed) return {};
  return fmt::format(
      "{0} ranks ended without forming a world of Cohort's: {0} independent runs? (init and init_process_group "
      "form one; worlds of other libraries are not seen)",
      ranks);
}

}  // namespace cohort::launch
