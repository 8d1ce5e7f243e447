// Buffers on GPUs that the ranks of one host read in place (CUDA's memory for other processes), for small sums where
// NCCL does not serve: each rank copies its input into a buffer of its own, and once all have, a kernel on each rank's
// GPU folds all buffers, in the CPU's order. No GPU waits for another rank's, so a rank that dies hangs none. Used only
// if requested (COHORT_GPU_IPC). Belongs to the thread that runs operations.
#pragma once

#include "comm/api/request.h"
#include "comm/engine/queue.h"
#include "comm/gpu/driver.h"
#include "rendezvous/identity.h"

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace cohort::comm::cuda {

class PeerBuffers {
 public:
  /// Most bytes of one operation or group, where each buffer takes up `room_of` its bytes.
  static constexpr std::size_t kBytes = std::size_t{1} << 20;
  static constexpr std::size_t room_of(std::size_t bytes) noexcept { return (bytes + 63) / 64 * 64; }

  /// True if these, one operation or a group, go by such buffers: the same on all ranks that ask for the same.
  static bool fit(std::span<const DeviceRequest> requests) noexcept;

  /// All ranks make theirs and open each other's, and kernels try whether they read what the others write. Null, on all
  /// ranks, if any cannot, or a driver does not return in half of the operation's time: `why`. Throws what ends the
  /// world.
  static std::shared_ptr<PeerBuffers> make(Gpu& gpu, const rendezvous::Placement& placement, Turn& turn,
                                           std::string& why);
  ~PeerBuffers();
  PeerBuffers(const PeerBuffers&) = delete;
  PeerBuffers& operator=(const PeerBuffers&) = delete;

  /// This rank's buffer for the next operation, of which all ranks know that all take part; what they still read is the
  /// other one, of the operation before.
  std::byte* next() noexcept;
  /// A rank's buffer for this operation; to be read once all ranks have filled theirs.
  const std::byte* of(int rank) const noexcept;

 private:
  PeerBuffers(Gpu& gpu, const rendezvous::Placement& placement) noexcept
      : gpu_(gpu), own_(static_cast<std::size_t>(placement.rank)), bases_(static_cast<std::size_t>(placement.size)) {}
  struct Offer;
  // Functions that may hang in the driver:
  Offer offer();
  void open(std::span<const Offer> offers);
  void write_pattern(const Offer& own);
  void check_sum_of_patterns(std::span<const Offer> offers);

  Gpu& gpu_;
  const std::size_t own_;
  std::vector<std::byte*> bases_;  // by rank; two buffers each
  std::vector<void*> opened_;
  std::size_t half_ = 0;
};

}  // namespace cohort::comm::cuda
