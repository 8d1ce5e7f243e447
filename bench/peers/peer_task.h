// A peer's task, one line: `run COLLECTIVE BYTES ITERATIONS STATE MEMORY TYPE CHECK`. Plain values, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

namespace peers {

enum class Collective {
  AllReduce,
  Reduce,
  Broadcast,
  AllGather,
  Gather,
  Scatter,
  ReduceScatter,
  AllToAll,
  SendRecv,
  Barrier
};
enum class Type { Float32, Float16, BFloat16, Int64 };
enum class Memory { Heap, Arena };
/// Hot: the same buffers again. Touched: their owner has just rewritten them. Cold: in no cache.
enum class State { Hot, Touched, Cold };

struct Task {
  Collective collective = Collective::AllReduce;
  std::size_t bytes = 0;  ///< the larger of a rank's input and output, as nccl-tests count
  int iterations = 1;
  State state = State::Hot;
  Memory memory = Memory::Heap;
  Type type = Type::Float32;
  bool check = true;  ///< compare one result in full before timing
};

constexpr std::size_t size_of(Type type) { return type == Type::Int64 ? 8 : type == Type::Float32 ? 4 : 2; }

/// Elements of one rank's part if ranks send or receive parts, else all of them.
inline std::size_t count_of(const Task& task, int ranks) {
  const std::size_t elements = task.bytes / size_of(task.type);
  switch (task.collective) {
    case Collective::AllGather:
    case Collective::Gather:
    case Collective::Scatter:
    case Collective::ReduceScatter:
    case Collective::AllToAll: return elements / static_cast<std::size_t>(ranks);
    case Collective::Barrier: return 0;
    default: return elements;
  }
}

template <class Value, std::size_t Count>
bool look_up(const std::string& word, const std::string_view (&names)[Count], Value& value) {
  for (std::size_t i = 0; i < Count; ++i) {
    if (word != names[i]) continue;
    value = static_cast<Value>(i);
    return true;
  }
  return false;
}

inline std::optional<Task> parse_task(const std::string& line) {
  constexpr std::string_view kCollectives[] = {"all_reduce", "reduce",         "broadcast",  "all_gather", "gather",
                                               "scatter",    "reduce_scatter", "all_to_all", "send_recv",  "barrier"};
  constexpr std::string_view kStates[] = {"hot", "touched", "cold"};
  constexpr std::string_view kMemories[] = {"heap", "arena"};
  constexpr std::string_view kTypes[] = {"float32", "float16", "bfloat16", "int64"};
  std::istringstream words(line);
  std::string run, collective, state, memory, type;
  Task task;
  if (!(words >> run >> collective >> task.bytes >> task.iterations >> state >> memory >> type >> task.check))
    return {};
  const bool known = run == "run" && look_up(collective, kCollectives, task.collective) &&
                     look_up(state, kStates, task.state) && look_up(memory, kMemories, task.memory) &&
                     look_up(type, kTypes, task.type);
  if (!known || task.iterations < 1) return {};
  return task;
}

}  // namespace peers
