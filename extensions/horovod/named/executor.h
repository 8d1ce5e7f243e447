// Executor: carries out operations that all ranks have requested, and finishes the requests. All ranks run them in the
// same order and with the same fusion; a rank that has joined contributes neutral elements and throws results away.
// Used by the engine's thread only, except `batches`.
#pragma once

#include "horovod/named/execution.h"
#include "horovod/named/requests.h"
#include "horovod/named/rounds.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace cohort::named {

class Executor {
 public:
  /// All arguments outlive this.
  Executor(Communicator& comm, const EngineOptions& options, Requests& requests, const std::atomic<bool>& stopping)
      : comm_(comm),
        options_(options),
        requests_(requests),
        stopping_(stopping),
        rank_(comm.rank()),
        size_(comm.size()) {}

  /// `announcer` throws the error that ends the world, when nothing else would notice it.
  void execute(std::vector<Ready> ready, RoundAnnouncer& announcer);
  /// The communicator's timeout, or a shorter one when the engine ends.
  std::chrono::milliseconds timeout() const;
  /// Number of calls of collectives that carry data.
  std::uint64_t batches() const noexcept { return batches_; }

 private:
  void run_batch(std::span<const Ready> batch, RoundAnnouncer& announcer);
  void carry_out(std::span<const Ready> batch);
  void run_reductions(std::span<const Ready> batch);
  void run_broadcasts(std::span<const Ready> batch);
  void run_all_gather(const Ready& one);
  void run_reduce_scatter(const Ready& one);
  void run_all_to_all(const Ready& one);
  void run_group(const Ready& one);
  Buffer place(const Ready& one, std::vector<std::int64_t> shape);
  void copy_over(const ConstBuffer& from, const Buffer& to);
  std::byte* scratch(std::size_t bytes);

  // GPU memory
  void run_on_gpu(std::span<const Ready> batch, RoundAnnouncer& announcer);
  void run_on_host(std::span<const Ready> batch, RoundAnnouncer& announcer);
  void run_alone(const Ready& one);
  void follow_caller(const Pending& own);

  Communicator& comm_;
  const EngineOptions& options_;
  Requests& requests_;
  const std::atomic<bool>& stopping_;
  const int rank_;
  const int size_;
  GpuStreams streams_;
  std::vector<std::vector<std::byte>> scratch_;  // memory of the running batch
  std::atomic<std::uint64_t> batches_{0};
};

}  // namespace cohort::named
