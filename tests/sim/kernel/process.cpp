// Processes: started by fork and execve, ended, waited for, signalled.
#include "kernel/kernel.h"

#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace sim {

const Program* program_of(const std::string& path);

namespace {

ssize_t write_cookie(void* cookie, const char* bytes, std::size_t size, int fd) {
  auto* const process = static_cast<Process*>(cookie);
  Slot* const found = process->descriptors.find(fd);
  // Never waits: the C library holds the stream's lock.
  if (found != nullptr) (void)found->file->write(bytes, size, 1 << 30);
  return static_cast<ssize_t>(size);
}

void open_streams(Process& process) {
  cookie_io_functions_t out{}, err{};
  out.write = [](void* cookie, const char* bytes, std::size_t size) { return write_cookie(cookie, bytes, size, 1); };
  err.write = [](void* cookie, const char* bytes, std::size_t size) { return write_cookie(cookie, bytes, size, 2); };
  process.out = fopencookie(&process, "w", out);
  process.err = fopencookie(&process, "w", err);
  std::setvbuf(process.err, nullptr, _IONBF, 0);
}

void set_environment(Process& process, std::vector<std::string> environment) {
  process.environment = std::move(environment);
  process.environment_pointers.clear();
  for (const std::string& one : process.environment) process.environment_pointers.push_back(::strdup(one.c_str()));
  process.environment_pointers.push_back(nullptr);
}

struct Start {
  char* image;
  const Program* program;
  std::vector<std::string> arguments;
};

void* run_program(void* value) {
  auto* const start = static_cast<Start*>(value);
  std::vector<char*> words;
  for (std::string& word : start->arguments) words.push_back(word.data());
  words.push_back(nullptr);
  run_constructors(start->image);
  auto* const main = reinterpret_cast<int (*)(int, char**)>(
      in_image(start->image, reinterpret_cast<const void*>(start->program->main)));
  std::exit(main(static_cast<int>(words.size()) - 1, words.data()));
}

void reparent(Process& child) {
  pid_t parent = child.parent;
  while (Process* const above = find(parent)) {
    if (!above->ended && above->subreaper) break;
    parent = above->parent;
  }
  child.parent = find(parent) != nullptr ? parent : child.host->init;
  Process& taken = *find(child.parent);
  if (!child.ended) return;
  taken.child_ended.wake_all();
  if (taken.pid == child.host->init) child.reaped = true;
  send_signal(taken, SIGCHLD);
}

bool is_handler(const struct sigaction& action) { return action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN; }

struct sigaction action_of(const Process& process, int number) {
  const auto found = process.actions.find(number);
  const struct sigaction standard {};
  return found == process.actions.end() ? standard : found->second;
}

void default_action(Process& process, int number) {
  switch (number) {
    case SIGCHLD:
    case SIGURG:
    case SIGWINCH:
    case SIGCONT: return;
    case SIGSTOP:
    case SIGTSTP:
    case SIGTTIN:
    case SIGTTOU: process.stopped = true; return;
    default: end_process(process, number);
  }
}

}  // namespace

Process* find(pid_t pid) {
  const auto found = state->processes.find(pid);
  return found == state->processes.end() || found->second->reaped ? nullptr : found->second.get();
}

Process& new_process(Host& host, pid_t parent) {
  auto made = std::make_unique<Process>();
  Process& process = *made;
  process.pid = state->next_pid++;
  process.parent = parent;
  process.group = process.pid;
  process.host = &host;
  process.start_ticks = static_cast<std::uint64_t>(state->now / 10'000'000) + 1000;
  sigemptyset(&process.pending);
  state->processes[process.pid] = std::move(made);
  host.processes.push_back(&process);
  return process;
}

void execute(Process& process, const std::string& path, std::vector<std::string> arguments,
             std::vector<std::string> environment) {
  const Program* const program = program_of(path);
  process.path = path;
  process.arguments = arguments;
  set_environment(process, std::move(environment));
  for (const int fd : process.descriptors.numbers()) {
    if (process.descriptors.find(fd)->close_on_exec) process.descriptors.erase(fd);
  }
  std::erase_if(process.actions, [](const auto& action) { return is_handler(action.second); });
  drop_image(process.image);
  process.image = make_image();
  open_streams(process);
  if (state->loaded == &process) state->loaded = nullptr;
  for (const auto& thread : process.threads) thread->gone = true;
  Thread& thread = add_thread(process);
  thread.tid = process.pid;
  thread.routine = run_program;
  thread.argument = new Start{process.image, program, std::move(arguments)};
  // A program of the user's loads its libraries first.
  constexpr Nanoseconds kExecCost = 1 * kMillisecond;
  const auto loading = static_cast<std::uint64_t>(program->is_users ? state->options.longest_start : 0);
  start_thread(thread, state->now + kExecCost + static_cast<Nanoseconds>(random_below(loading)));
  std::string words;
  for (const std::string& word : process.arguments) words += " " + word;
  if (!words.starts_with(" sh ") && !words.starts_with(" /simulated/discover"))
    note("pid " + std::to_string(process.pid) + " on " + process.host->name + " runs" + words.substr(0, 120));
}

void end_process(Process& process, int wait_status) {
  if (process.ended) return;
  if (!process.path.ends_with("/discover"))
    note("pid " + std::to_string(process.pid) + " on " + process.host->name + " ends, status " +
         std::to_string(wait_status));
  process.ended = true;
  process.stopped = false;
  process.wait_status = wait_status;
  for (const auto& thread : process.threads) thread->gone = true;
  drop_image(std::exchange(process.image, nullptr));
  close_all(process);
  for (const auto& [pid, other] : state->processes) {
    if (other->parent != process.pid || other->reaped) continue;
    if (!other->ended && other->death_signal != 0) send_signal(*other, other->death_signal);
    reparent(*other);
  }
  for (const auto& watcher : process.watchers) {
    if (const FilePtr file = watcher.lock()) file->changed();
  }
  Process* const parent = find(process.parent);
  if (parent == nullptr || parent->pid == process.host->init || action_of(*parent, SIGCHLD).sa_handler == SIG_IGN)
    process.reaped = true;
  if (parent != nullptr) {
    parent->child_ended.wake_all();
    send_signal(*parent, SIGCHLD);
    if (parent->passive) {
      process.reaped = true;
      end_process(*parent, wait_status);
    }
  }
  if (&process == state->root) {
    // Processes that are left some time later are a finding.
    schedule(state->now + state->options.after_end, [] {
      const std::string left = living_processes();
      finish(left.empty() ? "" : "processes are left after the end:" + left);
    });
  }
}

bool signals_pending(const Process& process, const sigset_t& set) {
  for (int number = 1; number < NSIG; ++number) {
    if (sigismember(&process.pending, number) == 1 && sigismember(&set, number) == 1) return true;
  }
  return false;
}

int take_signal(Process& process, const sigset_t& set) {
  for (int number = 1; number < NSIG; ++number) {
    if (sigismember(&process.pending, number) != 1 || sigismember(&set, number) != 1) continue;
    sigdelset(&process.pending, number);
    return number;
  }
  return 0;
}

void send_signal(Process& process, int number) {
  if (process.ended || number == 0 || process.pid == process.host->init || !process.host->alive) return;
  if (number == SIGKILL) return end_process(process, SIGKILL);
  if (number == SIGCONT && process.stopped) {
    process.stopped = false;
    for (const auto& [thread, wait] : std::exchange(process.deferred, {})) wake(*thread, wait, Woke::Ready, state->now);
  }
  if (number == SIGSTOP) {
    process.stopped = true;
    return;
  }
  if (process.passive) {  // a guard passes signals on
    for (const auto& [pid, child] : state->processes) {
      if (child->parent == process.pid && !child->ended && number != SIGCHLD && number != SIGCONT)
        return send_signal(*child, number == SIGUSR1 || number == SIGUSR2 ? number : SIGTERM);
    }
    return;
  }
  const struct sigaction action = action_of(process, number);
  Thread* taker = nullptr;
  for (const auto& thread : process.threads) {
    if (!thread->gone && sigismember(&thread->blocked, number) == 0 && taker == nullptr) taker = thread.get();
  }
  if (taker != nullptr && action.sa_handler == SIG_IGN) return;
  if (taker != nullptr && action.sa_handler == SIG_DFL) return default_action(process, number);
  sigaddset(&process.pending, number);
  for (File* const file : process.signal_files) file->changed();
  if (taker != nullptr && taker->waiting && taker->interruptible) wake(*taker, taker->waits, Woke::Signal, state->now);
}

bool run_handlers() {
  Thread& thread = *self;
  Process& process = *thread.process;
  bool restart = true;
  for (int number = 1; number < NSIG; ++number) {
    if (sigismember(&process.pending, number) != 1 || sigismember(&thread.blocked, number) == 1) continue;
    sigdelset(&process.pending, number);
    const struct sigaction action = action_of(process, number);
    if (action.sa_handler == SIG_IGN) continue;
    if (action.sa_handler == SIG_DFL) {
      default_action(process, number);
      if (process.ended) end_thread();
      continue;
    }
    const sigset_t before = thread.blocked;
    sigaddset(&thread.blocked, number);
    if ((action.sa_flags & SA_RESTART) == 0) restart = false;
    siginfo_t info{};
    info.si_signo = number;
    if ((action.sa_flags & SA_SIGINFO) != 0)
      action.sa_sigaction(number, &info, nullptr);
    else
      action.sa_handler(number);
    thread.blocked = before;
  }
  return restart;
}

namespace {

[[noreturn]] void jump(const std::uint64_t* registers, std::int64_t value) {
  __asm__ volatile(
      "movq 0(%0), %%rbx\n movq 8(%0), %%rbp\n movq 16(%0), %%r12\n movq 24(%0), %%r13\n movq 32(%0), %%r14\n"
      "movq 40(%0), %%r15\n movq 48(%0), %%rsp\n movq 56(%0), %%rdx\n movq %1, %%rax\n jmp *%%rdx\n"
      :
      : "D"(registers), "c"(value)
      : "memory");
  __builtin_unreachable();
}

/// Returns from the parent's call of fork.
[[noreturn]] void return_to_parent(std::int64_t value) {
  // Kept until the next time: this frame is left without destructors.
  static std::unique_ptr<ForkPoint> point;
  point = std::move(self->fork);
  self->process = point->parent;
  put_globals(point->parent->image, point->globals);
  state->loaded = point->parent;
  std::memcpy(reinterpret_cast<char*>(point->registers[6]), point->stack.data(), point->stack.size());
  jump(point->registers, value);
}

}  // namespace

void settle_fork() {
  Thread& thread = *self;
  Process& child = *thread.process;
  Process& parent = *thread.fork->parent;
  thread.fork.reset();
  std::fflush(parent.out);
  for (auto& owned : parent.threads) {
    if (owned.get() == &thread) {
      child.threads.push_back(std::move(owned));
      owned = std::make_unique<Thread>();
      owned->process = &parent;
      owned->gone = true;
    }
  }
  thread.tid = child.pid;
  set_environment(child, parent.environment);
  open_streams(child);
  parent.passive = true;
  child.image = std::exchange(parent.image, nullptr);
  close_all(parent);
  state->loaded = &child;
  environ = child.environment_pointers.data();
  stdout = child.out;
  stderr = child.err;
}

}  // namespace sim

using namespace sim;

extern "C" __attribute__((visibility("default"), used)) int simulated_fork(std::uint64_t* registers) {
  Process* const parent = here();
  if (parent == nullptr) return REAL(fork)();
  Process& child = new_process(*parent->host, parent->pid);
  child.group = parent->group;
  child.path = parent->path;
  child.arguments = parent->arguments;
  child.folder = parent->folder;
  child.descriptors = parent->descriptors;
  child.actions = parent->actions;
  child.environment = parent->environment;
  auto point = std::make_unique<ForkPoint>();
  std::memcpy(point->registers, registers, sizeof point->registers);
  auto* const from = reinterpret_cast<char*>(registers[6]);
  point->stack.assign(from, static_cast<std::size_t>(self->stack_top - from));
  point->globals = keep_globals(parent->image);
  point->parent = parent;
  self->fork = std::move(point);
  self->process = &child;
  return 0;
}

__asm__(
    ".globl fork\n.type fork,@function\nfork:\n"
    "  movq (%rsp), %rdx\n  leaq 8(%rsp), %rcx\n  subq $72, %rsp\n"
    "  movq %rbx, 0(%rsp)\n  movq %rbp, 8(%rsp)\n  movq %r12, 16(%rsp)\n  movq %r13, 24(%rsp)\n"
    "  movq %r14, 32(%rsp)\n  movq %r15, 40(%rsp)\n  movq %rcx, 48(%rsp)\n  movq %rdx, 56(%rsp)\n"
    "  movq %rsp, %rdi\n  call simulated_fork@PLT\n  addq $72, %rsp\n  ret\n.size fork, .-fork\n");

CALL(int, execve, const char* path, char* const* words, char* const* variables) {
  Process* const process = here();
  if (process == nullptr) return REAL(execve)(path, words, variables);
  std::string program = path;
  if (program == "/proc/self/exe") program = process->path;
  if (program_of(program) == nullptr) return failed(ENOENT);
  std::vector<std::string> arguments, environment;
  for (; *words != nullptr; ++words) arguments.emplace_back(*words);
  for (; *variables != nullptr; ++variables) environment.emplace_back(*variables);
  execute(*process, program, std::move(arguments), std::move(environment));
  if (self->fork) return_to_parent(process->pid);
  end_thread();
}

CALL(int, execv, const char* path, char* const* words) {
  if (here() == nullptr) return REAL(execv)(path, words);
  return simulated_execve(path, words, environ);
}

CALL(void, _exit, int status) {
  Process* const process = here();
  if (process == nullptr) REAL(_exit)(status);
  end_process(*process, (status & 0xff) << 8);
  if (self->fork) return_to_parent(process->pid);
  end_thread();
}

CALL(void, exit, int status) {
  Process* const process = here();
  if (process == nullptr) REAL(exit)(status);
  while (!process->at_exit.empty()) {
    const auto [function, argument] = process->at_exit.back();
    process->at_exit.pop_back();
    function(status, argument);
  }
  std::fflush(process->out);
  simulated__exit(status);
}

CALL(int, on_exit, void (*function)(int, void*), void* argument) {
  if (here() == nullptr) return REAL(on_exit)(function, argument);
  here()->at_exit.emplace_back(function, argument);
  return 0;
}

CALL(void, abort) {
  Process* const process = here();
  if (process == nullptr) REAL(abort)();
  const auto found = process->actions.find(SIGABRT);
  siginfo_t info{};
  info.si_signo = SIGABRT;
  if (found != process->actions.end() && (found->second.sa_flags & SA_SIGINFO) != 0) {
    const auto handler = found->second.sa_sigaction;
    process->actions.erase(found);
    handler(SIGABRT, &info, nullptr);
  }
  std::fflush(process->out);
  end_process(*process, SIGABRT);
  end_thread();
}

CALL(int, __register_atfork, void (*)(), void (*)(), void (*)(), void*) { return 0; }

CALL(pid_t, getpid) { return here() != nullptr ? here()->pid : REAL(getpid)(); }
CALL(pid_t, getppid) { return here() != nullptr ? here()->parent : REAL(getppid)(); }
CALL(pid_t, gettid) { return here() != nullptr ? self->tid : REAL(gettid)(); }
CALL(pid_t, getpgrp) { return here() != nullptr ? here()->group : REAL(getpgrp)(); }
CALL(pid_t, getpgid, pid_t pid) {
  if (here() == nullptr) return REAL(getpgid)(pid);
  Process* const process = pid == 0 ? here() : find(pid);
  return process == nullptr ? failed(ESRCH) : process->group;
}
CALL(int, setpgid, pid_t pid, pid_t group) {
  if (here() == nullptr) return REAL(setpgid)(pid, group);
  Process* const process = pid == 0 ? here() : find(pid);
  if (process == nullptr) return failed(ESRCH);
  process->group = group == 0 ? process->pid : group;
  return 0;
}
CALL(pid_t, setsid) {
  if (here() == nullptr) return REAL(setsid)();
  return here()->group = here()->pid;
}

CALL(int, prctl, int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d) {
  Process* const process = here();
  if (process == nullptr) return static_cast<int>(REAL(syscall)(SYS_prctl, option, a, b, c, d));
  if (option == PR_SET_PDEATHSIG) process->death_signal = static_cast<int>(a);
  if (option == PR_SET_CHILD_SUBREAPER) process->subreaper = a != 0;
  return 0;
}

CALL(int, kill, pid_t pid, int number) {
  Process* const process = here();
  if (process == nullptr) return REAL(kill)(pid, number);
  charge(kCallCost);
  std::vector<Process*> meant;
  for (Process* const other : process->host->processes) {
    if (other->reaped) continue;
    if (pid > 0 ? other->pid == pid : !other->ended && other->group == (pid == 0 ? process->group : -pid))
      meant.push_back(other);
  }
  if (meant.empty()) return failed(ESRCH);
  for (Process* const other : meant) send_signal(*other, number);
  if (process->ended) end_thread();
  run_handlers();
  return 0;
}

CALL(int, raise, int number) {
  if (here() == nullptr) return REAL(raise)(number);
  return simulated_kill(here()->pid, number);
}

CALL(int, pthread_kill, pthread_t thread, int number) {
  if (here() == nullptr) return REAL(pthread_kill)(thread, number);
  send_signal(*here(), number);
  if (here()->ended) end_thread();
  return 0;
}

namespace {

pid_t wait_for(int kind, pid_t pid, int options, bool reap, int* wait_status, const char* where) {
  Process& process = *here();
  while (true) {
    bool any = false;
    for (Process* const child : process.host->processes) {
      if (child->parent != process.pid || child->reaped) continue;
      if (kind == P_PID && pid > 0 && child->pid != pid) continue;
      if (kind == P_PGID && child->group != pid) continue;
      any = true;
      if (!child->ended) continue;
      if (reap) child->reaped = true;
      *wait_status = child->wait_status;
      return child->pid;
    }
    if (!any) return failed(ECHILD);
    if ((options & WNOHANG) != 0) return 0;
    process.child_ended.add(*self);
    if (block(where, kNever, true) == Woke::Signal && !run_handlers()) return failed(EINTR);
  }
}

}  // namespace

CALL(pid_t, waitpid, pid_t pid, int* wait_status, int options) {
  if (here() == nullptr) return REAL(waitpid)(pid, wait_status, options);
  charge(kCallCost);
  int status = 0;
  const pid_t ended = pid > 0    ? wait_for(P_PID, pid, options, true, &status, "waitpid")
                      : pid < -1 ? wait_for(P_PGID, -pid, options, true, &status, "waitpid")
                                 : wait_for(P_ALL, 0, options, true, &status, "waitpid");
  if (ended > 0 && wait_status != nullptr) *wait_status = status;
  return ended;
}

CALL(int, waitid, idtype_t kind, id_t id, siginfo_t* info, int options) {
  if (here() == nullptr) return REAL(waitid)(kind, id, info, options);
  charge(kCallCost);
  int status = 0;
  const pid_t ended =
      wait_for(static_cast<int>(kind), static_cast<pid_t>(id), options, (options & WNOWAIT) == 0, &status, "waitid");
  if (ended < 0) return -1;
  if (info == nullptr) return 0;
  std::memset(info, 0, sizeof *info);
  if (ended == 0) return 0;
  info->si_pid = ended;
  info->si_signo = SIGCHLD;
  const bool killed = (status & 0x7f) != 0;
  info->si_code = killed ? CLD_KILLED : CLD_EXITED;
  info->si_status = killed ? status & 0x7f : status >> 8 & 0xff;
  return 0;
}

CALL(int, sigaction, int number, const struct sigaction* now, struct sigaction* before) {
  Process* const process = here();
  if (process == nullptr) return REAL(sigaction)(number, now, before);
  if (number < 1 || number >= NSIG || number == 32 || number == 33) return failed(EINVAL);
  if (before != nullptr) {
    *before = action_of(*process, number);
  }
  if (now == nullptr) return 0;
  if (number == SIGKILL || number == SIGSTOP) return failed(EINVAL);
  process->actions[number] = *now;
  if (!is_handler(*now) && now->sa_handler == SIG_IGN) sigdelset(&process->pending, number);
  return 0;
}

CALL(sighandler_t, signal, int number, sighandler_t handler) {
  if (here() == nullptr) return REAL(signal)(number, handler);
  struct sigaction now {
  }, before{};
  now.sa_handler = handler;
  now.sa_flags = SA_RESTART;
  if (simulated_sigaction(number, &now, &before) != 0) return SIG_ERR;
  return before.sa_handler;
}

CALL(int, pthread_sigmask, int how, const sigset_t* set, sigset_t* before) {
  if (here() == nullptr) return REAL(pthread_sigmask)(how, set, before);
  if (before != nullptr) *before = self->blocked;
  if (set == nullptr) return 0;
  for (int number = 1; number < NSIG; ++number) {
    const bool in = sigismember(set, number) == 1;
    if (how == SIG_SETMASK ? in : how == SIG_BLOCK && in)
      sigaddset(&self->blocked, number);
    else if (how == SIG_SETMASK || (how == SIG_UNBLOCK && in))
      sigdelset(&self->blocked, number);
  }
  if (!self->fork) run_handlers();
  return 0;
}

CALL(int, sigprocmask, int how, const sigset_t* set, sigset_t* before) {
  if (here() == nullptr) return REAL(sigprocmask)(how, set, before);
  return simulated_pthread_sigmask(how, set, before);
}

CALL(int, sigpending, sigset_t* set) {
  if (here() == nullptr) return REAL(sigpending)(set);
  *set = here()->pending;
  return 0;
}

CALL(int, pause) {
  if (here() == nullptr) return REAL(pause)();
  while (block("pause", kNever, true) != Woke::Signal) {
  }
  run_handlers();
  return failed(EINTR);
}

CALL(int, setenv, const char* name, const char* value, int overwrite) {
  Process* const process = here();
  if (process == nullptr) return REAL(setenv)(name, value, overwrite);
  const std::string head = std::string(name) + "=";
  auto all = process->environment;
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const std::string& one) { return one.starts_with(head); });
  if (found != all.end() && overwrite == 0) return 0;
  if (found != all.end())
    *found = head + value;
  else
    all.push_back(head + value);
  set_environment(*process, std::move(all));
  environ = process->environment_pointers.data();
  return 0;
}

CALL(int, unsetenv, const char* name) {
  Process* const process = here();
  if (process == nullptr) return REAL(unsetenv)(name);
  const std::string head = std::string(name) + "=";
  auto all = process->environment;
  std::erase_if(all, [&](const std::string& one) { return one.starts_with(head); });
  set_environment(*process, std::move(all));
  environ = process->environment_pointers.data();
  return 0;
}

CALL(int, gethostname, char* name, std::size_t size) {
  if (here() == nullptr) return REAL(gethostname)(name, size);
  std::snprintf(name, size, "%s", here()->host->name.c_str());
  return 0;
}

CALL(int, uname, struct utsname* about) {
  const int result = REAL(uname)(about);
  if (here() != nullptr) std::snprintf(about->nodename, sizeof about->nodename, "%s", here()->host->name.c_str());
  return result;
}

CALL(int, sched_getaffinity, pid_t pid, std::size_t size, cpu_set_t* set) {
  if (here() == nullptr) return REAL(sched_getaffinity)(pid, size, set);
  std::memset(set, 0, size);
  for (int core = 0; core < here()->host->cores; ++core) CPU_SET_S(static_cast<std::size_t>(core), size, set);
  return 0;
}
CALL(int, sched_setaffinity, pid_t pid, std::size_t size, const cpu_set_t* set) {
  return here() == nullptr ? REAL(sched_setaffinity)(pid, size, set) : 0;
}
CALL(int, setrlimit, __rlimit_resource_t what, const struct rlimit* limit) {
  return here() == nullptr ? REAL(setrlimit)(what, limit) : 0;
}
CALL(int, setpriority, __priority_which_t which, id_t who, int value) {
  return here() == nullptr ? REAL(setpriority)(which, who, value) : 0;
}

namespace sim {

int run_on_host(const std::string& name, const std::vector<std::string>& arguments) {
  Process& process = *here();
  const auto found = state->host_of.find(name);
  Host* const host = found == state->host_of.end() ? nullptr : found->second;
  const auto is_cut = [](Host* from, Host* to) { return state->cut.contains({from, to}); };
  if (host == nullptr || !host->alive || is_cut(process.host, host) || is_cut(host, process.host)) {
    std::fprintf(process.err, "ssh: connect to host %s port 22: Connection timed out\n", name.c_str());
    return 255;
  }
  Process& there = new_process(*host, host->init);
  there.folder = process.folder;
  for (const int fd : {0, 1, 2}) there.descriptors.set(fd, *process.descriptors.find(fd));
  std::vector<std::string> environment;
  for (const std::string& one : process.environment) {
    if (one.starts_with("HOME=") || one.starts_with("PATH=") || one.starts_with("TMPDIR=")) environment.push_back(one);
  }
  execute(there, arguments.front(), arguments, environment);
  there.reaped = false;
  const FilePtr watch = process_file(there);
  while (!there.ended) {
    watch->waiters.add(*self);
    if (block("run_on_host", kNever, true) == Woke::Signal) run_handlers();
  }
  const int status = there.wait_status;
  return (status & 0x7f) != 0 ? 255 : status >> 8 & 0xff;
}

}  // namespace sim
