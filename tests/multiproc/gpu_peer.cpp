// A rank of tools/gpu/gpu-day, which does with a GPU's memory what the other programs do not. Its first argument says
// what:
//   bits BYTES      sums of floats of all kinds, exact and fast, against the host's
//   folds BYTES     the kernels that fold, one rank: their bits, and how fast they are with inputs of so many bytes
//   staging BYTES   operations by way of the host's memory, whole and in pieces, against copies of pinned memory
//   abort           rank 0's stream hangs in the midst of a sum; a second later the last rank gives up
//   kill            likewise, and rank 0 is killed
//   abort-unawaited, kill-unawaited   the same where a stream waits for the sum, and no rank does
//   calls           what a small sum takes of the host's time, where the host waits and where a stream does
// Lines of abort and kill are JSON, with times of the machine's steady clock in seconds.
#include "bench/machine.h"
#include "comm/gpu/chunking.h"
#include "comm/gpu/driver.h"
#include "comm/gpu/fold_launcher.h"
#include "comm/testing/gpu_folds.h"
#include "comm/testing/reference_fold.h"

#include <cohort/init.h>

#include <dlfcn.h>
#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

using namespace cohort;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using comm::cuda::Gpu;
using comm::testing::Bytes;

constexpr auto kNever = Clock::time_point::max();
constexpr auto kUntilHarm = 1s;  // for the operation to be under way on all ranks
constexpr std::size_t kMuch = std::size_t{1} << 20;

double seconds(Clock::time_point at) { return std::chrono::duration<double>(at.time_since_epoch()).count(); }

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

/// Memory of this rank's GPU.
class OnGpu {
 public:
  OnGpu(Communicator& comm, std::size_t bytes)
      : gpu_(Gpu::at(app::bench::gpu_of(comm).index)),
        memory_(comm.allocate(bytes, {DeviceType::CUDA, gpu_.index()})) {}
  Gpu& gpu() const { return gpu_; }
  Buffer buffer(std::int64_t count, DType dtype, void* stream = nullptr) const {
    return {memory_.data(), count, dtype, {DeviceType::CUDA, gpu_.index(), stream}};
  }
  void put(const void* from, std::size_t bytes) const {
    gpu_.wait(*gpu_.copy_to_device(memory_.data(), from, bytes, *gpu_.mark(nullptr)), kNever);
  }
  void get(void* to, std::size_t bytes) const {
    gpu_.wait(*gpu_.copy_to_host(to, memory_.data(), bytes, *gpu_.mark(nullptr)), kNever);
  }

 private:
  Gpu& gpu_;
  Memory memory_;
};

// --- bits ---

std::int64_t different(Communicator& comm, const Bytes& a, const Bytes& b, std::size_t element) {
  std::int64_t count = 0;
  for (std::size_t at = 0; at < a.size(); at += element)
    count += std::memcmp(a.data() + at, b.data() + at, element) != 0 ? 1 : 0;
  comm.all_reduce(std::span(&count, 1)).wait();
  return count;
}

int compare_bits(Communicator& comm, std::size_t most) {
  std::int64_t bad = 0;
  const OnGpu memory(comm, most);
  for (const DType dtype : {DType::Float16, DType::BFloat16, DType::Float32, DType::Float64, DType::Complex64}) {
    for (const std::size_t bytes : {std::size_t{16}, std::size_t{4096}, most}) {
      const auto count = static_cast<std::int64_t>(bytes / size_of(dtype));
      const Bytes input = comm::testing::interesting(dtype, count, 7 + static_cast<std::uint64_t>(comm.rank()));
      Bytes host = input;
      comm.all_reduce(Buffer(host.data(), count, dtype)).wait();
      const auto by = [&](GpuSums sums) {
        Bytes result = input;
        memory.put(input.data(), input.size());
        comm.all_reduce(memory.buffer(count, dtype), {.gpu_sums = sums}).wait();
        memory.get(result.data(), result.size());
        return different(comm, result, host, size_of(dtype));
      };
      const std::int64_t exact = by(GpuSums::Exact), fast = by(GpuSums::Fast);
      bad += exact;
      if (comm.rank() == 0) {
        say(fmt::format("{} ranks, {}[{}]: other bits than the host's: exact {}, fast {} of {} elements", comm.size(),
                        to_string(dtype), count, exact, fast, count * comm.size()));
      }
    }
  }
  return bad == 0 ? 0 : 1;
}

// --- folds ---

/// Bytes read and written in a second, against a copy.
void measure_folds(Gpu& gpu, std::size_t bytes) {
  constexpr std::size_t kMostInputs = 8;
  constexpr int kTurns = 20;
  const comm::cuda::FoldLauncher& folds = comm::cuda::FoldLauncher::on(gpu);
  std::vector<const void*> inputs;
  for (std::size_t k = 0; k < kMostInputs; ++k) inputs.push_back(gpu.allocate(bytes, kNever));
  void* const output = gpu.allocate(bytes, kNever);
  void* const stream = gpu.make_stream();
  const auto rate = [&](std::size_t moved, const std::function<void()>& body) {
    double best = 1e9;
    for (int turn = 0; turn < 3; ++turn) {
      gpu.wait(*gpu.mark(nullptr), kNever);
      gpu.wait(*gpu.mark(stream), kNever);
      const auto begin = Clock::now();
      for (int i = 0; i < kTurns; ++i) body();
      gpu.wait(*gpu.mark(stream), kNever);
      best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count() / kTurns);
    }
    return static_cast<double>(moved) / best / 1e9;
  };
  const double copy = rate(2 * bytes, [&] { gpu.copy_within(output, inputs[0], bytes, stream); });
  say(fmt::format("a copy of {} bytes: {:.0f} GB/s read and written", bytes, copy));
  for (const DType dtype : {DType::Float32, DType::BFloat16, DType::Float16, DType::Float64, DType::Int8}) {
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Max}) {
      std::string line = fmt::format("{} {}:", to_string(dtype), to_string(op));
      for (const std::size_t count : {std::size_t{2}, std::size_t{3}, std::size_t{4}, kMostInputs}) {
        comm::FoldJob job;
        job.dtype = dtype;
        job.op = op;
        job.inputs = std::span(inputs).first(count);
        job.outputs = {&output, 1};
        job.count = static_cast<std::int64_t>(bytes / size_of(dtype));
        const double reached = rate((count + 1) * bytes, [&] { folds.fold(job, stream); });
        line += fmt::format(" {} inputs {:.0f} GB/s ({:.0f} %)", count, reached, 100 * reached / copy);
      }
      say(line);
    }
  }
  std::uint32_t* const flag = static_cast<std::uint32_t*>(output);
  const ConstBuffer values(inputs[0], static_cast<std::int64_t>(bytes / 4), DType::Float32);
  say(fmt::format("whether float32 is finite: {:.0f} GB/s read",
                  rate(bytes, [&] { folds.look(values, flag, stream); })));
}

int try_kernels(Communicator& comm, std::size_t bytes) {
  Gpu& gpu = Gpu::at(app::bench::gpu_of(comm).index);
  const auto begin = Clock::now();
  comm::testing::GpuFolds folds(gpu);
  const auto loaded = Clock::now();
  int wrong = 0;
  const auto tell = [&](const std::string& text) {
    if (++wrong <= 20) say(text);
  };
  const int tried = try_folds(folds, tell) + try_halves(folds, tell);
  say(fmt::format(
      "the kernels were there in {:.2f} s; {} folds of all types and reductions, and of all halves: {} wrong",
      std::chrono::duration<double>(loaded - begin).count(), tried, wrong));
  measure_folds(gpu, bytes);
  return wrong == 0 ? 0 : 1;
}

// --- staging ---

double best_time(Communicator& comm, const std::function<void()>& body) {
  double best = 1e9;
  for (int turn = 0; turn < 5; ++turn) {
    comm.barrier().wait();
    const auto begin = Clock::now();
    body();
    double time = std::chrono::duration<double>(Clock::now() - begin).count();
    comm.all_reduce(std::span(&time, 1), {.op = ReduceOp::Max}).wait();
    best = std::min(best, time);
  }
  return best;
}

/// Copies of half of the memory each way, at once.
void copy_both_ways(const OnGpu& memory, std::byte* host, std::size_t half) {
  auto* const device = static_cast<std::byte*>(memory.buffer(0, DType::Int8).data);
  const comm::cuda::MarkPtr begin = memory.gpu().mark(nullptr);
  const comm::cuda::MarkPtr ends[] = {memory.gpu().copy_to_host(host, device, half, *begin),
                                      memory.gpu().copy_to_device(device + half, host + half, half, *begin)};
  for (const auto& end : ends) memory.gpu().wait(*end, kNever);
}

void measure_staging(Communicator& comm, std::size_t bytes) {
  const OnGpu memory(comm, bytes), other(comm, bytes);
  const Memory shared = comm.allocate(bytes);
  Bytes heap(bytes);
  const auto count = static_cast<std::int64_t>(bytes / sizeof(float));
  const auto say_first = [&](const std::string& text) {
    if (comm.rank() == 0) say(text);
  };
  const auto rate = [bytes](double time) { return static_cast<double>(bytes) / time / 1e9; };
  const double loose_to_host = best_time(comm, [&] { memory.get(heap.data(), bytes); });
  const double loose_to_gpu = best_time(comm, [&] { memory.put(heap.data(), bytes); });
  const bool pinned = memory.gpu().pin(shared.data(), bytes);
  const double to_host = best_time(comm, [&] { memory.get(shared.data(), bytes); });
  const double to_gpu = best_time(comm, [&] { memory.put(shared.data(), bytes); });
  const double halves =
      best_time(comm, [&] { copy_both_ways(memory, static_cast<std::byte*>(shared.data()), bytes / 2); });
  if (pinned) memory.gpu().unpin(shared.data());
  say_first(fmt::format("{} ranks, {} bytes each, all at once; a segment that ranks share is {}pinned", comm.size(),
                        bytes, pinned ? "" : "NOT "));
  say_first(fmt::format("copies of it: to the host {:.2f} GB/s, to the GPU {:.2f} GB/s; both at once {:.2f} GB/s each",
                        rate(to_host), rate(to_gpu), rate(2 * halves)));
  say_first(fmt::format("copies of other memory: to the host {:.2f} GB/s, to the GPU {:.2f} GB/s", rate(loose_to_host),
                        rate(loose_to_gpu)));
  const double copies = std::max({to_host, to_gpu, 2 * halves});
  struct Measured {
    std::string_view name;
    std::function<void(Buffer)> on;
  };
  const Measured operations[] = {
      {"all_reduce", [&](Buffer data) { comm.all_reduce(data).wait(); }},
      {"broadcast", [&](Buffer data) { comm.broadcast(data).wait(); }},
      {"all_to_all",
       [&](Buffer data) {
         const bool on_gpu = data.device.type == DeviceType::CUDA;
         comm.all_to_all(data,
                         on_gpu ? other.buffer(count, DType::Float32) : Buffer(heap.data(), count, DType::Float32))
             .wait();
       }},
  };
  for (const Measured& each : operations) {
    const double host = best_time(comm, [&] { each.on(Buffer(shared.data(), count, DType::Float32)); });
    say_first(fmt::format("{}: {:.2f} GB/s of the host's memory", each.name, rate(host)));
    const std::size_t usual = comm::cuda::piece_bytes();
    for (const std::size_t piece : {std::size_t{0}, kMuch, 4 * kMuch, 16 * kMuch}) {
      comm::cuda::set_piece_bytes(piece != 0 ? piece : 2 * bytes);
      const double time = best_time(comm, [&] { each.on(memory.buffer(count, DType::Float32)); });
      say_first(fmt::format("{} of a GPU's, {}: {:.2f} GB/s; {:.2f} of the time of the copies, {:.2f} of the host's",
                            each.name, piece != 0 ? fmt::format("pieces of {} MiB", piece / kMuch) : "whole",
                            rate(time), time / copies, time / host));
    }
    comm::cuda::set_piece_bytes(usual);
  }
}

// --- what hangs ---

/// Nothing comes through the stream until `go`.
void hold(const Gpu& gpu, void* stream, std::atomic<bool>& go) {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW);
  const auto launch = reinterpret_cast<int (*)(void*, void (*)(void*), void*)>(::dlsym(driver, "cuLaunchHostFunc"));
  const comm::cuda::InGpu here(gpu);
  const int status = launch(
      stream,
      [](void* flag) {
        while (!static_cast<std::atomic<bool>*>(flag)->load()) std::this_thread::sleep_for(1ms);
      },
      &go);
  if (status != 0) throw std::runtime_error(fmt::format("cuLaunchHostFunc: error {}", status));
}

int come_to_harm(Communicator& comm, bool killed, bool awaited) {
  static std::atomic<bool> go{false};
  ::signal(SIGTERM, SIG_IGN);  // the launcher ends a job one of whose ranks was killed; its grace is enough to tell
  const OnGpu memory(comm, kMuch);
  const auto count = static_cast<std::int64_t>(kMuch / sizeof(float));
  comm.all_reduce(memory.buffer(count, DType::Float32), {.timeout = 120s}).wait();  // NCCL has started
  comm.barrier().wait();
  void* const stream = memory.gpu().make_stream();
  if (comm.rank() == 0) hold(memory.gpu(), stream, go);
  Work work = comm.all_reduce(memory.buffer(count, DType::Float32, stream), {.timeout = 60s});
  const bool does_harm = comm.rank() == (killed ? 0 : comm.size() - 1);
  std::thread harm([&comm, does_harm, killed] {
    if (!does_harm) return;
    std::this_thread::sleep_for(kUntilHarm);
    say(fmt::format("{{\"harm\": {}}}", seconds(Clock::now())));
    if (killed) ::raise(SIGKILL);
    comm.abort("it was to be given up");
  });
  nlohmann::json told = {{"rank", comm.rank()}, {"error", "none"}};
  std::optional<Error> failed;
  try {
    if (awaited) {
      work.wait();
    } else {
      work.synchronize({DeviceType::CUDA, memory.gpu().index(), memory.gpu().make_stream()});
      while (!work.done()) std::this_thread::sleep_for(1ms);
      failed = work.error();
    }
  } catch (const Error& error) {
    failed = error;
  }
  if (failed) {
    told["error"] = to_string(failed->code());
    told["text"] = failed->what();
  }
  told["at"] = seconds(Clock::now());
  say(told.dump());
  go = true;
  harm.join();
  return told["error"] == (killed ? "PeerLost" : "Aborted") ? 0 : 1;
}

// --- who waits ---

int measure_calls(Communicator& comm) {
  constexpr int kCalls = 200;
  bool right = true;
  for (const std::size_t bytes : {std::size_t{4} << 10, kMuch}) {
    const OnGpu memory(comm, bytes);
    const auto count = static_cast<std::int64_t>(bytes / sizeof(float));
    void* const stream = memory.gpu().make_stream();
    const Buffer buffer = memory.buffer(count, DType::Float32, stream);
    const std::vector<float> ones(static_cast<std::size_t>(count), 1);
    memory.put(ones.data(), bytes);
    const auto call = [&] { return comm.all_reduce(buffer, {.op = ReduceOp::Average}); };
    const auto per_call = [](double seconds) { return seconds / kCalls * 1e6; };
    const double waiting = best_time(comm, [&] {
      for (int i = 0; i < kCalls; ++i) call().wait();
    });
    double of_host = 1e9;
    const double ordering = best_time(comm, [&] {
      const auto begun = Clock::now();
      for (int i = 0; i < kCalls - 1; ++i) call().synchronize(buffer.device);
      of_host = std::min(of_host, std::chrono::duration<double>(Clock::now() - begun).count());
      call().wait();
    });
    std::vector<float> values(ones.size());
    memory.get(values.data(), bytes);
    right = right && values == ones;
    memory.gpu().end_stream(stream);
    if (comm.rank() != 0) continue;
    say(
        fmt::format("{} ranks, all_reduce(float32[{}]), us a call: {:.1f} where the host waits, {:.1f} where a stream "
                    "does, of which the host has {:.1f}",
                    comm.size(), count, per_call(waiting), per_call(ordering), per_call(of_host)));
  }
  if (!right) say("averages of ones are not ones");
  return right ? 0 : 1;
}

int run(const std::string_view what, std::size_t bytes) {
  if (what == "staging") ::setenv("COHORT_NCCL", "off", 1);
  Communicator comm = init();
  if (what == "bits") return compare_bits(comm, bytes);
  if (what == "folds") return try_kernels(comm, bytes);
  if (what == "calls") return measure_calls(comm);
  if (what != "staging") return come_to_harm(comm, what.starts_with("kill"), !what.ends_with("unawaited"));
  measure_staging(comm, bytes);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  constexpr std::string_view kAll[] = {"bits", "folds",           "staging",        "abort",
                                       "kill", "abort-unawaited", "kill-unawaited", "calls"};
  if (std::find(std::begin(kAll), std::end(kAll), what) == std::end(kAll)) {
    std::fprintf(stderr,
                 "usage: gpu_peer bits BYTES | folds BYTES | staging BYTES | abort[-unawaited] | kill[-unawaited] | "
                 "calls -- under "
                 "cohort run\n");
    return 2;
  }
  try {
    return run(what, argc > 2 ? std::strtoull(argv[2], nullptr, 10) : kMuch);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_peer: %s\n", error.what());
    return 1;
  }
}
