// GPU buffers that the ranks of one host read in place (CUDA IPC memory), for small sums if NCCL is not available. Each
// rank copies its input into its own buffer; when all have done so, a kernel on each rank's GPU folds all buffers, in
// the CPU's order. No GPU waits for another rank's GPU, so a rank that dies hangs none. Used only if requested
// (COHORT_GPU_IPC). Belongs to the thread that runs operations.
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
  /// Most bytes of one operation or group; each input counts as `room_of` its bytes.
  static constexpr std::size_t kBytes = std::size_t{1} << 20;
  static constexpr std::size_t room_of(std::size_t bytes) noexcept { return (bytes + 63) / 64 * 64; }

  /// True if one operation or a group can use such buffers. The same on all ranks for the same requests.
  static bool fit(std::span<const DeviceRequest> requests) noexcept;

  /// Makes the buffers on all ranks: each rank opens the others' buffers, and kernels test whether they read what the
  /// others write. Returns null on all ranks, with the reason in `why`, if any rank fails, or a driver call does not
  /// return in half of the operation's time. Throws the error that ends the world.
  static std::shared_ptr<PeerBuffers> make(Gpu& gpu, const rendezvous::Placement& placement, Turn& turn,
                                           std::string& why);
  ~PeerBuffers();
  PeerBuffers(const PeerBuffers&) = delete;
  PeerBuffers& operator=(const PeerBuffers&) = delete;

  /// Returns this rank's buffer for the next operation, after all ranks have agreed on it. The other ranks may still
  /// read this rank's other buffer, of the operation before.
  std::byte* next() noexcept;
  /// Returns a rank's buffer for this operation; read it only after all ranks have filled theirs.
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
