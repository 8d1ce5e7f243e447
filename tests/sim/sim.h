// A deterministic world in which the production objects run: hosts, links, processes and time are simulated, and a seed
// decides what happens when. Used by scenarios and programs; no part of it is in the product.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace sim {

using Nanoseconds = std::int64_t;
constexpr Nanoseconds kMicrosecond = 1'000, kMillisecond = 1'000'000, kSecond = 1'000'000'000;

struct Host;

struct Options {
  std::uint64_t seed = 1;
  Nanoseconds latency = 20 * kMicrosecond;  ///< of a message between two hosts, one way
  double bytes_per_ns = 1.25;               ///< of a host's port, each way: 10 Gbit/s
  Nanoseconds longest_start = 0;            ///< from a user's program's execve to its main, at random up to this
  Nanoseconds after_end = 3 * kSecond;      ///< the world goes on after the first process's end, to see what is left
  bool verbose = false;                     ///< print what processes print, with the time
};

/// A program that simulated processes execute, by the last part of its path.
struct Program {
  const char* name;
  int (*main)(int argc, char** argv);
  bool is_users = false;  ///< a training, which takes long to load
};

struct Result {
  std::string problem;  ///< empty: none
  int status = -1;      ///< exit status of the first process, as a shell reports it
  Nanoseconds time = 0;
  std::uint64_t digest = 0, events = 0, switches = 0, messages = 0;
  std::string output;  ///< what the first process and its children printed
};

/// Keeps what the executable is before a constructor runs: to be called from its .preinit_array.
void remember_executable();
/// The executable's programs. Called once, before `run`.
void prepare(const std::vector<Program>& programs);

/// Runs `arguments` as a process on the first host until it ends. Called once in the life of a real process.
/// `script` is called when the world has been made, before time begins.
Result run(const Options& options, int hosts, const std::vector<std::string>& arguments,
           const std::function<void()>& script);

// For scripts and the functions that they schedule.

/// Calls `action` at this time of the world.
void at(Nanoseconds time, std::function<void()> action);
/// The time now.
Nanoseconds now();
/// A number from 0 to bound - 1 from the seed.
std::uint64_t random_number(std::uint64_t bound);
/// All that has been printed so far.
const std::string& output();
/// Processes of a host that live and execute this program, in the order in which they were started.
std::vector<int> processes_of(int host, const std::string& program);
void kill_process(int pid, int signal);
/// The host's power fails: nothing of it is heard any more.
void lose_host(int host);
/// Cuts or restores the way of messages from one host to another.
void cut(int from, int to, bool is_cut);
/// Starts a process on this host, beside the job; what it prints is part of the output.
void start_process(int host, const std::vector<std::string>& arguments);
/// The program is not installed on this host.
void remove_program(int host, const std::string& name);
/// Processes on this host run so many times slower.
void slow_host(int host, double times);
enum class Disk : std::uint8_t { Works, Full, Broken };
/// Changes of files by processes of this host fail from now on, and each takes so long.
void set_disk(int host, Disk disk, Nanoseconds takes);
/// TCP connections that the first process has with other hosts at present.
int root_connections();
/// The exit status of the first process if it has ended; -1 else.
int root_status();
/// Processes of hosts that are not lost, for a message; empty if there are none.
std::string living_processes();
/// A line for the last events that a failure prints.
void note_event(const std::string& text);
/// Ends the world: the run has failed, or, with an empty text, all that was to be seen has been seen.
void fail(std::string problem);

// For programs.

/// Starts a process on another host with this process's stdin, stdout and stderr, and returns its exit status when it
/// has ended: what ssh does.
int run_on_host(const std::string& host, const std::vector<std::string>& arguments);

// For elastic trainings: what the world knows of them, and compares.

/// A rank's world begins after this many steps of this attempt (COHORT_RESTART). Fails the run if the training had been
/// further.
void world_begins(int attempt, std::int64_t steps, int rank, int size);
void step_ends(int attempt, std::int64_t steps);
/// Digests of the weights after 0, 1, .. steps, whoever takes part in them.
void expect_weights(std::vector<std::uint64_t> digests);
/// A rank has these weights after so many steps. Fails the run if they are not the ones expected.
void weights_are(std::int64_t steps, std::uint64_t digest, int rank, int size);
/// The size of the world that began last.
int world_size();
/// A rank saves after this many steps, and ends: all do so at the same step. Fails the run otherwise.
void saves(std::int64_t steps);
int saved();

}  // namespace sim
