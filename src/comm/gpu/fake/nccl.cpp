// For tests: a fake NCCL (libnccl.so.2), over the fake driver. Ranks are threads or processes of this
// machine; their bytes go through a memory file without a name. It folds by ascending rank; with FAKE_NCCL_PER_HOST
// ranks on a host, it folds the hosts' sums. FAKE_NCCL_VERSION is its version.
// FAKE_NCCL_TROUBLE=WHAT:RANK makes one rank fail: init (fails), init-hang, call (fails), call-hang, hang, async (an
// error that comes later), abort-hang (like hang, and the abort takes long), and careless (like hang, and the others
// go on without its data once it is aborted). FAKE_NCCL_DELAY: milliseconds that every operation takes longer. Any
// thread.
#include "comm/gpu/nccl.h"
#include "comm/testing/reference_fold.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace {

using cohort::DType;
using cohort::ReduceOp;
using cohort::comm::cuda::NcclConfig;
using cohort::comm::cuda::NcclId;
using cohort::comm::cuda::NcclOp;
using cohort::comm::cuda::NcclResult;
using cohort::comm::cuda::NcclType;
using cohort::comm::testing::Bytes;
using namespace std::chrono_literals;

constexpr auto kSystemError = static_cast<NcclResult>(2);
constexpr auto kInvalidArgument = static_cast<NcclResult>(4);
constexpr auto kInvalidUsage = static_cast<NcclResult>(5);
constexpr auto kRemoteError = static_cast<NcclResult>(6);
constexpr int kFirstMade = 5;                           // number of the first operation that a communicator makes
constexpr std::size_t kMost = 8;                        // ranks
constexpr std::size_t kRoom = std::size_t{32} << 20;    // bytes of an operation, per rank
constexpr std::size_t kLetter = std::size_t{32} << 20;  // bytes of a message

struct Pair {
  std::atomic<std::uint64_t> sent, taken;
};
struct Shared {
  std::atomic<int> came;
  std::atomic<std::uint64_t> step[kMost];
  Pair pairs[kMost][kMost];
};
constexpr std::size_t kHead = (sizeof(Shared) + 4095) / 4096 * 4096;
constexpr std::size_t kAll = kHead + (kMost + 1) * kRoom + kMost * kMost * kLetter;

std::atomic<int> operations{0}, aborts{0}, ends{0};

int number_of(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}
bool troubled(std::string_view what, int rank) {
  const char* const text = std::getenv("FAKE_NCCL_TROUBLE");
  return text != nullptr && text == std::string(what) + ":" + std::to_string(rank);
}

template <class Function>
Function* of_driver(const char* name) {
  static void* const handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<Function*>(::dlsym(handle, name));
}
std::byte* behind(const void* memory, std::size_t bytes) {
  return static_cast<std::byte*>(of_driver<void*(const void*, std::size_t)>("fake_cuda_bytes")(memory, bytes));
}

struct Element {
  DType dtype;
  std::size_t bytes;
};
Element element_of(NcclType type) {
  constexpr DType kTypes[] = {DType::Int8,   DType::UInt8,   DType::Int32,   DType::UInt32,  DType::Int64,
                              DType::UInt64, DType::Float16, DType::Float32, DType::Float64, DType::BFloat16};
  const DType dtype = kTypes[static_cast<int>(type)];
  return {dtype, cohort::size_of(dtype)};
}
ReduceOp op_of(NcclOp op) {
  constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min, ReduceOp::Average};
  return kOps[static_cast<int>(op)];
}

struct Comm;
/// `run` returns false for a message that cannot go yet, or if it was aborted.
struct Step {
  std::function<bool(Comm&)> run;
  int way = -1;  // for messages: direction and peer; messages of one way go in order
};

struct Comm {
  Comm(int of, int number, int file) : size(of), rank(number), fd(file) {
    memory = static_cast<std::byte*>(::mmap(nullptr, kAll, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  }
  ~Comm() {
    ::munmap(memory, kAll);
    ::close(fd);
  }
  Shared& shared() const { return *reinterpret_cast<Shared*>(memory); }
  std::byte* input(std::size_t of) const { return memory + kHead + of * kRoom; }
  std::byte* result() const { return input(kMost); }
  std::byte* letter(std::size_t from, std::size_t to) const {
    return memory + kHead + (kMost + 1) * kRoom + (from * kMost + to) * kLetter;
  }
  template <class Ready>
  bool wait(const Ready& ready) const {
    while (!ready()) {
      if (aborted) return false;
      std::this_thread::sleep_for(20us);
    }
    return true;
  }
  bool meet() {
    shared().step[own()].store(++steps);
    for (int other = 0; other < size; ++other) {
      if (!wait([&] { return shared().step[static_cast<std::size_t>(other)].load() >= steps; })) return false;
    }
    return true;
  }
  std::size_t own() const { return static_cast<std::size_t>(rank); }
  std::size_t ranks() const { return static_cast<std::size_t>(size); }

  const int size;
  const int rank;
  const int fd;
  std::byte* memory;
  std::uint64_t steps = 0;
  std::atomic<bool> aborted{false};
  std::atomic<NcclResult> state{NcclResult::Success};
  std::atomic<int> running{0};
  std::mutex mutex;
  std::map<int, double> factors;  // factors of the operations that were made; under the mutex
};

/// Folds all ranks' elements [begin, end) into one.
void fold(const Comm& comm, NcclType type, NcclOp op, std::size_t begin, std::size_t end, std::byte* to) {
  const Element element = element_of(type);
  const auto count = static_cast<std::int64_t>(end - begin);
  const auto per_host = static_cast<std::size_t>(number_of("FAKE_NCCL_PER_HOST", static_cast<int>(kMost)));
  std::vector<Bytes> partials;
  std::vector<Bytes> here;
  for (std::size_t rank = 0; rank < comm.ranks(); ++rank) {
    here.emplace_back(comm.input(rank) + begin * element.bytes, comm.input(rank) + end * element.bytes);
    if ((rank + 1) % per_host != 0 && rank + 1 < comm.ranks()) continue;
    const ReduceOp within = op == NcclOp::Average ? ReduceOp::Sum : op_of(op);
    partials.push_back(
        comm.ranks() <= per_host ? Bytes() : cohort::comm::testing::reference_fold(element.dtype, within, here, count));
    if (comm.ranks() > per_host) here.clear();
  }
  cohort::comm::testing::Factors factors;
  factors.divisor = static_cast<std::int64_t>(comm.ranks());
  const Bytes all = cohort::comm::testing::reference_fold(element.dtype, op_of(op),
                                                          comm.ranks() <= per_host ? here : partials, count, factors);
  if (!all.empty()) std::memcpy(to, all.data(), all.size());
}

struct Group {
  int depth = 0;
  std::map<Comm*, std::vector<Step>> steps;
  std::map<Comm*, void*> streams;
};
thread_local Group group;

/// A GPU's memory as host memory; null and no bytes go together.
bool reachable(const void* memory, std::size_t bytes, std::byte*& to) {
  to = bytes == 0 ? nullptr : behind(memory, bytes);
  return bytes == 0 || to != nullptr;
}

NcclResult add(void* comm, void* stream, std::function<bool(Comm&)> run, int way = -1) {
  if (group.depth == 0) return kInvalidUsage;  // Cohort always groups
  group.steps[static_cast<Comm*>(comm)].push_back({std::move(run), way});
  group.streams[static_cast<Comm*>(comm)] = stream;
  return NcclResult::Success;
}

/// Carries out the given steps in the stream.
void carry_out(Comm& comm, const std::vector<Step>& given) {
  ++operations;
  if (troubled("hang", comm.rank) || troubled("abort-hang", comm.rank)) {
    comm.wait([] { return false; });
  } else if (troubled("careless", comm.rank)) {
    comm.wait([] { return false; });
    comm.shared().step[comm.own()].store(~std::uint64_t{0});
  } else if (troubled("async", comm.rank)) {
    std::this_thread::sleep_for(20ms);
    comm.state = kRemoteError;
    comm.wait([] { return false; });
  } else {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(number_of("FAKE_NCCL_DELAY", 0));
    bool going = comm.wait([&] { return std::chrono::steady_clock::now() >= until; });
    std::list<const Step*> messages;
    for (const Step& step : given) {
      if (step.way >= 0) messages.push_back(&step);
      if (step.way < 0) going = going && step.run(comm);
    }
    while (going && !messages.empty()) {
      std::set<int> busy;
      const std::size_t before = messages.size();
      messages.remove_if([&](const Step* step) {
        if (busy.count(step->way) != 0) return false;
        if (step->run(comm)) return true;
        busy.insert(step->way);
        return false;
      });
      if (messages.size() == before) std::this_thread::sleep_for(20us);
      going = !comm.aborted;
    }
  }
  --comm.running;
}

struct Launched {
  Comm& comm;
  std::vector<Step> given;
};

void put_into(void* stream, Comm& comm, std::vector<Step> given) {
  auto* const work = new Launched{comm, std::move(given)};
  ++comm.running;
  of_driver<int(void*, void (*)(void*), void*)>("cuLaunchHostFunc")(
      stream,
      [](void* data) {
        auto* const own = static_cast<Launched*>(data);
        carry_out(own->comm, own->given);
        delete own;
      },
      work);
}

void end(Comm* comm) {
  comm->aborted = true;
  for (int i = 0; i < 100000 && comm->running > 0; ++i) std::this_thread::sleep_for(50us);
  delete comm;
}

/// Adds a rank's input to a sum: its elements, or their products with the operation's factor.
void bring(Comm& comm, const std::byte* from, std::size_t count, NcclType type, std::optional<double> factor) {
  const Element element = element_of(type);
  std::byte* const to = comm.input(comm.own());
  if (count > 0) std::memcpy(to, from, count * element.bytes);
  if (!factor) return;
  for (std::size_t i = 0; i < count; ++i) {
    if (type == NcclType::Float32) {
      reinterpret_cast<float*>(to)[i] *= static_cast<float>(*factor);
    } else {
      reinterpret_cast<double*>(to)[i] *= *factor;
    }
  }
}

NcclResult reduce(const void* from, void* to, std::size_t count, NcclType type, NcclOp op, int root, void* comm,
                  void* stream) {
  std::optional<double> factor;
  if (static_cast<int>(op) >= kFirstMade) {
    auto& own = *static_cast<Comm*>(comm);
    const std::lock_guard lock(own.mutex);
    const auto found = own.factors.find(static_cast<int>(std::exchange(op, NcclOp::Sum)));
    if (found == own.factors.end()) return kInvalidArgument;
    factor = found->second;
  }
  const std::size_t bytes = count * element_of(type).bytes;
  const bool gets = root < 0 || root == static_cast<Comm*>(comm)->rank;
  std::byte *in = nullptr, *out = nullptr;
  if (bytes > kRoom || !reachable(from, bytes, in) || (gets && !reachable(to, bytes, out))) return kInvalidArgument;
  return add(comm, stream, [=](Comm& own) {
    bring(own, in, count, type, factor);
    if (!own.meet()) return false;
    const std::size_t begin = count * own.own() / own.ranks();
    fold(own, type, op, begin, count * (own.own() + 1) / own.ranks(), own.result() + begin * element_of(type).bytes);
    if (!own.meet()) return false;
    if (gets && bytes > 0) std::memcpy(out, own.result(), bytes);
    return own.meet();
  });
}

}  // namespace

extern "C" {

NcclResult ncclGetVersion(int* version) {
  *version = number_of("FAKE_NCCL_VERSION", 23007);
  return NcclResult::Success;
}
NcclResult ncclGetUniqueId(NcclId* id) {
  const int fd = ::memfd_create("fake-nccl", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(kAll)) != 0) return kSystemError;
  std::snprintf(id->bytes, sizeof id->bytes, "/proc/%d/fd/%d", static_cast<int>(::getpid()), fd);
  return NcclResult::Success;
}
const char* ncclGetErrorString(NcclResult result) {
  return result == kRemoteError ? "remote process exited or there was a network error" : "fake failure";
}
const char* ncclGetLastError(void*) { return "as it was told to"; }

NcclResult ncclCommInitRankConfig(void** made, int size, NcclId id, int rank, NcclConfig* config) {
  *made = nullptr;
  if (config->magic != 0xcafebeef || config->size != sizeof(NcclConfig) || config->blocking != 1 ||
      size > static_cast<int>(kMost)) {
    return kInvalidArgument;
  }
  if (troubled("init", rank)) return kSystemError;
  const int fd = ::open(id.bytes, O_RDWR | O_CLOEXEC);
  if (fd < 0) return kSystemError;
  auto* const comm = new Comm(size, rank, fd);
  *made = comm;
  if (!troubled("init-hang", rank)) ++comm->shared().came;
  comm->wait([&] { return comm->shared().came == comm->size; });
  return NcclResult::Success;
}
NcclResult ncclCommDestroy(void* comm) {
  ++ends;
  end(static_cast<Comm*>(comm));
  return NcclResult::Success;
}
NcclResult ncclCommAbort(void* comm) {
  ++aborts;
  if (troubled("abort-hang", static_cast<Comm*>(comm)->rank)) std::this_thread::sleep_for(4s);
  end(static_cast<Comm*>(comm));
  return NcclResult::Success;
}
NcclResult ncclCommGetAsyncError(void* comm, NcclResult* state) {
  if (comm == nullptr) return kInvalidArgument;
  *state = static_cast<Comm*>(comm)->state;
  return NcclResult::Success;
}

NcclResult ncclGroupStart() {
  ++group.depth;
  return NcclResult::Success;
}
NcclResult ncclGroupEnd() {
  if (--group.depth > 0) return NcclResult::Success;
  const auto steps = std::exchange(group.steps, {});
  const auto streams = std::exchange(group.streams, {});
  bool failed = false;
  for (const auto& [comm, list] : steps) {
    failed = failed || troubled("call", comm->rank);
    if (!failed && troubled("call-hang", comm->rank)) {  // like NCCL when it connects to a rank that has died
      ++comm->running;
      comm->wait([] { return false; });
      --comm->running;
      failed = true;
    }
    if (!failed) put_into(streams.at(comm), *comm, list);
  }
  return failed ? kSystemError : NcclResult::Success;
}

NcclResult ncclAllReduce(const void* from, void* to, std::size_t count, NcclType type, NcclOp op, void* comm,
                         void* stream) {
  return reduce(from, to, count, type, op, -1, comm, stream);
}
NcclResult ncclReduce(const void* from, void* to, std::size_t count, NcclType type, NcclOp op, int root, void* comm,
                      void* stream) {
  return reduce(from, to, count, type, op, root, comm, stream);
}
NcclResult ncclRedOpCreatePreMulSum(NcclOp* op, void* scalar, NcclType type, int residence, void* comm) {
  if (group.depth > 0) return kInvalidUsage;
  if (residence != 1 || (type != NcclType::Float32 && type != NcclType::Float64)) return kInvalidArgument;
  const std::lock_guard lock(static_cast<Comm*>(comm)->mutex);
  auto& factors = static_cast<Comm*>(comm)->factors;
  const int number = factors.empty() ? kFirstMade : factors.rbegin()->first + 1;
  factors[number] = type == NcclType::Float32 ? *static_cast<float*>(scalar) : *static_cast<double*>(scalar);
  *op = static_cast<NcclOp>(number);
  return NcclResult::Success;
}
NcclResult ncclRedOpDestroy(NcclOp op, void* comm) {
  if (group.depth > 0) return kInvalidUsage;
  const std::lock_guard lock(static_cast<Comm*>(comm)->mutex);
  return static_cast<Comm*>(comm)->factors.erase(static_cast<int>(op)) == 1 ? NcclResult::Success : kInvalidArgument;
}
NcclResult ncclReduceScatter(const void* from, void* to, std::size_t count, NcclType type, NcclOp op, void* comm,
                             void* stream) {
  const std::size_t bytes = count * element_of(type).bytes;
  const std::size_t all = bytes * static_cast<Comm*>(comm)->ranks();
  std::byte *in = nullptr, *out = nullptr;
  if (all > kRoom || !reachable(from, all, in) || !reachable(to, bytes, out)) return kInvalidArgument;
  return add(comm, stream, [=](Comm& own) {
    if (all > 0) std::memcpy(own.input(own.own()), in, all);
    if (!own.meet()) return false;
    fold(own, type, op, count * own.own(), count * (own.own() + 1), out);
    return own.meet();
  });
}
NcclResult ncclBroadcast(const void* from, void* to, std::size_t count, NcclType type, int root, void* comm,
                         void* stream) {
  const std::size_t bytes = count * element_of(type).bytes;
  const bool gives = root == static_cast<Comm*>(comm)->rank;
  std::byte *in = nullptr, *out = nullptr;
  if (bytes > kRoom || (gives && !reachable(from, bytes, in)) || !reachable(to, bytes, out)) return kInvalidArgument;
  return add(comm, stream, [=](Comm& own) {
    if (gives && bytes > 0) std::memcpy(own.input(own.own()), in, bytes);
    if (!own.meet()) return false;
    if (bytes > 0) std::memmove(out, own.input(static_cast<std::size_t>(root)), bytes);
    return own.meet();
  });
}
NcclResult ncclAllGather(const void* from, void* to, std::size_t count, NcclType type, void* comm, void* stream) {
  const std::size_t bytes = count * element_of(type).bytes;
  std::byte *in = nullptr, *out = nullptr;
  if (bytes > kRoom || !reachable(from, bytes, in) || !reachable(to, bytes * static_cast<Comm*>(comm)->ranks(), out)) {
    return kInvalidArgument;
  }
  return add(comm, stream, [=](Comm& own) {
    if (bytes > 0) std::memcpy(own.input(own.own()), in, bytes);
    if (!own.meet()) return false;
    for (std::size_t rank = 0; rank < own.ranks() && bytes > 0; ++rank)
      std::memcpy(out + rank * bytes, own.input(rank), bytes);
    return own.meet();
  });
}
NcclResult ncclSend(const void* from, std::size_t count, NcclType type, int peer, void* comm, void* stream) {
  const std::size_t bytes = count * element_of(type).bytes;
  std::byte* in = nullptr;
  if (bytes > kLetter || !reachable(from, bytes, in)) return kInvalidArgument;
  return add(
      comm, stream,
      [=](Comm& own) {
        const auto to = static_cast<std::size_t>(peer);
        Pair& pair = own.shared().pairs[own.own()][to];
        if (pair.taken.load() != pair.sent.load()) return false;
        std::memcpy(own.letter(own.own(), to), in, bytes);
        ++pair.sent;
        return true;
      },
      2 * peer);
}
NcclResult ncclRecv(void* into, std::size_t count, NcclType type, int peer, void* comm, void* stream) {
  const std::size_t bytes = count * element_of(type).bytes;
  std::byte* out = nullptr;
  if (bytes > kLetter || !reachable(into, bytes, out)) return kInvalidArgument;
  return add(
      comm, stream,
      [=](Comm& own) {
        const auto from = static_cast<std::size_t>(peer);
        Pair& pair = own.shared().pairs[from][own.own()];
        if (pair.taken.load() == pair.sent.load()) return false;
        std::memcpy(out, own.letter(from, own.own()), bytes);
        ++pair.taken;
        return true;
      },
      2 * peer + 1);
}

/// Numbers of this process: groups carried out or begun, and communicators aborted and ended.
int fake_nccl_operations() { return operations; }
int fake_nccl_aborts() { return aborts; }
int fake_nccl_ends() { return ends; }
}
