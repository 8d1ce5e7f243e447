// Time, turns and the world: what runs next, and when.
#include "kernel/kernel.h"

#include <fcntl.h>
#include <malloc.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

namespace sim {

State* state = nullptr;
thread_local Thread* self = nullptr;

namespace {

std::vector<Program> programs;
std::string* printed = nullptr;

}  // namespace

void WaitQueue::add(Thread& thread) {
  if (!entries_.empty() && entries_.back() == std::pair(&thread, thread.waits)) return;
  if (entries_.size() >= 32)
    std::erase_if(entries_, [](const auto& entry) { return entry.first->waits != entry.second || entry.first->gone; });
  entries_.emplace_back(&thread, thread.waits);
}

void WaitQueue::wake_one() {
  while (!entries_.empty()) {
    const auto [thread, wait] = entries_.front();
    entries_.erase(entries_.begin());
    if (thread->gone || thread->waits != wait) continue;
    return wake(*thread, wait, Woke::Ready, state->now);
  }
}

void WaitQueue::wake_all() {
  auto entries = std::exchange(entries_, {});
  for (const auto& [thread, wait] : entries) {
    if (!thread->gone && thread->waits == wait) wake(*thread, wait, Woke::Ready, state->now);
  }
}

std::uint64_t random_below(std::uint64_t bound) { return bound == 0 ? 0 : state->random() % bound; }

void note(std::string text) {
  state->recent.push_back(std::to_string(state->now / 1000) + " us  " + std::move(text));
  if (state->recent.size() > 60) state->recent.pop_front();
}

void finish(std::string problem) {
  if (state->problem.empty()) state->problem = std::move(problem);
  wake(state->controller, state->controller.waits, Woke::Ready, state->now);
}

void schedule_action(Nanoseconds at, std::unique_ptr<Action> action) {
  state->queue.push(Event{std::max(at, state->now), ++state->events, nullptr, 0, Woke::Ready, action.release()});
}

void wake(Thread& thread, std::uint64_t wait, Woke reason, Nanoseconds at) {
  if (at <= state->now) {
    const auto spread = static_cast<std::uint64_t>(kWakeLatency);
    at = state->now + kWakeLatency + static_cast<Nanoseconds>(random_below(spread));
  }
  state->queue.push(Event{at, ++state->events, &thread, wait, reason, nullptr});
}

void load(Process* process) {
  if (state->loaded == process) return;
  if (process != nullptr) {
    environ = process->environment_pointers.data();
    stdout = process->out;
    stderr = process->err;
  }
  state->loaded = process;
}

namespace {

std::string living() {
  std::string text;
  for (const auto& [pid, process] : state->processes) {
    if (process->ended || pid == process->host->init) continue;
    text += "\n  pid " + std::to_string(pid) + " on " + process->host->name + " (";
    for (const std::string& word : process->arguments) text += word + " ";
    text += ")";
    for (const auto& thread : process->threads) {
      if (!thread->gone) text += std::string(" ") + thread->where;
    }
  }
  return text;
}

/// Gives the turn to whom it belongs; returns when it is the caller's again, and never if the caller is gone.
void dispatch() {
  Thread* const me = self;
  while (true) {
    if (state->queue.empty()) {
      finish("deadlock: nothing will happen any more");
      continue;
    }
    const Event event = state->queue.top();
    state->queue.pop();
    state->now = std::max(state->now, event.at);
    if (event.action != nullptr) {
      self = nullptr;
      event.action->run();
      delete event.action;
      self = me;
      continue;
    }
    Thread& next = *event.thread;
    if (next.gone || next.waits != event.wait) continue;
    if (next.process != nullptr && next.process->stopped) {
      next.process->deferred.emplace_back(&next, event.wait);
      continue;
    }
    ++next.waits;
    ++state->switches;
    next.reason = event.reason;
    next.waiting = false;
    state->digest = (state->digest ^ static_cast<std::uint64_t>(state->now)) * 0x100000001b3;
    state->digest = (state->digest ^ static_cast<std::uint64_t>(next.tid)) * 0x100000001b3;
    if (next.process != nullptr) load(next.process);
    if (&next == me) return;
    return pass_turn(*me, next);
  }
}

}  // namespace

Woke block(const char* where, Nanoseconds deadline, bool interruptible) {
  if (self->fork) settle_fork();
  Thread& thread = *self;
  thread.ahead = 0;
  thread.where = where;
  thread.waiting = true;
  thread.interruptible = interruptible;
  if (deadline != kNever) wake(thread, thread.waits, Woke::Timeout, std::max(deadline, state->now + 1));
  dispatch();
  thread.where = "";
  return thread.reason;
}

void charge(Nanoseconds cost) {
  Thread& thread = *self;
  if (thread.fork) return;
  // Effects of other threads take longer than this to arrive, so a thread may be this far ahead of them.
  thread.ahead += cost;
  if (thread.ahead < kAhead) return;
  cost = std::exchange(thread.ahead, 0);
  cost = static_cast<Nanoseconds>(static_cast<double>(cost) * thread.process->host->slowness);
  if (state->queue.empty() || state->queue.top().at > state->now + cost) {
    state->now += cost;
    return;
  }
  wake(thread, thread.waits, Woke::Ready, state->now + std::max<Nanoseconds>(cost, 1));
  thread.waiting = true;
  thread.interruptible = false;
  dispatch();
}

void end_thread() {
  self->gone = true;
  dispatch();
  __builtin_unreachable();
}

namespace {

pthread_key_t last_key;

/// Runs as the last of the real thread's destructors, and passes on the turn: destructors of thread_local objects are
/// the simulated thread's.
void at_thread_end(void* value) {
  auto* const thread = static_cast<Thread*>(value);
  if (++thread->rounds < 4) {
    REAL(pthread_setspecific)(last_key, value);
    return;
  }
  thread->ended = true;
  thread->gone = true;
  thread->joiners.wake_all();
  dispatch();
}

void* run_thread(void* value) {
  auto* const thread = static_cast<Thread*>(value);
  char here_is_the_top = 0;
  thread->stack_top = &here_is_the_top;
  self = thread;
  park(*thread);
  REAL(pthread_setspecific)(last_key, value);
  thread->routine(thread->argument);
  return nullptr;
}

}  // namespace

Thread& add_thread(Process& process) {
  auto thread = std::make_unique<Thread>();
  thread->process = &process;
  thread->tid = process.threads.empty() ? process.pid : state->next_pid++;
  sigemptyset(&thread->blocked);
  process.threads.push_back(std::move(thread));
  return *process.threads.back();
}

void start_thread(Thread& thread, Nanoseconds at) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, std::size_t{1} << 20);
  if (REAL(pthread_create)(&thread.handle, &attributes, run_thread, &thread) != 0) {
    std::fputs("sim: no more threads\n", stderr);
    std::abort();
  }
  pthread_attr_destroy(&attributes);
  wake(thread, thread.waits, Woke::Ready, at);
}

const Program* program_of(const std::string& path) {
  const std::string name = path.substr(path.rfind('/') + 1);
  if (here() != nullptr && here()->host->without == name) return nullptr;
  for (const Program& program : programs) {
    if (name == program.name) return &program;
  }
  return nullptr;
}

void prepare(const std::vector<Program>& all) {
  programs = all;
  pthread_key_create(&last_key, at_thread_end);
}

namespace {

class Console : public File {
 public:
  short ready() override { return 4; }  // POLLOUT
  ssize_t write(const void* bytes, std::size_t size, int) override {
    const std::string_view text(static_cast<const char*>(bytes), size);
    printed->append(text);
    if (state->options.verbose) {
      const std::string head = "[" + std::to_string(state->now / 1000) + " us] ";
      std::string all = head + std::string(text);
      if (!all.ends_with('\n')) all += '\n';
      REAL(write)(2, all.data(), all.size());
    }
    return static_cast<ssize_t>(size);
  }
};

}  // namespace

FilePtr console() { return std::make_shared<Console>(); }

namespace {

/// One thread runs at a time: on one processor the turn is passed fastest.
void stay_on_one_processor() {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(std::max(::sched_getcpu(), 0)), &set);
  REAL(sched_setaffinity)(0, sizeof set, &set);
}

}  // namespace

Result run(const Options& options, int hosts, const std::vector<std::string>& arguments,
           const std::function<void()>& script) {
  stay_on_one_processor();
  ::mallopt(M_ARENA_MAX, 1);
  ::mallopt(M_TOP_PAD, 16 << 20);
  state = new State;
  printed = new std::string;
  state->options = options;
  state->random.seed(options.seed);
  std::FILE* const own_out = stdout;
  std::FILE* const own_err = stderr;
  char** const own_environment = environ;
  for (int number = 0; number < hosts; ++number) {
    auto host = std::make_unique<Host>();
    host->number = number;
    host->name = "host" + std::to_string(number);
    host->address =
        0x0a000001U + static_cast<std::uint32_t>(number / 250) * 256 + static_cast<std::uint32_t>(number % 250);
    state->hosts.push_back(std::move(host));
    Host& made = *state->hosts.back();
    state->host_at[made.address] = state->host_of[made.name] = &made;
    Process& init = new_process(made, 0);
    init.path = "/sbin/init";
    init.arguments = {"init"};
    init.subreaper = true;
    made.init = init.pid;
  }
  Host& first = *state->hosts.front();
  Process& root = new_process(first, first.init);
  root.folder = "/tmp";
  char folder[4096];
  if (REAL(getcwd)(folder, sizeof folder) != nullptr) root.folder = folder;
  const FilePtr shown = console();
  state->root_descriptors[0] = {real_file(REAL(open)("/dev/null", 0 /* O_RDONLY */), "/dev/null"), false};
  state->root_descriptors[1] = {shown, false};
  for (const int fd : {0, 1, 2}) root.descriptors.set(fd, state->root_descriptors[fd > 0 ? 1 : 0]);
  state->root = &root;
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  state->root_environment = environment;
  self = nullptr;
  script();
  execute(root, arguments.front(), arguments, environment);
  self = &state->controller;
  state->controller.context.phase = 1;
  dispatch();  // until `finish`
  load(nullptr);
  self = nullptr;
  stdout = own_out;
  stderr = own_err;
  environ = own_environment;
  Result result;
  result.problem = state->problem;
  if (root.ended) {
    const int status = root.wait_status;
    result.status = (status & 0x7f) != 0 ? 128 + (status & 0x7f) : status >> 8 & 0xff;
  }
  if (!result.problem.empty()) {
    result.problem += "\nprocesses:" + living();
    result.problem += "\nlast events:";
    for (const std::string& line : state->recent) result.problem += "\n  " + line;
  }
  result.time = state->now;
  result.digest = state->digest;
  result.events = state->events;
  result.switches = state->switches;
  result.messages = state->messages;
  result.output = *printed;
  return result;
}

void at(Nanoseconds time, std::function<void()> action) { schedule(time, std::move(action)); }
Nanoseconds now() { return state->now; }
std::uint64_t random_number(std::uint64_t bound) { return random_below(bound); }
const std::string& output() { return *printed; }
void start_process(int number, const std::vector<std::string>& arguments) {
  Host& host = *state->hosts[static_cast<std::size_t>(number)];
  if (!host.alive) return;
  Process& process = new_process(host, host.init);
  process.folder = state->root->folder;
  for (const int fd : {0, 1, 2}) process.descriptors.set(fd, state->root_descriptors[fd > 0 ? 1 : 0]);
  execute(process, arguments.front(), arguments, state->root_environment);
}

void remove_program(int host, const std::string& name) {
  note("script: there is no " + name + " on " + state->hosts[static_cast<std::size_t>(host)]->name);
  state->hosts[static_cast<std::size_t>(host)]->without = name;
}

void set_disk(int host, Disk disk, Nanoseconds takes) {
  Host& of = *state->hosts[static_cast<std::size_t>(host)];
  note("script: the disk of " + of.name +
       (disk == Disk::Works  ? " works"
        : disk == Disk::Full ? " is full"
                             : " is broken") +
       ", " + std::to_string(takes / kMillisecond) + " ms");
  of.disk = disk;
  of.disk_takes = takes;
}

void slow_host(int host, double times) { state->hosts[static_cast<std::size_t>(host)]->slowness = times; }

std::string living_processes() {
  std::string left;
  for (const auto& [pid, process] : state->processes) {
    if (!process->ended && pid != process->host->init && process->host->alive)
      left += " " + std::to_string(pid) + " (" + process->path + " on " + process->host->name + ")";
  }
  return left;
}

int root_status() { return state->root->ended ? state->root->wait_status : -1; }

void note_event(const std::string& text) { note("script: " + text); }
void fail(std::string problem) { finish(std::move(problem)); }

std::vector<int> processes_of(int host, const std::string& program) {
  std::vector<int> found;
  for (Process* process : state->hosts[static_cast<std::size_t>(host)]->processes) {
    if (!process->ended && process->path.substr(process->path.rfind('/') + 1) == program) found.push_back(process->pid);
  }
  return found;
}

void kill_process(int pid, int signal) {
  Process* const process = find(pid);
  note("script: signal " + std::to_string(signal) + " to pid " + std::to_string(pid));
  if (process != nullptr && !process->ended) send_signal(*process, signal);
}

void lose_host(int number) {
  Host& host = *state->hosts[static_cast<std::size_t>(number)];
  note("script: " + host.name + " is lost");
  host.alive = false;
  host.lost_at = state->now;
  for (Process* process : std::vector<Process*>(host.processes)) {
    if (process->ended) continue;
    for (const int fd : process->descriptors.numbers())
      state->lost_files.push_back(process->descriptors.find(fd)->file);
    process->descriptors = {};
    for (const auto& thread : process->threads) thread->gone = true;
    process->stopped = true;
  }
  links_broken();
}

void cut(int from, int to, bool is_cut) {
  const std::pair way(state->hosts[static_cast<std::size_t>(from)].get(),
                      state->hosts[static_cast<std::size_t>(to)].get());
  note("script: " + way.first->name + " to " + way.second->name + (is_cut ? " is cut" : " is restored"));
  if (is_cut) {
    state->cut.insert(way);
    state->cut_since[way] = state->now;
    links_broken();
  } else {
    state->cut.erase(way);
    retry_links();
  }
}

namespace {

std::map<int, std::int64_t> furthest;  ///< by attempt: one that is restarted as a whole begins anew
int last_size = 0, saved_ranks = 0;
std::int64_t saved_steps = 0;
std::vector<std::uint64_t> due_digests;

}  // namespace

void step_ends(int attempt, std::int64_t steps) { furthest[attempt] = std::max(furthest[attempt], steps); }

void world_begins(int attempt, std::int64_t steps, int rank, int size) {
  last_size = size;
  note("rank " + std::to_string(rank) + " of " + std::to_string(size) + " begins after step " + std::to_string(steps));
  // Ranks of a world are one step apart at most, so what is lost with one of them is one step.
  if (steps < furthest[attempt] - 1)
    finish("rank " + std::to_string(rank) + " of " + std::to_string(size) + " begins after step " +
           std::to_string(steps) + ", and the training had been at " + std::to_string(furthest[attempt]));
}

void expect_weights(std::vector<std::uint64_t> digests) { due_digests = std::move(digests); }

void weights_are(std::int64_t steps, std::uint64_t digest, int rank, int size) {
  if (digest != due_digests.at(static_cast<std::size_t>(steps)))
    finish("rank " + std::to_string(rank) + " of " + std::to_string(size) + " has WRONG weights after step " +
           std::to_string(steps));
}

int world_size() { return last_size; }

void saves(std::int64_t steps) {
  if (saved_ranks++ == 0) saved_steps = steps;
  if (steps != saved_steps)
    finish("a rank saves after step " + std::to_string(steps) + ", and another after " + std::to_string(saved_steps));
}

int saved() { return saved_ranks; }

}  // namespace sim
