// The one loop that measures Cohort and every library it is compared with: same buffers, same order, same clock. A
// library is a type with
//   int rank(), size();  std::string name();  bool supports(Collective, Type, Memory);
//   void* allocate(std::size_t bytes, Memory);        // lives as long as the library; throws if it cannot
//   void call(Collective, Type, const void* input, void* output, std::size_t count);   // root 0, sum, blocking
//   void progress();                                  // moves pending communication on; may do nothing
// `serve` answers the driver's commands until it goes. Every rank answers with its own times: the driver takes the
// slowest rank's, iteration by iteration.
#pragma once

#include "peer_buffers.h"
#include "peer_channel.h"

#include <time.h>

#include <chrono>
#include <cstdio>
#include <exception>

namespace peers {

using Clock = std::chrono::steady_clock;

/// A command that takes longer than this ends the peer: SIGALRM, whatever it hangs in.
inline constexpr unsigned kSecondsPerCommand = 120;
/// Below this, calls are timed in a row: reading the clock costs 25 ns, a call perhaps 100.
inline constexpr std::size_t kBackToBackBytes = 4096;

inline double microseconds(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

/// Processor time used by all threads of this process.
inline double cpu_microseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

/// True if every rank needs all others: calls in a row then cannot overtake each other by more than one.
inline bool symmetric(Collective collective) {
  switch (collective) {
    case Collective::AllReduce:
    case Collective::AllGather:
    case Collective::ReduceScatter:
    case Collective::AllToAll:
    case Collective::Barrier:
    case Collective::SendRecv: return true;  // there and back
    default: return false;
  }
}

template <class Library>
std::string measure(Library& library, Channel& channel, BufferPool<Library>& pool, const Task& task) {
  if (!library.supports(task.collective, task.type, task.memory)) return R"({"ok": false, "why": "unsupported"})";
  const Buffers buffers = pool.get(task);
  const std::size_t count = count_of(task, library.size());
  if (count == 0 && task.collective != Collective::Barrier) {
    return R"({"ok": false, "why": "fewer bytes than ranks"})";
  }
  const Pattern own = pattern_of(library.rank(), task.type);
  const auto call = [&] { library.call(task.collective, task.type, buffers.input, buffers.output, count); };
  const auto align = [&] { channel.align([&] { library.progress(); }); };

  std::size_t wrong = 0;
  if (task.check) {
    std::memset(buffers.output, 0xA5, buffers.output_count * size_of(task.type));
    fill(buffers.input, buffers.input_count, task.type, own);
    align();
    call();
    align();  // nobody rewrites what another one still reads
    wrong = wrong_elements(task, library.rank(), library.size(), buffers.output, count);
  }
  // Zeros stay zeros however often they are summed.
  std::memset(buffers.input, 0, buffers.input_count * size_of(task.type));
  const bool row = task.state == State::Hot && symmetric(task.collective) && task.bytes < kBackToBackBytes;
  const int in_a_row = row ? std::min(task.iterations, 100) : 1;
  const int samples = task.iterations / in_a_row;
  const int warm_up = row ? 1 : 2;
  const double per_call = task.collective == Collective::SendRecv ? 2.0 * in_a_row : in_a_row;
  std::string times;
  double cpu = 0;
  for (int sample = -warm_up; sample < samples; ++sample) {
    prepare(task, buffers, own);
    align();
    const double cpu_before = cpu_microseconds();
    const auto begin = Clock::now();
    for (int i = 0; i < in_a_row; ++i) call();
    const double time = microseconds(Clock::now() - begin) / per_call;
    if (sample < 0) continue;
    cpu += (cpu_microseconds() - cpu_before) / per_call;
    char text[40];
    std::snprintf(text, sizeof text, "%s%.4f", times.empty() ? "" : ",", time);
    times += text;
  }
  align();
  return R"({"ok": true, "wrong": )" + std::to_string(wrong) + R"(, "cpu_us": )" + std::to_string(cpu / samples) +
         R"(, "us": [)" + times + "]}";
}

template <class Library>
int serve(Library& library, const char* folder) {
  try {
    Channel channel(folder, library.rank(), library.size());
    BufferPool<Library> pool(library);
    channel.answer(R"({"ok": true, "name": ")" + library.name() + "\"}");
    while (const auto line = channel.next_line()) {
      if (*line == "quit") break;
      const auto task = parse_task(*line);
      if (!task) throw std::runtime_error("not a command: " + *line);
      ::alarm(kSecondsPerCommand);
      channel.answer(measure(library, channel, pool, *task));
      ::alarm(0);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s, rank %d: %s\n", library.name().c_str(), library.rank(), error.what());
    return 1;
  }
}

}  // namespace peers
