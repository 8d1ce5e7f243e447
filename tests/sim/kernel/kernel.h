// The simulated kernel: hosts, processes, threads, descriptors and time, below the C library. calls_*.cpp define the C
// library's functions (open, poll, pthread_mutex_lock, ...) in this library, which is loaded before libc, so that the
// production objects arrive here; a caller that is no simulated thread goes on to the real function. One simulated
// thread runs at a time, on the stack and with the thread pointer of a thread of the real system, so thread_local,
// errno and exceptions in flight are right. All functions here belong to the thread whose turn it is.
#pragma once

#include "sim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

/// The C library's function of this name.
#define REAL(name)                                                                                           \
  ([]() -> decltype(&::name) {                                                                               \
    static decltype(&::name) const of_libc = reinterpret_cast<decltype(&::name)>(::dlsym(RTLD_NEXT, #name)); \
    return of_libc;                                                                                          \
  }())
/// Defines the C library's function `name` here. The label avoids the header's declaration, whose exception
/// specification differs from function to function.
#define CALL(result, name, ...)                                                                          \
  extern "C" __attribute__((visibility("default"))) result simulated_##name(__VA_ARGS__) __asm__(#name); \
  result simulated_##name(__VA_ARGS__)

namespace sim {

class File;
struct Process;
struct Thread;

using FilePtr = std::shared_ptr<File>;

/// Time that calls take on their thread's own processor; measured on two cores of 2.1 GHz.
constexpr Nanoseconds kClockCost = 50, kCallCost = 500, kMessageCost = 3'000;
/// A thread that is woken runs this much later, and up to as much again at random.
constexpr Nanoseconds kWakeLatency = 2'000;
/// A thread may run ahead of the others by this time before it lets them run.
constexpr Nanoseconds kAhead = 2'000;
constexpr Nanoseconds kNever = INT64_MAX;

/// The place at which a thread without the turn goes on. The assembly of turn.cpp knows the layout.
struct Context {
  void* stack = nullptr;
  void* thread = nullptr;
  int phase = 0;
};

enum class Woke : std::uint8_t { Ready, Timeout, Signal };

/// Threads that wait for one thing. An entry counts while its thread is still in the wait that made it.
class WaitQueue {
 public:
  void add(Thread& thread);
  void wake_one();
  void wake_all();
  bool empty() const noexcept { return entries_.empty(); }

 private:
  std::vector<std::pair<Thread*, std::uint64_t>> entries_;
};

/// State of a caller of fork whose child has not executed a program yet. Until then the child runs on its parent's
/// thread and memory, as with vfork; the parent's stack and globals are put back when it returns.
struct ForkPoint {
  std::uint64_t registers[8];
  std::string stack;
  std::string globals;
  Process* parent = nullptr;
};

struct Thread {
  int tid = 0;
  Process* process = nullptr;
  pthread_t handle{};
  Context context;
  std::uint64_t waits = 0;  ///< number of the current wait; what was to wake an earlier one is void
  Woke reason = Woke::Ready;
  bool waiting = false;
  bool interruptible = false;
  bool gone = false;  ///< never gets a turn again
  bool ended = false;
  bool detached = false;
  bool in_handler = false;
  sigset_t blocked{};
  WaitQueue joiners;
  std::unique_ptr<ForkPoint> fork;
  void* (*routine)(void*) = nullptr;
  void* argument = nullptr;
  char* stack_top = nullptr;
  const char* where = "";  ///< the call it waits in, for a deadlock's message
  Nanoseconds ahead = 0;
  int rounds = 0;  ///< of destructors of thread-specific data
};

struct Slot {
  FilePtr file;
  bool close_on_exec = false;
};

/// A process's descriptors: those whose numbers it has chosen, and from kFirst on the others. (What libraries open
/// without the simulation has numbers between.)
class Descriptors {
 public:
  static constexpr int kFirst = 1000;

  /// nullptr if there is none of this number.
  Slot* find(int fd) noexcept {
    auto& slots = fd < kFirst ? chosen_ : others_;
    const auto at = static_cast<std::size_t>(fd < kFirst ? fd : fd - kFirst);
    return fd < 0 || at >= slots.size() || slots[at].file == nullptr ? nullptr : &slots[at];
  }
  void set(int fd, Slot slot);
  /// The lowest free number, at least `least`.
  int add(Slot slot, int least);
  void erase(int fd);
  std::vector<int> numbers();

 private:
  std::vector<Slot> chosen_, others_;
  std::size_t full_ = 0;  ///< there is no free one among the first of the others
};

struct Process {
  pid_t pid = 0;
  pid_t parent = 0;
  pid_t group = 0;
  Host* host = nullptr;
  std::string path;
  std::vector<std::string> arguments;
  std::vector<std::string> environment;
  std::vector<char*> environment_pointers;
  std::string folder;
  Descriptors descriptors;
  std::vector<std::unique_ptr<Thread>> threads;
  char* image = nullptr;  ///< its copy of the executable
  std::map<int, struct sigaction> actions;
  sigset_t pending{};
  int death_signal = 0;
  bool subreaper = false;
  bool stopped = false;
  bool ended = false;  ///< a zombie, or reaped
  bool reaped = false;
  bool passive = false;  ///< a guard: its child runs on what was its thread
  int wait_status = 0;
  std::uint64_t start_ticks = 0;
  std::vector<std::pair<Thread*, std::uint64_t>> deferred;  ///< wake-ups while it is stopped
  WaitQueue child_ended;
  std::set<File*> signal_files;
  std::vector<std::weak_ptr<File>> watchers;  ///< pidfds
  std::vector<std::pair<void (*)(int, void*), void*>> at_exit;
  std::FILE* out = nullptr;
  std::FILE* err = nullptr;
};

/// An open file description.
class File : public std::enable_shared_from_this<File> {
 public:
  virtual ~File();
  /// Events of poll that hold now.
  virtual short ready() = 0;
  /// Bytes moved, or -errno; -EAGAIN if the caller has to wait.
  virtual ssize_t read(void* bytes, std::size_t size, int flags);
  virtual ssize_t write(const void* bytes, std::size_t size, int flags);
  virtual int real() const { return -1; }  ///< descriptor of the real system
  virtual Nanoseconds receive_limit() const { return kNever; }
  /// Called when `ready` may have changed.
  void changed();

  bool nonblocking = false;
  WaitQueue waiters;

  struct Watch;  // of an epoll
  std::vector<std::weak_ptr<Watch>> watches;
};

struct Host {
  int number = 0;
  std::string name;
  std::uint32_t address = 0;  ///< IPv4, host order
  bool alive = true;
  Nanoseconds lost_at = kNever;
  Nanoseconds egress_free = 0, ingress_free = 0;
  std::string without;  ///< a program that is not here
  int cores = 8;
  double slowness = 1;
  Disk disk = Disk::Works;
  Nanoseconds disk_takes = 0;
  pid_t init = 0;
  std::vector<Process*> processes;
  std::uint16_t next_port = 40'000;
  std::map<std::string, File*> listeners;  ///< by "tcp:PORT" and "unix:NAME"
};

/// An action that is due at some time.
struct Action {
  virtual ~Action() = default;
  virtual void run() = 0;
};

struct Event {
  Nanoseconds at;
  std::uint64_t number;
  Thread* thread;
  std::uint64_t wait;
  Woke reason;
  Action* action;  ///< owned by the queue
  bool operator>(const Event& other) const { return at != other.at ? at > other.at : number > other.number; }
};

struct WaitKey {
  const Process* process;
  const void* thing;
  bool operator==(const WaitKey&) const = default;
  struct Hash {
    std::size_t operator()(const WaitKey& key) const noexcept {
      return (reinterpret_cast<std::uintptr_t>(key.process) * 31 + reinterpret_cast<std::uintptr_t>(key.thing)) >> 3;
    }
  };
};

struct State {
  Options options;
  std::mt19937_64 random;
  Nanoseconds now = 0;
  std::uint64_t events = 0, switches = 0, messages = 0;
  std::uint64_t digest = 0xcbf29ce484222325;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> queue;
  std::vector<std::unique_ptr<Host>> hosts;
  std::unordered_map<std::uint32_t, Host*> host_at;  ///< by address
  std::unordered_map<std::string, Host*> host_of;    ///< by name
  std::map<pid_t, std::unique_ptr<Process>> processes;
  pid_t next_pid = 100;
  Process* loaded = nullptr;  ///< whose environment and streams are the C library's
  Thread controller;
  Process* root = nullptr;  ///< the first process, whose end is the run's
  std::string problem;
  Slot root_descriptors[2];
  std::vector<std::string> root_environment;
  std::set<std::pair<Host*, Host*>> cut;
  std::map<std::pair<Host*, Host*>, Nanoseconds> cut_since;
  std::unordered_map<WaitKey, WaitQueue, WaitKey::Hash> waits;  ///< mutexes, conditions, once
  std::deque<std::string> recent;                               ///< the last events, for a failure's message
  std::vector<FilePtr> lost_files;                              ///< of lost hosts: nobody hears that they were closed
};

extern State* state;
extern thread_local Thread* self;

/// The simulated process of the calling thread; nullptr if the caller is not simulated.
inline Process* here() noexcept { return self != nullptr ? self->process : nullptr; }

// scheduler.cpp
void schedule_action(Nanoseconds at, std::unique_ptr<Action> action);
template <class F>
void schedule(Nanoseconds at, F function) {
  struct Own : Action {
    explicit Own(F&& given) : function(std::move(given)) {}
    void run() override { function(); }
    F function;
  };
  schedule_action(at, std::make_unique<Own>(std::move(function)));
}
void wake(Thread& thread, std::uint64_t wait, Woke reason, Nanoseconds at);
/// Waits until the thread is woken or `deadline` has come. The caller has put itself into queues before.
Woke block(const char* where, Nanoseconds deadline = kNever, bool interruptible = false);
/// Lets time pass on this thread's processor.
void charge(Nanoseconds cost);
[[noreturn]] void end_thread();
void load(Process* process);
void start_thread(Thread& thread, Nanoseconds at);
Thread& add_thread(Process& process);
void note(std::string text);
void finish(std::string problem);
std::uint64_t random_below(std::uint64_t bound);

// turn.cpp
/// Called by a real thread that has been made for a simulated one: returns when that one has the turn.
void park(Thread& own);
/// Returns when the caller has the turn again.
void pass_turn(Thread& from, Thread& to);
/// The real thread of one that has ended ends, and its handle may be given again.
void give_back(Thread& ended);

// image.cpp
char* make_image();
/// The image may be used again. Its code may still run until the next turn.
void drop_image(char* image);
/// The image's copy of this object or function of the executable.
void* in_image(const char* image, const void* of_executable);
void run_constructors(char* image);
std::string keep_globals(const char* image);
void put_globals(char* image, const std::string& kept);

// process.cpp
Process& new_process(Host& host, pid_t parent);
/// Ends the process: its descriptors are closed, its threads get no turn any more.
void end_process(Process& process, int wait_status);
void execute(Process& process, const std::string& path, std::vector<std::string> arguments,
             std::vector<std::string> environment);
void send_signal(Process& process, int number);
/// Runs handlers of signals that have come. Returns true if one has run.
bool run_handlers();
/// Called before a thread waits: a forked child that waits goes on as a process of its own.
void settle_fork();
Process* find(pid_t pid);
bool signals_pending(const Process& process, const sigset_t& set);
int take_signal(Process& process, const sigset_t& set);

// files.cpp
std::string full_path(const char* path);
/// Contents of a file in /proc or /sys that the simulation answers; nullopt: the real one.
std::optional<std::string> generated(const std::string& path);
bool is_program(const std::string& path);
/// Called before a file is changed: takes the disk's time, and returns the errno of its failure, or 0.
int change_disk();

// descriptors.cpp
FilePtr file_of(int fd);
int add_descriptor(FilePtr file, bool close_on_exec, int least = Descriptors::kFirst);
int failed(int error_number);
void close_all(Process& process);
/// `on_disk`: its bytes are on the host's disk, which may fail.
FilePtr real_file(int fd, std::string path, bool on_disk = false);
FilePtr generated_file(std::function<std::optional<std::string>()> contents);
std::pair<FilePtr, FilePtr> make_pipe();
FilePtr console();
ssize_t transfer(int fd, void* bytes, std::size_t size, int flags, bool reads, const char* where);
FilePtr process_file(Process& process);

// sockets.cpp
void retry_links();
/// To be called when a host is lost or a link is cut.
void links_broken();

}  // namespace sim
